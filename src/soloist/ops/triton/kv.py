"""Rows of a KV format on a card: decoded where they are read, encoded where they are written.

Bit for bit the codecs of `cache/codecs.py`: a stored row, and a row of the running step that will be stored, give
attention the same 16 bits. fp8 is taken apart and put together by integer arithmetic, which every card has (the
conversion instructions came with sm_89) and which rounds the same everywhere.

What can go wrong: a division that is not correctly rounded gives another code than the reference; `div_rn` is.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from soloist.ops.stored_rows import StoredRows

DENSE, FP8, INT8 = 0, 1, 2


def kind(rows: StoredRows) -> int:
    """Which of the forms the kernels know `rows` have."""
    if rows.data.dtype is torch.int8:
        return INT8
    return FP8 if rows.data.dtype is torch.float8_e4m3fn else DENSE


def arguments(rows: StoredRows) -> tuple[torch.Tensor, torch.Tensor, float]:
    """(codes, scales, factor) as kernels take them; without scales the codes stand in and are not read."""
    assert rows.data.is_contiguous() and (rows.scale is None or rows.scale.is_contiguous())
    data = rows.data.view(torch.uint8) if rows.data.dtype is torch.float8_e4m3fn else rows.data
    return data, data if rows.scale is None else rows.scale, rows.factor


@triton.jit
def _fp8_value(code):
    """e4m3 codes (uint8, never NaN) as fp32: the bits in fp16's places are the value divided by 256."""
    wide = code.to(tl.int16)
    half = ((wide & 0x80) << 8) | ((wide & 0x7F) << 7)
    return half.to(tl.float16, bitcast=True).to(tl.float32) * 256.0


@triton.jit
def _fp8_code(x):
    """fp32 in -448 .. 448 -> e4m3 codes, to nearest even."""
    bits = x.to(tl.uint32, bitcast=True)
    sign = (bits >> 24) & 0x80
    size = bits & 0x7FFFFFFF
    # Normal numbers: round 20 mantissa bits away, then 127 becomes 7.
    normal = ((size + 0x7FFFF + ((size >> 20) & 1)) >> 20) - (120 << 3)
    # Below 2^-6 codes count steps of 2^-9; adding 2^23 rounds to whole ones.
    counted = size.to(tl.float32, bitcast=True) * 512.0 + 8388608.0
    small = counted.to(tl.uint32, bitcast=True) & 0xF
    return (sign | tl.where(size < 0x3C800000, small, normal)).to(tl.uint8)


@triton.jit
def decode(codes, scale, DTYPE: tl.constexpr, KIND: tl.constexpr):
    """codes [N, D]; scale: the factor (fp8), [N, 1] (int8), else not looked at -> [N, D] in DTYPE."""
    if KIND == 1:
        x = _fp8_value(codes) * scale
    elif KIND == 2:
        x = codes.to(tl.float32) * scale
    else:
        x = codes
    return x.to(DTYPE)


@triton.jit
def load(data, scales, factor, at, cols, D: tl.constexpr, DTYPE: tl.constexpr, KIND: tl.constexpr):
    """Whole rows `at` (int64 [N], row * heads + head), decoded: [N, D] in DTYPE."""
    codes = tl.load(data + at[:, None] * D + cols[None, :])
    if KIND == 2:
        return decode(codes, tl.load(scales + at)[:, None], DTYPE, KIND)
    return decode(codes, factor, DTYPE, KIND)


@triton.jit
def load_either(
    data, scales, own, own_scales, factor, at, own_at, old, seen, cols,
    D: tl.constexpr, DTYPE: tl.constexpr, KIND: tl.constexpr,
):  # fmt: skip
    """Per lane a settled row (`old`: row `at` of `data`) or one of the step's (row `own_at` of `own`); lanes outside
    `seen` give zeros."""
    place = tl.where(old[:, None], data + at[:, None] * D + cols[None, :], own + own_at[:, None] * D + cols[None, :])
    codes = tl.load(place, mask=seen[:, None], other=0)
    if KIND == 2:
        scale = tl.load(tl.where(old, scales + at, own_scales + own_at), mask=seen, other=0.0)
        return decode(codes, scale[:, None], DTYPE, KIND)
    return decode(codes, factor, DTYPE, KIND)


@triton.jit
def store(data, scales, factor, at, x, cols, inside, D: tl.constexpr, KIND: tl.constexpr):
    """Encode one row x [BLOCK] (zeros outside D) and store it as row `at` (row * heads + head)."""
    target = data + at * D + cols
    if KIND == 1:
        scaled = tl.math.div_rn(x.to(tl.float32), tl.zeros_like(x).to(tl.float32) + factor)
        tl.store(target, _fp8_code(tl.minimum(tl.maximum(scaled, -448.0), 448.0)), mask=inside)
    elif KIND == 2:
        value = x.to(tl.float32)
        scale = tl.maximum(tl.math.div_rn(tl.max(tl.abs(value), 0), 127.0), 1e-6)
        ratio = tl.math.div_rn(value, tl.zeros_like(value) + scale)
        away = ratio + tl.where(ratio < 0, -0.5, 0.5)
        # The conversion cuts the fraction off.
        tl.store(target, tl.minimum(tl.maximum(away, -128.0), 127.0).to(tl.int8), mask=inside)
        tl.store(scales + at, scale)
    else:
        tl.store(target, x.to(data.dtype.element_ty), mask=inside)


@triton.jit
def _write(
    x, index, data, scales, factor, row_stride,
    HEADS: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr, KIND: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    cols = tl.arange(0, BLOCK)
    inside = cols < D
    value = tl.load(x + row * row_stride + head * D + cols, mask=inside, other=0.0)
    store(data, scales, factor, tl.load(index + row) * HEADS + head, value, cols, inside, D, KIND)


def write(x: torch.Tensor, index: torch.Tensor, into: StoredRows) -> None:
    """Store rows x [n, kv, D] at rows index [n] int64 of `into`."""
    rows, heads, dim = x.shape
    if x.stride(2) != 1 or x.stride(1) != dim:
        x = x.contiguous()
    block = triton.next_power_of_2(dim)
    index = index.to(x.device)
    _write[(rows, heads)](
        x, index, *arguments(into), x.stride(0), heads, dim, block, kind(into), num_warps=max(1, min(4, block // 64))
    )
