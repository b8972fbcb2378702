"""Row kernels of a decode step: residual add with RMS norm, SiLU-multiply, q/k norm with RoPE.

One program per row (or row and head), so a row's bits cannot depend on its neighbours. References: `ops/norms.py`,
`ops/rope.py`, `models/layers.py`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from soloist.ops.stored_rows import StoredRows
from soloist.ops.triton import kv as stored
from soloist.ops.triton import pdl


@triton.jit
def _add_norm(x, delta, factor, out, eps, width, HAS_DELTA: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    pdl.begin(PDL)
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    inside = cols < width
    value = tl.load(x + row * width + cols, mask=inside, other=0.0).to(tl.float32)
    if HAS_DELTA:
        # The sum is rounded to the residual's type before it is normalised, as the reference does.
        value += tl.load(delta + row * width + cols, mask=inside, other=0.0).to(tl.float32)
        rounded = value.to(x.dtype.element_ty)
        tl.store(x + row * width + cols, rounded, mask=inside)
        value = rounded.to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(value * value, 0) / width + eps)
    scaled = value * scale * tl.load(factor + cols, mask=inside, other=0.0)
    tl.store(out + row * width + cols, scaled.to(out.dtype.element_ty), mask=inside)


def add_norm(
    x: torch.Tensor, delta: torch.Tensor | None, factor: torch.Tensor, eps: float, out: torch.Tensor
) -> torch.Tensor:
    """x += delta (in place, rounded to x's type), out = rms_norm(x) * factor. x, delta, out [T, H]; factor [H] fp32."""
    rows, width = x.shape
    assert x.is_contiguous() and out.is_contiguous() and (delta is None or delta.is_contiguous())
    on = pdl.dependent(x)
    _add_norm[(rows,)](
        x, x if delta is None else delta, factor, out, eps, width, delta is not None, triton.next_power_of_2(width),
        PDL=on, num_warps=8, **pdl.launch(on),
    )  # fmt: skip
    return out


@triton.jit
def _silu_mul(gate_up, out, width, BLOCK: tl.constexpr, PDL: tl.constexpr):
    pdl.begin(PDL)
    row = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = cols < width
    gate = tl.load(gate_up + row * 2 * width + cols, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * width + width + cols, mask=inside, other=0.0).to(tl.float32)
    # silu is rounded to the activation type first, as two separate operations would.
    silu = (gate / (1.0 + tl.exp(-gate))).to(out.dtype.element_ty).to(tl.float32)
    tl.store(out + row * width + cols, (silu * up).to(out.dtype.element_ty), mask=inside)


def silu_mul(gate_up: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """out [T, F] = silu(gate) * up of gate_up [T, 2F]."""
    rows, width = out.shape
    assert gate_up.is_contiguous() and out.is_contiguous() and gate_up.shape[1] == 2 * width
    block = 1024
    on = pdl.dependent(out)
    _silu_mul[(rows, triton.cdiv(width, block))](gate_up, out, width, block, PDL=on, num_warps=4, **pdl.launch(on))
    return out


@triton.jit
def _qk_prepare(
    qkv, factors, positions, inverse, q_out, k_out, k_scales, k_factor, v_out, v_scales, v_factor, stride, eps,
    HEADS: tl.constexpr, KV: tl.constexpr, D: tl.constexpr, HALF: tl.constexpr, BLOCK: tl.constexpr,
    K_KIND: tl.constexpr, V_KIND: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    pdl.begin(PDL)
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    cols = tl.arange(0, BLOCK)
    inside = cols < D
    if head < HEADS:
        source = qkv + row * stride + head * 2 * D
    else:
        source = qkv + row * stride + HEADS * 2 * D + (head - HEADS) * D
    if head >= HEADS + KV:  # values pass through
        passed = tl.load(source + cols, mask=inside, other=0.0)
        stored.store(v_out, v_scales, v_factor, row * KV + head - HEADS - KV, passed, cols, inside, D, V_KIND)
    else:
        value = tl.load(source + cols, mask=inside, other=0.0).to(tl.float32)
        scale = 1.0 / tl.sqrt(tl.sum(value * value, 0) / D + eps)
        factor = tl.load(factors + head * D + cols, mask=inside, other=0.0)
        normed = (value * scale * factor).to(q_out.dtype.element_ty).to(tl.float32)
        # The partner channel of the half-split pairing, normed by the same scale.
        pair = tl.where(cols < HALF, cols + HALF, cols - HALF)
        turned = cols < 2 * HALF
        other = tl.load(source + pair, mask=turned, other=0.0).to(tl.float32)
        other = (
            (other * scale * tl.load(factors + head * D + pair, mask=turned, other=0.0))
            .to(q_out.dtype.element_ty)
            .to(tl.float32)
        )
        frequency = tl.load(inverse + tl.where(cols < HALF, cols, cols - HALF), mask=turned, other=0.0)
        angle = tl.load(positions + row).to(tl.float32) * frequency
        cos, sin = tl.cos(angle), tl.sin(angle)
        rotated = tl.where(cols < HALF, normed * cos - other * sin, normed * cos + other * sin)
        turned_row = tl.where(turned, rotated, normed).to(q_out.dtype.element_ty)
        if head < HEADS:
            tl.store(q_out + (row * HEADS + head) * D + cols, turned_row, mask=inside)
        else:
            stored.store(k_out, k_scales, k_factor, row * KV + head - HEADS, turned_row, cols, inside, D, K_KIND)


def qk_prepare(
    qkv: torch.Tensor,
    factors: torch.Tensor,
    positions: torch.Tensor,
    inverse: torch.Tensor,
    eps: float,
    q: torch.Tensor,
    k: StoredRows | torch.Tensor,
    v: StoredRows | torch.Tensor,
) -> None:
    """Split the fused projection, norm and rotate q and k, copy v; keys and values are written as they will be stored.

    qkv [T, n * 2D + 2 * kv * D] (query and gate per head); factors [n + kv, D] fp32; positions [T] int; inverse [R / 2]
    fp32; writes q [T, n, D], k, v [T, kv, D].
    """
    rows, heads, dim = q.shape
    k, v = StoredRows.of(k), StoredRows.of(v)
    kv = k.data.shape[1]
    assert qkv.stride(1) == 1 and q.is_contiguous()
    on = pdl.dependent(qkv)
    _qk_prepare[(rows, heads + 2 * kv)](
        qkv, factors, positions, inverse, q, *stored.arguments(k), *stored.arguments(v), qkv.stride(0), eps,
        heads, kv, dim, inverse.numel(), triton.next_power_of_2(dim), stored.kind(k), stored.kind(v), PDL=on,
        num_warps=2, **pdl.launch(on),
    )  # fmt: skip
