"""The DFlash2 block drafter: one pass over [anchor, mask x (B - 1)] proposes a whole block.

Context comes from tapped residual streams of the target: c = norm(fc(taps)) gives every layer its keys and values at
the token's position, without the layer's own input norm or convolution. Row r >= 1 of the block predicts the token at
its own position, and all rows of a block see each other. A low-rank selector scores pairs of neighbouring candidates,
so that a coherent path can be picked.

All norms multiply with plain weights. What can go wrong: the convolution must not cross the block start, and its block
is the drafter's own, however many rows the target verifies.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

from soloist.checkpoint.config import DrafterConfig
from soloist.models.layers import Loader
from soloist.ops.linear import DenseWeight, Weight
from soloist.ops.norms import plain_rms_norm
from soloist.ops.products import Linear
from soloist.ops.rope import apply_rope, inverse_frequencies, rope_tables
from soloist.ops.upload import upload

# (q [R, block, n, D], k, v [R, block, kv, D]) -> o [R, block, n, D]
Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


class GroupedConv:
    """Dynamic grouped causal convolution around a sublayer; the coefficients come from the sublayer's input.

    Taps are kept oldest first, the order in which a window over the rows meets them. Rows of `projection` are (group,
    tap, side), so that what one group needs lies side by side; taps are padded to a power of two, `padded`. `base` fp32
    [2, taps, H].
    """

    def __init__(self, load: Loader, prefix: str, config: DrafterConfig) -> None:
        self.taps, self.group = config.conv_taps, config.conv_group
        self.groups = config.hidden_size // config.conv_group
        self.padded = 1 << (self.taps - 1).bit_length()
        kernel = load.source.weight(f"{prefix}.kernel_projection").dequantize()
        kernel = kernel.view(2, self.taps, self.groups, -1).flip(1).permute(2, 1, 0, 3)
        kernel = F.pad(kernel, (0, 0, 0, 0, 0, self.padded - self.taps))
        self.projection = load.of(DenseWeight(kernel.flatten(0, 2).contiguous()))
        self.base = load.vector(f"{prefix}.base_kernel").flip(1).contiguous()

    def coefficients(self, h: torch.Tensor, block: int) -> tuple[torch.Tensor, torch.Tensor]:
        """h [R * block, H] -> fp32 [R, block, taps, groups, group] for each side: before the sublayer, after it."""
        d = self.projection(h).float().view(-1, block, self.groups, self.padded, 2, 1)[:, :, :, : self.taps]
        before, after = d.transpose(2, 3).unbind(4)
        base = self.base.view(2, self.taps, self.groups, self.group)
        return before + base[0], after + base[1]

    def __call__(self, x: torch.Tensor, coefficients: torch.Tensor) -> torch.Tensor:
        """x [R * block, H] -> sum over taps t of coefficient[t] * x[row - t] within each block; fp32 inside."""
        requests, block, taps, groups, group = coefficients.shape
        rows = F.pad(x.view(requests, block, groups, group), (0, 0, 0, 0, taps - 1, 0))
        windows = rows.unfold(1, block, 1).permute(0, 4, 1, 2, 3)
        return (windows * coefficients).sum(2).to(x.dtype).view(x.shape)


class BlockLayer:
    """One decoder layer of the drafter: attention over context and block, then a SwiGLU MLP, both inside a conv."""

    def __init__(self, load: Loader, prefix: str, config: DrafterConfig) -> None:
        c = config
        self.heads, self.kv_heads, self.dim, self.eps = c.num_heads, c.num_kv_heads, c.head_dim, c.eps
        self.input_norm = load.factor(f"{prefix}.input_layernorm.weight", offset=0.0)
        self.post_norm = load.factor(f"{prefix}.post_attention_layernorm.weight", offset=0.0)
        self.attention_conv = GroupedConv(load, f"{prefix}.attention_conv", c)
        self.mlp_conv = GroupedConv(load, f"{prefix}.mlp_conv", c)
        self.qkv = load.linear([f"{prefix}.self_attn.{n}_proj" for n in "qkv"])
        self.out = load.linear([f"{prefix}.self_attn.o_proj"])
        self.gate_up = load.pair([f"{prefix}.mlp.gate_proj", f"{prefix}.mlp.up_proj"])
        self.down = load.linear([f"{prefix}.mlp.down_proj"])
        q, k = (load.factor(f"{prefix}.self_attn.{n}_norm.weight", offset=0.0) for n in "qk")
        self.qk_norm = torch.cat([q.expand(self.heads, -1), k.expand(self.kv_heads, -1)])

    def __call__(
        self,
        x: torch.Tensor,
        block: int,
        cos: torch.Tensor,
        sin: torch.Tensor,
        attend: Attend,
    ) -> torch.Tensor:
        """x [R * block, H]; `attend` sees to the context."""
        rows, width = x.shape[0], self.heads * self.dim
        h = plain_rms_norm(x, self.input_norm, self.eps)
        before, after = self.attention_conv.coefficients(h, block)
        qk, v = self.qkv(self.attention_conv(h, before)).split(
            [width + self.kv_heads * self.dim, self.kv_heads * self.dim], dim=-1
        )
        qk = plain_rms_norm(qk.view(rows, self.heads + self.kv_heads, self.dim), self.qk_norm, self.eps)
        qk = apply_rope(qk, cos, sin).view(-1, block, self.heads + self.kv_heads, self.dim)
        v = v.view(-1, block, self.kv_heads, self.dim)
        o = attend(qk[:, :, : self.heads], qk[:, :, self.heads :], v)
        x = x + self.attention_conv(self.out(o.reshape(rows, width)), after)
        h = plain_rms_norm(x, self.post_norm, self.eps)
        before, after = self.mlp_conv.coefficients(h, block)
        gate, up = self.gate_up(self.mlp_conv(h, before)).chunk(2, -1)
        return x + self.mlp_conv(self.down(F.silu(gate).mul_(up)), after)


class DFlash2:
    """The loaded drafter. Embedding and head are the target's; `head` with `ids` may be a truncated head."""

    def __init__(
        self,
        load: Loader,
        config: DrafterConfig,
        embedding: Weight,
        head: Linear,
        ids: torch.Tensor | None = None,
    ) -> None:
        c = config
        self.config, self.dtype, self.device = c, load.dtype, load.device
        self.embedding, self.head, self.ids = embedding, head, ids
        self.fc = load.linear(["fc"])
        self.hidden_norm = load.factor("hidden_norm.weight", offset=0.0)
        self.norm = load.factor("norm.weight", offset=0.0)
        self.layers = [BlockLayer(load, f"layers.{i}", c) for i in range(c.num_layers)]
        # Context rows are the same for every layer: one product gives all their keys, then all their values.
        self.context_kv = load.linear([f"layers.{i}.self_attn.{n}_proj" for n in "kv" for i in range(c.num_layers)])
        self.context_norm = torch.cat([layer.qk_norm[c.num_heads :] for layer in self.layers])
        self.selector = load.linear(["candidate_selector.hidden_projection"])
        self.predecessors, self.successors = (
            upload(load.source.tensor(f"candidate_selector.{name}_codebook").to(load.dtype).contiguous(), load.device)
            for name in ("predecessor", "successor")
        )
        self.inverse = inverse_frequencies(c.rope_dim, c.rope_theta, load.device)

    @torch.inference_mode()
    def context(self, taps: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """taps [n, tapped layers * H] at `positions` int64 [n] -> keys, values [n, layers, kv, D]."""
        c, n = self.config, taps.shape[0]
        features = plain_rms_norm(self.fc(taps.to(self.dtype)), self.hidden_norm, c.eps)
        k, v = self.context_kv(features).view(n, 2, c.num_layers * c.num_kv_heads, c.head_dim).unbind(1)
        k = apply_rope(plain_rms_norm(k, self.context_norm, c.eps), *rope_tables(positions, self.inverse))
        shape = (n, c.num_layers, c.num_kv_heads, c.head_dim)
        return k.view(shape), v.view(shape)

    @torch.inference_mode()
    def block(
        self,
        anchors: torch.Tensor,
        positions: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        visible: torch.Tensor,
    ) -> torch.Tensor:
        """One block per request.

        anchors, positions int64 [R]: the newest token and its position; keys, values [layers, R, kv, L, D]: context;
        visible bool [R, block, L]: which of it each row sees. Returns y [R, block - 1, H], normed, one row per slot.
        """
        c, block = self.config, self.config.block_size
        own = torch.ones(block, block, dtype=torch.bool, device=anchors.device)
        if c.causal:
            own = own.tril_()
        visible = torch.cat([visible, own.expand(anchors.numel(), -1, -1)], -1).unsqueeze(1)

        def attend(layer: int) -> Attend:
            def sdpa(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
                return F.scaled_dot_product_attention(
                    q.transpose(1, 2),
                    torch.cat([keys[layer], k.transpose(1, 2)], 2),
                    torch.cat([values[layer], v.transpose(1, 2)], 2),
                    attn_mask=visible,
                    enable_gqa=True,
                ).transpose(1, 2)

            return sdpa

        tokens = torch.full((anchors.numel(), block), c.mask_token_id, device=anchors.device)
        tokens[:, 0] = anchors
        rows = positions.unsqueeze(-1) + torch.arange(block, device=positions.device)
        cos, sin = rope_tables(rows.flatten(), self.inverse)
        x = self.embedding.rows(tokens.flatten(), self.dtype)
        if c.embedding_scale != 1.0:
            x = x * c.embedding_scale
        for i, layer in enumerate(self.layers):
            x = layer(x, block, cos, sin, attend(i))
        return plain_rms_norm(x, self.norm, c.eps).view(anchors.numel(), block, -1)[:, 1:]

    @torch.inference_mode()
    def candidates(self, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """y [R, S, H] -> the selector's top-k token ids int64 [R, S, K] and their unary scores fp32 [R, S, K]."""
        c = self.config
        values, places = self.head(y.flatten(0, 1)).float().topk(c.selector_top_k, dim=-1)
        scores = values * c.output_multiplier
        if c.softcap > 0:
            scores = c.softcap * torch.tanh(scores / c.softcap)
        ids = places if self.ids is None else self.ids[places]
        each = (*y.shape[:2], c.selector_top_k)
        return ids.view(each), scores.view(each)

    @torch.inference_mode()
    def edges(self, anchors: torch.Tensor, y: torch.Tensor, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Scores [R, S, K, K] fp32 of taking candidate b (last dim) of slot s after candidate a of slot s - 1.

        In slot 0 the predecessor is the anchor, and all rows a are the same.
        """
        before = torch.cat([anchors[:, None, None].expand(-1, 1, ids.shape[-1]), ids[:, :-1]], 1)
        hidden = self.selector(y.flatten(0, 1)).view(*y.shape[:2], 1, -1)
        pairs = (self.predecessors[before] * hidden) @ self.successors[ids].transpose(-1, -2)
        return scores.unsqueeze(-2) + pairs.float()
