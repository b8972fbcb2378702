"""Gated attention over paged KV: rows of a running step (verify) and rows of a prompt on the grid (prefill).

A row visits its keys by absolute position whatever the storage: lane = position, in splits of fixed length.
Settled keys come from pages; rows of the running step gather their own ancestors into the lanes after them,
so every node of a tree gets, bit for bit, what its path would get decoded token by token.

What can go wrong: a product whose reduction order depends on the number of rows. Query rows are padded to a
multiple of ROW_BLOCK, where the batched product of every CPU library met so far keeps a row's bits
(`ops/numerics.py` checks at start-up), and lanes to a multiple of SPLIT.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

SPLIT = 128
ROW_BLOCK = 4


@dataclass(frozen=True)
class AttentionRows:
    """The rows of one request in a step: where they lie and what each one sees.

    start, stop   slice of the step's rows
    settled       keys in pages: positions 0 .. settled - 1
    depth         int64 [n] position of a row minus `settled`
    lanes         None for a chain (row i sees rows 0..i); else int64 [n, max_depth + 1]: the row (within the
                  request) at each depth of a row's path, -1 past its end
    """

    start: int
    stop: int
    settled: int
    depth: torch.Tensor
    lanes: torch.Tensor | None


def _pad_to(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple


def _grouped(q: torch.Tensor, kv_heads: int) -> torch.Tensor:
    """[n, H, D] -> [kv, pad4(n * G), D]: query heads that share a KV head side by side, rows padded with zeros."""
    n, heads, dim = q.shape
    group = heads // kv_heads
    flat = q.view(n, kv_heads, group, dim).transpose(0, 1).reshape(kv_heads, n * group, dim)
    extra = _pad_to(n * group, ROW_BLOCK) - n * group
    return F.pad(flat, (0, 0, 0, extra)) if extra else flat


def _split_scores(q: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """q [b, M, D] x keys [b, S * SPLIT, D] -> [b, M, S * SPLIT], one product of fixed shape per split."""
    b, lanes, dim = keys.shape
    splits = lanes // SPLIT
    per_split = torch.matmul(q.unsqueeze(1), keys.view(b, splits, SPLIT, dim).transpose(2, 3))
    return per_split.transpose(1, 2).reshape(b, q.shape[1], lanes)


def _split_values(p: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """p [b, M, S * SPLIT] x values [b, S * SPLIT, D] -> per-split partial sums [S, b, M, D]."""
    b, lanes, dim = values.shape
    splits = lanes // SPLIT
    weights = p.view(b, -1, splits, SPLIT).transpose(1, 2)
    return torch.matmul(weights, values.view(b, splits, SPLIT, dim)).transpose(0, 1)


def _in_order(parts: torch.Tensor) -> torch.Tensor:
    """Sum over dim 0 one after the other, so that trailing empty splits change nothing."""
    total = parts[0].clone() if parts.shape[0] > 1 else parts[0]
    for i in range(1, parts.shape[0]):
        total += parts[i]
    return total


def _softmax_sums(scores: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """exp(scores - max) and its sum, accumulated split by split in order. scores [..., S * SPLIT]."""
    p = (scores - scores.amax(-1, keepdim=True)).exp_()
    sums = p.view(*p.shape[:-1], -1, SPLIT).sum(-1)
    return p, _in_order(sums.movedim(-1, 0)).unsqueeze(-1)


def verify_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    settled: Sequence[tuple[torch.Tensor, torch.Tensor]],
    requests: Sequence[AttentionRows],
    scale: float,
) -> torch.Tensor:
    """Attention of every row over its request's settled keys and its own ancestors. fp32 inside.

    q [T, H, D]; k, v [T, kv, D]: the step's rows, as they will be stored; settled[r] = (K, V) [settled, kv, D].
    Returns [T, H, D] in q's dtype.
    """
    out = torch.empty_like(q)
    for r, rows in enumerate(requests):
        past_k, past_v = settled[r]
        part = slice(rows.start, rows.stop)
        attend = _attend_chain if rows.lanes is None else _attend_tree
        out[part] = attend(q[part].float(), k[part].float(), v[part].float(), past_k, past_v, rows, scale).to(q.dtype)
    return out


def _keys_in_lanes(past: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """[L, kv, D] then the step's rows [n, kv, D], zero-padded to whole splits -> [kv, lanes, D]."""
    length = past.shape[0] + rows.shape[0]
    lanes = past.new_zeros(rows.shape[1], _pad_to(length, SPLIT), rows.shape[2], dtype=torch.float32)
    lanes[:, : past.shape[0]] = past.transpose(0, 1)
    lanes[:, past.shape[0] : length] = rows.transpose(0, 1)
    return lanes


def _ungroup(o: torch.Tensor, n: int, heads: int) -> torch.Tensor:
    kv_heads, _, dim = o.shape
    group = heads // kv_heads
    return o[:, : n * group].reshape(kv_heads, n, group, dim).transpose(0, 1).reshape(n, heads, dim)


