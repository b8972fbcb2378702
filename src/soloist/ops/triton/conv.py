"""The short causal convolution with SiLU over consecutive rows of a prompt. Reference: `causal_conv` of ops/conv.py."""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def _causal(rows, history, weight, out, stride, channels, TAPS: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = cols < channels
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for j in tl.static_range(TAPS):
        at = row - (TAPS - 1) + j
        if at >= 0:
            value = tl.load(rows + at * stride + cols, mask=inside, other=0.0)
        else:
            value = tl.load(history + (TAPS - 1 + at) * channels + cols, mask=inside, other=0.0)
        total += value.to(tl.float32) * tl.load(weight + j * channels + cols, mask=inside, other=0.0)
    silu = total / (1.0 + tl.exp(-total))
    tl.store(out + row * channels + cols, silu.to(out.dtype.element_ty), mask=inside)


def causal_conv(rows: torch.Tensor, history: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """rows [T, C], unit column stride; history [K-1, C] of the same dtype; weight [K, C] fp32 -> [T, C]."""
    tokens, channels = rows.shape
    assert rows.stride(1) == 1 and history.dtype == rows.dtype
    out = torch.empty(tokens, channels, dtype=rows.dtype, device=rows.device)
    _causal[(tokens, triton.cdiv(channels, 1024))](
        rows,
        history.contiguous(),
        weight.contiguous(),
        out,
        rows.stride(0),
        channels,
        weight.shape[0],
        1024,
        num_warps=4,
    )
    return out
