"""Attention of a draft block over a ring of context and over its own rows, split by fixed length.

Position p of a slot lies at lane p % window. A row sees the positions less than `window` before its own that the slot
holds, and the rows of its block (all, or those up to itself). Reference: `drafting/dflash2.py`, `models/dflash2.py`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from soloist.ops.triton.draft import _update

SPLIT = 256
STEP = 64


@triton.jit
def _ring(
    q, keys, values, own_k, own_v, slots, positions, firsts, acc_out, top_out, total_out, scale,
    q_row, k_row, v_row, window,
    HEADS: tl.constexpr, KV: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr, M: tl.constexpr, OWN: tl.constexpr,
    SPLITS: tl.constexpr, SPLIT: tl.constexpr, STEP: tl.constexpr, CAUSAL: tl.constexpr,
):  # fmt: skip
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
    acc_in, top_in, total_in, out, HEADS: tl.constexpr, D: tl.constexpr, SPLITS: tl.constexpr, WIDE: tl.constexpr
):
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
) -> torch.Tensor:
    """q [R, block, H, D], k, v [R, block, kv, D]: a block's rows; keys, values [slots, kv, window, D]: a layer's ring.

    slots, positions, firsts int [R]: a request's slot, the position of its block's first row, the first position its
    ring holds. Returns [R, block, H, D]. D a power of two; a row's heads lie side by side.
    """
    requests, block, heads, dim = q.shape
    kv, window = keys.shape[1:3]
    splits = triton.cdiv(window, SPLIT)
    tile = max(16, triton.next_power_of_2(block * (heads // kv)))
    out = torch.empty(requests, block, heads, dim, dtype=q.dtype, device=q.device)
    _ring[(splits, kv, requests)](
        q, keys, values, k, v, slots, positions, firsts, partials.acc, partials.top, partials.total, dim**-0.5,
        q.stride(1), k.stride(1), v.stride(1), window,
        heads, kv, dim, block, tile, max(16, triton.next_power_of_2(block)), splits, SPLIT, STEP, causal,
        num_warps=4, num_stages=2,
    )  # fmt: skip
    _join[(requests * block, heads)](
        partials.acc, partials.top, partials.total, out, heads, dim, splits, triton.next_power_of_2(splits), num_warps=2
    )
    return out