def _attend_chain(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    past_k: torch.Tensor,
    past_v: torch.Tensor,
    rows: AttentionRows,
    scale: float,
) -> torch.Tensor:
    n, heads, _ = q.shape
    kv_heads = k.shape[1]
    group = heads // kv_heads
    keys, values = _keys_in_lanes(past_k, k), _keys_in_lanes(past_v, v)
    scores = _split_scores(_grouped(q, kv_heads), keys).mul_(scale)
    position = (rows.depth + rows.settled).repeat_interleave(group)
    position = F.pad(position, (0, scores.shape[1] - position.numel()))
    hidden = torch.arange(keys.shape[1], device=q.device) > position.unsqueeze(-1)
    scores.masked_fill_(hidden, float("-inf"))
    p, sums = _softmax_sums(scores)
    return _ungroup(_in_order(_split_values(p, values)) / sums, n, heads)


def _attend_tree(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    past_k: torch.Tensor,
    past_v: torch.Tensor,
    rows: AttentionRows,
    scale: float,
) -> torch.Tensor:
    """Splits before the first running lane are shared by all rows; the last ones are private to each row."""
    ancestors = rows.lanes
    assert ancestors is not None
    n, heads, dim = q.shape
    kv_heads = k.shape[1]
    group = heads // kv_heads
    shared = rows.settled // SPLIT * SPLIT
    depth = ancestors.shape[1]
    tail = _pad_to(rows.settled - shared + depth, SPLIT)

    def private(past: torch.Tensor, own: torch.Tensor) -> torch.Tensor:
        """[n * kv, tail, D]: each row's lanes from `shared` on."""
        lanes = torch.zeros(n, tail, kv_heads, dim)
        old = rows.settled - shared
        lanes[:, :old] = past[shared:]
        lanes[:, old : old + depth] = own[ancestors.clamp(min=0)] * (ancestors >= 0)[..., None, None]
        return lanes.transpose(1, 2).reshape(n * kv_heads, tail, dim)

    own_q = q.reshape(n * kv_heads, group, dim)
    own_q = F.pad(own_q, (0, 0, 0, _pad_to(group, ROW_BLOCK) - group))
    last = _split_scores(own_q, private(past_k, k))[:, :group].mul_(scale).view(n, kv_heads, group, tail)
    hidden = torch.arange(shared, shared + tail) > (rows.depth + rows.settled).unsqueeze(-1)
    last.masked_fill_(hidden[:, None, None, :], float("-inf"))
    if shared:
        first = _split_scores(_grouped(q, kv_heads), past_k[:shared].float().transpose(0, 1).contiguous()).mul_(scale)
        first = first[:, : n * group].view(kv_heads, n, group, shared).transpose(0, 1)
        last = torch.cat([first, last], -1)
    p, sums = _softmax_sums(last)  # [n, kv, group, lanes]
    own_p = F.pad(p[..., shared:].reshape(n * kv_heads, group, tail), (0, 0, 0, own_q.shape[1] - group))
    parts = _split_values(own_p, private(past_v, v))[:, :, :group].reshape(-1, n, kv_heads, group, dim)
    if shared:
        flat = p[..., :shared].transpose(0, 1).reshape(kv_heads, n * group, shared)
        flat = F.pad(flat, (0, 0, 0, _pad_to(n * group, ROW_BLOCK) - n * group))
        before = _split_values(flat, past_v[:shared].float().transpose(0, 1).contiguous())
        before = before[:, :, : n * group].reshape(-1, kv_heads, n, group, dim).transpose(1, 2)
        parts = torch.cat([before, parts])
    return (_in_order(parts) / sums).reshape(n, heads, dim)


def prefill_attention(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, start: int, block: int, scale: float
) -> torch.Tensor:
    """Causal attention of prompt rows start .. start + T over all keys before and with them.

    q [T, H, D], T a multiple of `block`; keys, values [start + T, kv, D]. Each block of queries runs in shapes
    that depend on its absolute position alone, so a resumed prefill repeats a cold one bit for bit.
    """
    if q.is_cuda:
        from soloist.ops.triton.prefill import prefill_attention as on_card

        return on_card(q, keys, values, start, block, scale)
    tokens, heads, dim = q.shape
    kv_heads = keys.shape[1]
    group = heads // kv_heads
    out = torch.empty_like(q)
    k_all, v_all = keys.float().transpose(0, 1), values.float().transpose(0, 1)
    future = torch.ones(block, block, dtype=torch.bool, device=q.device).triu(1)
    for at in range(0, tokens, block):
        end = start + at + block
        mine = q[at : at + block].float().view(block, kv_heads, group, dim).permute(1, 2, 0, 3)
        mine = mine.reshape(kv_heads, group * block, dim)
        scores = torch.bmm(mine, k_all[:, :end].transpose(1, 2)).mul_(scale).view(kv_heads, group, block, end)
        scores[..., end - block :].masked_fill_(future, float("-inf"))
        p = scores.softmax(-1).view(kv_heads, group * block, end)
        o = torch.bmm(p, v_all[:, :end]).view(kv_heads, group, block, dim)
        out[at : at + block] = o.permute(2, 0, 1, 3).reshape(block, heads, dim).to(q.dtype)
    return out
