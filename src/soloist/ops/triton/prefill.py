"""Causal attention of prompt rows over all keys before and with them. Reference: `prefill_attention`.

One program per block of 64 queries and head; keys in blocks of 64 from position 0 on, online softmax in fp32. What a
row adds up, and in which order, depends on its absolute position alone.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from soloist.ops.triton import pdl

BLOCK = 64


@triton.jit
def _prefill(
    q, keys, values, out, start, scale,
    HEADS: tl.constexpr, KV: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr,
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
        key = begin + at
        kv_at = (key.to(tl.int64) * KV + kv)[:, None] * D + cols[None, :]
        s = tl.dot(qt, tl.trans(tl.load(keys + kv_at)), input_precision="ieee") * scale
        s = tl.where(key[None, :] <= position[:, None], s, float("-inf"))
        new = tl.maximum(top, tl.max(s, 1))
        p = tl.exp(s - new[:, None])
        shrink = tl.exp(top - new)
        total = total * shrink + tl.sum(p, 1)
        v = tl.load(values + kv_at)
        acc = tl.dot(p.to(v.dtype), v, acc * shrink[:, None], input_precision="ieee")
        top = new
    tl.store(out + q_at, (acc / total[:, None]).to(out.dtype.element_ty))


def prefill_attention(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, start: int, block: int, scale: float
) -> torch.Tensor:
    """q [T, H, D], T a multiple of 64; keys, values [start + T, kv, D]; start a multiple of 64 -> [T, H, D]."""
    tokens, heads, dim = q.shape
    if tokens % BLOCK or start % BLOCK or dim != triton.next_power_of_2(dim):
        raise ValueError(f"prefill attention runs blocks of {BLOCK} rows on the grid, got {tokens} rows from {start}")
    q, keys, values = q.contiguous(), keys.to(q.dtype).contiguous(), values.to(q.dtype).contiguous()
    out = torch.empty_like(q)
    _prefill[(tokens // BLOCK, heads)](
        q, keys, values, out, start, scale, heads, keys.shape[1], dim, BLOCK, num_warps=4 if dim <= 128 else 8,
        num_stages=2 if q.element_size() == 2 and pdl.shared_memory(q) >= 163840 else 1,
    )  # fmt: skip
    return out
