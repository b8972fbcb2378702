"""A draft block's heads: new context enters the ring, a block's rows are turned and attend to ring and block.

Position p of a slot lies at lane p % window. A row sees the positions less than `window` before its own that the slot
holds, and the rows of its block (all, or those up to itself). Attention is split by fixed length. Reference:
`drafting/dflash2.py`, `models/dflash2.py`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from soloist.ops.triton import pdl
from soloist.ops.triton.draft import _update

SPLIT = 256
STEP = 64


@triton.jit
def _turned(
    source, factor, position, inverse, eps, cols, inside, D: tl.constexpr, HALF: tl.constexpr, KIND: tl.constexpr
):
    """A head's row, normed and rotated by half-split pairs, rounded to KIND; `rows.qk_prepare` does the same."""
    value = tl.load(source + cols, mask=inside, other=0.0).to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(value * value, 0) / D + eps)
    straight = (value * scale * tl.load(factor + cols, mask=inside, other=0.0)).to(KIND).to(tl.float32)
    # The partner channel, normed by the same scale.
    pair = tl.where(cols < HALF, cols + HALF, cols - HALF)
    turns = cols < 2 * HALF
    other = tl.load(source + pair, mask=turns, other=0.0).to(tl.float32)
    other = (other * scale * tl.load(factor + pair, mask=turns, other=0.0)).to(KIND).to(tl.float32)
    angle = position.to(tl.float32) * tl.load(inverse + tl.where(cols < HALF, cols, cols - HALF), mask=turns, other=0.0)
    cos, sin = tl.cos(angle), tl.sin(angle)
    rotated = tl.where(cols < HALF, straight * cos - other * sin, straight * cos + other * sin)
    return tl.where(turns, rotated, straight).to(KIND)


