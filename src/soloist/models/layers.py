"""The blocks of a Qwen3.5-family decoder: gated attention, Gated DeltaNet, MLP.

A block holds loaded products and norm factors and computes one thing for flat rows; where the keys and
states come from is the caller's business (`qwen3_5.py` for the target, `mtp.py` for the draft module).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
import torch.nn.functional as F

from soloist.checkpoint.config import ModelConfig
from soloist.ops.conv import ancestor_conv, causal_conv
from soloist.ops.gated_delta import DeltaInputs
from soloist.ops.linear import Weight
from soloist.ops.norms import gated_rms_norm, l2_normalise, rms_norm
from soloist.ops.products import Linear, product_class, stack_dense
from soloist.ops.rope import apply_rope

LANES = 32


class Source(Protocol):
    """Where weights come from: a checkpoint with canonical names."""

    def weight(self, module: str) -> Weight: ...

    def tensor(self, name: str) -> torch.Tensor: ...


class Loader:
    """Turns modules of a checkpoint into products and norm factors for one device and dtype."""

    def __init__(self, source: Source, device: torch.device, dtype: torch.dtype, product: str = "auto") -> None:
        self.source, self.device, self.dtype = source, device, dtype
        kind = product_class(product, device, dtype)
        self.product: str = kind.name
        self.make: Callable[[Weight, torch.device, torch.dtype], Linear] = kind
        # Weights are dequantised here, so matrices of any form may share one product.
        self.mixes_forms = True

    def linear(self, modules: Sequence[str], pad: int = 1) -> Linear:
        """One product over the stacked rows of `modules`, each padded with zero rows to a multiple of `pad`."""
        return self.of(stack_dense([self.source.weight(m) for m in modules], pad))

    def pair(self, modules: Sequence[str]) -> Linear:
        """`linear` of a gate and an up projection; a loader may lay their rows out so that they meet."""
        return self.linear(modules)

    def of(self, weight: Weight) -> Linear:
        """A product over a weight at hand."""
        return self.make(weight, self.device, self.dtype)

    def table(self, module: str) -> Weight:
        """An embedding on the device, in the form in which it is stored."""
        return self.source.weight(module).to(self.device)

    def factor(self, name: str, offset: float = 1.0) -> torch.Tensor:
        """A norm weight as the factor to multiply with, fp32: zero-centred weights get `offset` 1, plain ones 0."""
        return self.source.tensor(name).to(self.device, torch.float32) + offset

    def vector(self, name: str) -> torch.Tensor:
        return self.source.tensor(name).to(self.device, torch.float32)


def _lanes(width: int) -> int:
    """`width` rounded up to whole SIMD lanes."""
    return -(-width // LANES) * LANES


class Attention:
    """Projections of gated attention: q with its gate per head, k, v; q/k norms, partial RoPE, output gate."""

    def __init__(self, load: Loader, prefix: str, config: ModelConfig) -> None:
        c = config
        self.heads, self.kv_heads, self.dim, self.eps = c.num_heads, c.num_kv_heads, c.head_dim, c.eps
        self.scale = c.head_dim**-0.5
        self.qkv = load.linear([f"{prefix}.{n}_proj" for n in "qkv"])
        self.out = load.linear([f"{prefix}.o_proj"])
        q, k = load.factor(f"{prefix}.q_norm.weight"), load.factor(f"{prefix}.k_norm.weight")
        # One norm over q and k heads together: a factor per head.
        self.factors = torch.cat([q.expand(self.heads, -1), k.expand(self.kv_heads, -1)])

    def products(self) -> tuple[Linear, ...]:
        return self.qkv, self.out

    def project(
        self, h: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """h [T, H] normed -> q [T, n, D], gate [T, n, D], k, v [T, kv, D]; q and k normed and rotated."""
        rows = h.shape[0]
        qg, k, v = self.qkv(h).split(
            [2 * self.heads * self.dim, self.kv_heads * self.dim, self.kv_heads * self.dim], dim=-1
        )
        q, gate = qg.view(rows, self.heads, 2 * self.dim).chunk(2, -1)
        qk = torch.cat([q, k.view(rows, self.kv_heads, self.dim)], 1)
        qk = apply_rope(rms_norm(qk, self.factors, self.eps), cos, sin)
        return qk[:, : self.heads], gate, qk[:, self.heads :], v.view(rows, self.kv_heads, self.dim)

    def finish(self, o: torch.Tensor, gate: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """residual + (o * sigmoid(gate)) Wo^T."""
        gated = (o.float() * torch.sigmoid(gate.float())).to(o.dtype)
        return self.out(gated.view(o.shape[0], -1), residual)


class DeltaNet:
    """Projections, short convolution and output norm of a Gated DeltaNet layer."""

    def __init__(self, load: Loader, prefix: str, config: ModelConfig) -> None:
        c = config
        self.key_heads, self.heads = c.linear_key_heads, c.linear_value_heads
        self.dk, self.dv, self.eps, self.act = c.linear_key_dim, c.linear_value_dim, c.eps, c.gate_activation
        self.channels = c.conv_channels
        wide = [f"{prefix}.in_proj_qkv", f"{prefix}.in_proj_z"]
        narrow = [f"{prefix}.in_proj_b", f"{prefix}.in_proj_a"]
        # b and a are padded to whole SIMD lanes: softplus differs between vector body and scalar tail.
        self.ba = None if load.mixes_forms else load.linear(narrow, pad=LANES)
        self.qkvz = load.linear(wide + narrow, pad=LANES) if load.mixes_forms else load.linear(wide)
        self.out = load.linear([f"{prefix}.out_proj"])
        width, values = _lanes(self.heads), self.heads * self.dv
        self._widths = [_lanes(self.channels), _lanes(values), width, width]
        self.negative_a = F.pad(-load.vector(f"{prefix}.A_log").exp(), (0, width - self.heads))
        self.dt_bias = F.pad(load.vector(f"{prefix}.dt_bias"), (0, width - self.heads))
        self.conv = load.vector(f"{prefix}.conv1d.weight").squeeze(1).t().contiguous()
        self.norm = load.factor(f"{prefix}.norm.weight", offset=0.0)
        scale = torch.ones(2 * self.key_heads, 1, device=load.device)
        scale[: self.key_heads] = self.dk**-0.5
        self.qk_scale = scale

    def products(self) -> tuple[Linear, ...]:
        return (self.qkvz, self.out) if self.ba is None else (self.qkvz, self.ba, self.out)

    def project(self, h: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """h [T, H] normed -> conv inputs u [T, C], z [T, Hv * dv], log-decay g [T, Hv], beta [T, Hv]."""
        if self.ba is None:
            u, z, b, a = self.qkvz(h).split(self._widths, dim=-1)
            u, z = u[:, : self.channels], z[:, : self.heads * self.dv]
        else:
            u, z = self.qkvz(h).split([self.channels, self.heads * self.dv], dim=-1)
            b, a = self.ba(h).chunk(2, -1)
        beta = torch.sigmoid(b.float())
        g = F.softplus(a.float() + self.dt_bias).mul_(self.negative_a)
        return u, z, g, beta

    def heads_of(self, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Convolved rows y [T, C] -> q, k [T, Hv, dk] normalised and expanded to value heads, v [T, Hv, dv]; fp32."""
        rows, width = y.shape[0], 2 * self.key_heads * self.dk
        qk = l2_normalise(y[:, :width].float().reshape(rows, 2 * self.key_heads, self.dk), self.qk_scale)
        if self.heads != self.key_heads:
            qk = qk.repeat_interleave(self.heads // self.key_heads, 1)
        return qk[:, : self.heads], qk[:, self.heads :], y[:, width:].float().reshape(rows, self.heads, self.dv)

    def verify_inputs(
        self, h: torch.Tensor, history: torch.Tensor, taps: torch.Tensor
    ) -> tuple[DeltaInputs, torch.Tensor, torch.Tensor]:
        """Rows of a running step: recurrence inputs, z, and the convolution rows [R*(K-1) + T, C] for the record."""
        u, z, g, beta = self.project(h)
        rows = torch.cat([history, u])
        q, k, v = self.heads_of(ancestor_conv(rows, taps, self.conv))
        return DeltaInputs(q, k, v, g.exp()[:, : self.heads], beta[:, : self.heads]), z, rows

    def prefill_inputs(
        self, h: torch.Tensor, history: torch.Tensor, valid: int
    ) -> tuple[DeltaInputs, torch.Tensor, torch.Tensor]:
        """Consecutive prompt rows; `decay` holds the log-decay g here. Padding rows get beta = g = 0.

        Also returns z and the K-1 convolution columns as of row `valid`.
        """
        u, z, g, beta = self.project(h)
        q, k, v = self.heads_of(causal_conv(u, history, self.conv))
        if valid < h.shape[0]:
            g[valid:] = 0.0
            beta[valid:] = 0.0
        columns = torch.cat([history, u[:valid]])[-history.shape[0] :]
        return DeltaInputs(q, k, v, g[:, : self.heads], beta[:, : self.heads]), z, columns

    def finish(self, o: torch.Tensor, z: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """residual + (gated norm of o [T, Hv, dv]) Wout^T."""
        n = gated_rms_norm(o, self.norm, z.reshape(o.shape), self.eps, self.act)
        return self.out(n.to(residual.dtype).view(o.shape[0], -1), residual)


class MLP:
    """(silu(u Wg^T) * (u Wu^T)) Wd^T, gate and up stacked into one product."""

    def __init__(self, load: Loader, prefix: str) -> None:
        self.gate_up = load.pair([f"{prefix}.gate_proj", f"{prefix}.up_proj"])
        self.down = load.linear([f"{prefix}.down_proj"])

    def __call__(self, u: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        gate, up = self.gate_up(u).chunk(2, -1)
        return self.down(F.silu(gate).mul_(up), residual)


class DecoderNorms:
    """The two pre-norms of a decoder layer."""

    def __init__(self, load: Loader, prefix: str, eps: float) -> None:
        self.eps = eps
        self.mixer_factor = load.factor(f"{prefix}.input_layernorm.weight")
        self.mlp_factor = load.factor(f"{prefix}.post_attention_layernorm.weight")

    def mixer(self, x: torch.Tensor) -> torch.Tensor:
        return rms_norm(x, self.mixer_factor, self.eps)

    def mlp(self, x: torch.Tensor) -> torch.Tensor:
        return rms_norm(x, self.mlp_factor, self.eps)
