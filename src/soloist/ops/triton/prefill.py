"""Causal attention of prompt rows over all keys before and with them. Reference: `prefill_attention`.

One program per block of 64 queries and head; keys in blocks of 64 from position 0 on, online softmax in fp32. What a
row adds up, and in which order, depends on its absolute position alone. Keys and values are read where they lie: in
pages of a KV format, decoded on the way (`kv.py`), or side by side.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from soloist.ops.stored_rows import StoredRows
from soloist.ops.triton import kv as stored
from soloist.ops.triton import pdl

BLOCK = 64


@triton.jit
def _prefill(
    q, keys, k_scales, k_factor, values, v_scales, v_factor, places, out, start, scale,
    HEADS: tl.constexpr, KV: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr, PAGED: tl.constexpr,
    K_KIND: tl.constexpr, V_KIND: tl.constexpr,
):  # fmt: skip
    # The longest blocks first: they decide when the launch ends.
    block = tl.num_programs(0) - 1 - tl.program_id(0)
    head = tl.program_id(1)
    kv = head // (HEADS // KV)
    at, cols = tl.arange(0, BLOCK), tl.arange(0, D)
    row = (block * BLOCK + at).to(tl.int64)
    position = start + block * BLOCK + at
    q_at = (row * HEADS + head)[:, None] * D + cols[None, :]
    qt = tl.load(q + q_at)
    top = tl.full((BLOCK,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    acc = tl.zeros((BLOCK, D), tl.float32)
    for begin in range(0, start + (block + 1) * BLOCK, BLOCK):
        # A block of keys is a page, so its first row says where the others are.
        first = begin
        if PAGED:
            first = tl.load(places + begin)
        at_kv = (first + at).to(tl.int64) * KV + kv
        k = stored.load(keys, k_scales, k_factor, at_kv, cols, D, qt.dtype, K_KIND)
        s = tl.dot(qt, tl.trans(k), input_precision="ieee") * scale
        s = tl.where((begin + at)[None, :] <= position[:, None], s, float("-inf"))
        new = tl.maximum(top, tl.max(s, 1))
        p = tl.exp(s - new[:, None])
        shrink = tl.exp(top - new)
        total = total * shrink + tl.sum(p, 1)
        v = stored.load(values, v_scales, v_factor, at_kv, cols, D, qt.dtype, V_KIND)
        acc = tl.dot(p.to(v.dtype), v, acc * shrink[:, None], input_precision="ieee")
        top = new
    tl.store(out + q_at, (acc / total[:, None]).to(out.dtype.element_ty))


def prefill_attention(
    q: torch.Tensor,
    keys: StoredRows | torch.Tensor,
    values: StoredRows | torch.Tensor,
    start: int,
    block: int,
    scale: float,
    places: torch.Tensor | None = None,
) -> torch.Tensor:
    """q [T, H, D], T a multiple of 64; start a multiple of 64 -> [T, H, D].

    keys, values [start + T, kv, D]; or, with `places` int64 [start + T], a layer's planes [pages * 64, kv, D] in which
    position p is row places[p], pages whole.
    """
    tokens, heads, dim = q.shape
    if tokens % BLOCK or start % BLOCK or dim != triton.next_power_of_2(dim):
        raise ValueError(f"prefill attention runs blocks of {BLOCK} rows on the grid, got {tokens} rows from {start}")
    if places is None:
        keys, values = (x if isinstance(x, StoredRows) else x.to(q.dtype).contiguous() for x in (keys, values))
    q, keys, values = q.contiguous(), StoredRows.of(keys), StoredRows.of(values)
    out = torch.empty_like(q)
    kinds = stored.kind(keys), stored.kind(values)
    _prefill[(tokens // BLOCK, heads)](
        q, *stored.arguments(keys), *stored.arguments(values), q if places is None else places, out, start, scale,
        heads, keys.data.shape[1], dim, BLOCK, places is not None, *kinds, num_warps=4 if dim <= 128 else 8,
        num_stages=2 if q.element_size() == 2 and pdl.shared_memory(q) >= 163840 else 1,
    )  # fmt: skip
    return out
