"""RMS norms, in fp32 whatever the activations are, with one rounding at the end.

The family mixes two conventions: zero-centred weights applied as (1 + w) and plain weights applied
as w. The difference is settled at load: every function here takes the factor to multiply with.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F


def _inverse_rms(x: torch.Tensor, eps: float) -> torch.Tensor:
    """1 / sqrt(mean(x^2) + eps) over the last dim, kept; x fp32. One reduction and three tiny ops on a CPU."""
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True).mul_(x.shape[-1] ** -0.5)
    return norm.square_().add_(eps).rsqrt_()


def rms_norm(x: torch.Tensor, factor: torch.Tensor, eps: float) -> torch.Tensor:
    """y = x / rms(x) * factor over the last dim. x [..., D]; factor [D] fp32; returns x's dtype."""
    if x.is_cuda:
        from soloist.ops.triton.norms import norm as on_card

        return on_card(x, factor, eps)
    x32 = x.float()
    return (x32 * _inverse_rms(x32, eps)).mul_(factor).to(x.dtype)


def plain_rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """The Qwen3 order of the DFlash2 drafter: normalise in fp32, round to x's dtype, then multiply with `weight`."""
    if x.is_cuda:
        from soloist.ops.triton.norms import norm as on_card

        return on_card(x, weight, eps, plain=True)
    x32 = x.float()
    return (x32 * _inverse_rms(x32, eps)).to(x.dtype) * weight.to(x.dtype)


def gated_rms_norm(x: torch.Tensor, weight: torch.Tensor, gate: torch.Tensor, eps: float, act: str) -> torch.Tensor:
    """DeltaNet's output norm: w * x / rms(x) * act(gate). x, gate [T, H, D]; weight [D] plain; fp32 inside."""
    if x.is_cuda:
        from soloist.ops.triton.norms import norm as on_card

        return on_card(x, weight, eps, gate=gate, act=act)
    x32 = x.float()
    y = (x32 * _inverse_rms(x32, eps)).mul_(weight)
    gate32 = gate.float()
    return y.mul_(F.silu(gate32) if act == "silu" else torch.sigmoid(gate32)).to(x.dtype)


def l2_normalise(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """x * rsqrt(sum(x^2) + 1e-6) * scale per head. x [T, H, D] fp32; scale [H, 1]."""
    if x.is_cuda:
        from soloist.ops.triton.norms import norm as on_card

        return on_card(x, scale.expand(-1, x.shape[-1]), 1e-6, mean=False)
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return x * norm.square_().add_(1e-6).rsqrt_().mul_(scale)