@triton.jit
def _enter(
    rows, factors, inverse, slots, positions, keys, values, stride, slot_count, window, eps,
    UNITS: tl.constexpr, KV: tl.constexpr, D: tl.constexpr, HALF: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    pdl.begin(PDL)
    row = tl.program_id(0).to(tl.int64)
    unit = tl.program_id(1)
    cols = tl.arange(0, BLOCK)
    inside = cols < D
    position = tl.load(positions + row)
    slot = tl.load(slots + row).to(tl.int64)
    layer = (unit // KV).to(tl.int64)
    to = (((layer * slot_count + slot) * KV + unit % KV) * window + position % window) * D + cols
    source = rows + row * stride + unit * D
    key = _turned(source, factors + unit * D, position, inverse, eps, cols, inside, D, HALF, keys.dtype.element_ty)
    tl.store(keys + to, key, mask=inside)
    tl.store(values + to, tl.load(source + UNITS * D + cols, mask=inside, other=0.0), mask=inside)


def enter(
    rows: torch.Tensor,
    factors: torch.Tensor,
    inverse: torch.Tensor,
    eps: float,
    slots: torch.Tensor,
    positions: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
) -> None:
    """New context of every layer at once: keys normed and rotated, and values, written to their lanes of the ring.

    rows [n, 2 * layers * kv * D]: keys of all layers, then values; factors fp32 [layers * kv, D]; inverse fp32
    [rope / 2]; slots, positions int32 [n]; keys, values [layers, slots, kv, window, D] are written.
    """
    layers, slot_count, kv, window, dim = keys.shape
    units = layers * kv
    assert keys.is_contiguous() and values.is_contiguous() and rows.shape[1] == 2 * units * dim and rows.stride(1) == 1
    on = pdl.dependent(rows)
    _enter[(rows.shape[0], units)](
        rows, factors, inverse, slots, positions, keys, values, rows.stride(0), slot_count, window, eps,
        units, kv, dim, inverse.numel(), triton.next_power_of_2(dim), PDL=on, num_warps=1, **pdl.launch(on),
    )  # fmt: skip


@triton.jit
def _turn(
    qkv, factors, inverse, positions, q_out, k_out, stride, eps,
    ROWS: tl.constexpr, HEADS: tl.constexpr, KV: tl.constexpr, D: tl.constexpr, HALF: tl.constexpr,
    BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    pdl.begin(PDL)
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    cols = tl.arange(0, BLOCK)
    inside = cols < D
    position = tl.load(positions + row // ROWS) + row % ROWS
    source = qkv + row * stride + head * D
    out = _turned(source, factors + head * D, position, inverse, eps, cols, inside, D, HALF, q_out.dtype.element_ty)
    if head < HEADS:
        tl.store(q_out + (row * HEADS + head) * D + cols, out, mask=inside)
    else:
        tl.store(k_out + (row * KV + head - HEADS) * D + cols, out, mask=inside)


def turn(
    qkv: torch.Tensor,
    factors: torch.Tensor,
    inverse: torch.Tensor,
    eps: float,
    positions: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
) -> None:
    """q, k = the queries and keys of a block's rows, normed and rotated.

    qkv [R * block, (n + 2 kv) * D]; factors fp32 [n + kv, D]; inverse fp32 [rope / 2]; positions int32 [R]: of a
    block's first row; writes q [R, block, n, D] and k [R, block, kv, D].
    """
    requests, block, heads, dim = q.shape
    kv = k.shape[2]
    assert q.is_contiguous() and k.is_contiguous() and qkv.stride(1) == 1
    on = pdl.dependent(qkv)
    _turn[(requests * block, heads + kv)](
        qkv, factors, inverse, positions, q, k, qkv.stride(0), eps,
        block, heads, kv, dim, inverse.numel(), triton.next_power_of_2(dim), PDL=on, num_warps=1, **pdl.launch(on),
    )  # fmt: skip


@triton.jit
def _ring(
    q, keys, values, own_k, own_v, slots, positions, firsts, acc_out, top_out, total_out, scale,
    q_row, k_row, v_row, window,
    HEADS: tl.constexpr, KV: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr, M: tl.constexpr, OWN: tl.constexpr,
    SPLITS: tl.constexpr, SPLIT: tl.constexpr, STEP: tl.constexpr, CAUSAL: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    pdl.begin(PDL)
    split = tl.program_id(0)
    kv = tl.program_id(1)
    request = tl.program_id(2).to(tl.int64)
    GROUP: tl.constexpr = HEADS // KV
    at = tl.arange(0, M)
    row = at // GROUP
    head = kv * GROUP + at % GROUP
    mine = at < BLOCK * GROUP
    cols = tl.arange(0, D)
    slot = tl.load(slots + request).to(tl.int64)
    position = tl.load(positions + request).to(tl.int32)
    first = tl.load(firsts + request).to(tl.int32)
    q_at = (request * BLOCK + row) * q_row + head * D
    qt = tl.load(q + q_at[:, None] + cols[None, :], mask=mine[:, None], other=0.0)
    top = tl.full((M,), float("-inf"), tl.float32)
    total = tl.zeros((M,), tl.float32)
    acc = tl.zeros((M, D), tl.float32)
    plane = (slot * KV + kv) * window
    # Nothing lies beyond the newest position while the ring has not come round.
    for begin in range(split * SPLIT, tl.minimum(tl.minimum((split + 1) * SPLIT, window), position), STEP):
        lane = begin + tl.arange(0, STEP)
        behind = ((position - 1 - lane) % window + window) % window
        held = position - 1 - behind
        real = (lane < window) & (held >= first) & (held >= 0)
        at_kv = (plane + lane)[:, None] * D + cols[None, :]
        k = tl.load(keys + at_kv, mask=real[:, None], other=0.0)
        v = tl.load(values + at_kv, mask=real[:, None], other=0.0)
        near = (position + row)[:, None] - held[None, :] < window
        top, total, acc = _update(qt, k, v, real[None, :] & near, top, total, acc, scale)
    if split == 0:
        j = tl.arange(0, OWN)
        inside = (j < BLOCK)[:, None]
        k = tl.load(own_k + ((request * BLOCK + j) * k_row + kv * D)[:, None] + cols[None, :], mask=inside, other=0.0)
        v = tl.load(own_v + ((request * BLOCK + j) * v_row + kv * D)[:, None] + cols[None, :], mask=inside, other=0.0)
        visible = (j < BLOCK)[None, :] & (row >= 0)[:, None]
        if CAUSAL:
            visible = visible & (j[None, :] <= row[:, None])
        top, total, acc = _update(qt, k, v, visible, top, total, acc, scale)
    part = ((request * BLOCK + row) * SPLITS + split) * HEADS + head
    tl.store(acc_out + part[:, None] * D + cols[None, :], acc, mask=mine[:, None])
    tl.store(top_out + part, top, mask=mine)
    tl.store(total_out + part, total, mask=mine)


@triton.jit
def _join(
    acc_in, top_in, total_in, out,
    HEADS: tl.constexpr, D: tl.constexpr, SPLITS: tl.constexpr, WIDE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    pdl.begin(PDL)
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    cols = tl.arange(0, D)
    split = tl.arange(0, WIDE)
    part = (row * SPLITS + split) * HEADS + head
    real = split < SPLITS
    tops = tl.load(top_in + part, mask=real, other=float("-inf"))
    scales = tl.exp(tops - tl.max(tops, 0))
    accs = tl.load(acc_in + part[:, None] * D + cols[None, :], mask=real[:, None], other=0.0)
    total = tl.sum(tl.load(total_in + part, mask=real, other=0.0) * scales, 0)
    o = tl.sum(accs * scales[:, None], 0) / total
    tl.store(out + (row * HEADS + head) * D + cols, o.to(out.dtype.element_ty))


@dataclass(frozen=True)
class RingPartials:
    """Per-split results: acc [rows, splits, H, D], top and total [rows, splits, H], fp32."""

    acc: torch.Tensor
    top: torch.Tensor
    total: torch.Tensor

    @classmethod
    def allocate(cls, rows: int, window: int, heads: int, dim: int, device: torch.device) -> RingPartials:
        splits = triton.cdiv(window, SPLIT)

        def make(*shape: int) -> torch.Tensor:
            return torch.zeros(shape, dtype=torch.float32, device=device)

        return cls(make(rows, splits, heads, dim), make(rows, splits, heads), make(rows, splits, heads))


def ring_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    slots: torch.Tensor,
    positions: torch.Tensor,
    firsts: torch.Tensor,
    partials: RingPartials,
    causal: bool,
    out: torch.Tensor,
) -> None:
    """q [R, block, H, D], k, v [R, block, kv, D]: a block's rows; keys, values [slots, kv, window, D]: a layer's ring.

    slots, positions, firsts int [R]: a request's slot, the position of its block's first row, the first position its
    ring holds. Writes out [R * block, H * D]. D a power of two; a row's heads lie side by side.
    """
    requests, block, heads, dim = q.shape
    kv, window = keys.shape[1:3]
    splits = triton.cdiv(window, SPLIT)
    tile = max(16, triton.next_power_of_2(block * (heads // kv)))
    assert out.is_contiguous() and out.numel() == q.numel()
    on = pdl.dependent(q)
    _ring[(splits, kv, requests)](
        q, keys, values, k, v, slots, positions, firsts, partials.acc, partials.top, partials.total, dim**-0.5,
        q.stride(1), k.stride(1), v.stride(1), window,
        heads, kv, dim, block, tile, max(16, triton.next_power_of_2(block)), splits, SPLIT, STEP, causal,
        PDL=on, num_warps=4, num_stages=2, **pdl.launch(on),
    )  # fmt: skip
    _join[(requests * block, heads)](
        partials.acc, partials.top, partials.total, out, heads, dim, splits, triton.next_power_of_2(splits),
        PDL=on, num_warps=2, **pdl.launch(on),
    )  # fmt: skip
