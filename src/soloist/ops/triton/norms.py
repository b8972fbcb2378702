"""Norms of ops/norms.py for any number of rows: one program per row, so a row's bits do not depend on their number.

A library's reduction may choose its order by the number of rows; a resumed prompt would then differ from a cold one.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def _norm(
    x, factor, gate, out, width, period, eps,
    MEAN: tl.constexpr, PLAIN: tl.constexpr, GATE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    inside = cols < width
    value = tl.load(x + row * width + cols, mask=inside, other=0.0).to(tl.float32)
    square = tl.sum(value * value, 0)
    if MEAN:
        square = square / width
    value = value * (1.0 / tl.sqrt(square + eps))
    if PLAIN:
        value = value.to(out.dtype.element_ty).to(tl.float32)
    value = value * tl.load(factor + row % period * width + cols, mask=inside, other=0.0).to(tl.float32)
    if GATE != 0:
        g = tl.load(gate + row * width + cols, mask=inside, other=0.0).to(tl.float32)
        act = 1.0 / (1.0 + tl.exp(-g))
        value = value * (g * act if GATE == 1 else act)
    tl.store(out + row * width + cols, value.to(out.dtype.element_ty), mask=inside)


def norm(
    x: torch.Tensor,
    factor: torch.Tensor,
    eps: float,
    *,
    mean: bool = True,
    plain: bool = False,
    gate: torch.Tensor | None = None,
    act: str = "silu",
) -> torch.Tensor:
    """x / sqrt(mean or sum of squares + eps) * factor (* act(gate)) over the last dim; fp32 inside, x's dtype out.

    x [..., D]; factor [D], or [P, D] repeating over the rows; gate of x's shape. `plain` rounds before the factor.
    """
    x = x.contiguous()
    width = x.shape[-1]
    out = torch.empty_like(x)
    rows = x.numel() // width
    if rows:
        factor = factor.contiguous()
        gated = x if gate is None else gate.reshape(x.shape).contiguous()
        block = triton.next_power_of_2(width)
        kind = 0 if gate is None else 1 if act == "silu" else 2
        _norm[(rows,)](
            x, factor, gated, out, width, factor.numel() // width, eps, mean, plain, kind, block,
            num_warps=max(1, min(8, block // 256)),
        )  # fmt: skip
    return out
