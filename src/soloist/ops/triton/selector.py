"""Scores of neighbouring candidates of a draft block, from what `RowTop` left to what the host walks, in one launch.

Reference: `DFlash2.scored` and `DFlash2.edges`. What can go wrong: a row of NaN has no candidates; its places count as
0, so that nothing is read outside the codebooks, and its scores stay what they are.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from soloist.ops.top import width
from soloist.ops.triton import pdl


@triton.jit
def _candidate(packed, ids, at, real, MAPPED: tl.constexpr):
    """Token ids int64 of candidates at `at` of the packed rows."""
    token = tl.maximum(tl.load(packed + at, mask=real, other=0), 0).to(tl.int64)
    if MAPPED:
        token = tl.load(ids + token, mask=real, other=0).to(tl.int64)
    return token


@triton.jit
def _pair_scores(
    packed, ids, anchors, hidden, predecessors, successors, out_ids, out_scores, rank, multiplier, softcap,
    SLOTS: tl.constexpr, COUNT: tl.constexpr, K: tl.constexpr, WIDTH: tl.constexpr, RANK: tl.constexpr,
    MAPPED: tl.constexpr, SOFTCAP: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    pdl.begin(PDL)
    row = tl.program_id(0).to(tl.int64)
    slot = row % SLOTS
    lane = tl.arange(0, K)
    real = lane < COUNT
    i = tl.arange(0, RANK)
    known = i < rank
    token = _candidate(packed, ids, row * WIDTH + lane, real, MAPPED)
    bits = tl.load(packed + row * WIDTH + COUNT + lane, mask=real, other=0)
    score = bits.to(tl.float32, bitcast=True) * multiplier
    if SOFTCAP:
        score = softcap * (2.0 * tl.sigmoid(2.0 * score / softcap) - 1.0)
    before = tl.load(anchors + row // SLOTS).to(tl.int64) + tl.zeros((K,), tl.int64)
    if slot > 0:
        before = _candidate(packed, ids, (row - 1) * WIDTH + lane, real, MAPPED)
    here = real[:, None] & known[None, :]
    a = tl.load(predecessors + before[:, None] * rank + i[None, :], mask=here, other=0.0)
    b = tl.load(successors + token[:, None] * rank + i[None, :], mask=here, other=0.0)
    p = tl.load(hidden + row * rank + i, mask=known, other=0.0).to(tl.float32)
    pairs = tl.dot((a.to(tl.float32) * p[None, :]).to(b.dtype), tl.trans(b), input_precision="ieee")
    tl.store(out_ids + row * COUNT + lane, token.to(tl.int32), mask=real)
    to = (row * COUNT + lane)[:, None] * COUNT + lane[None, :]
    tl.store(out_scores + to, pairs + score[None, :], mask=real[:, None] & real[None, :])


def pair_scores(
    packed: torch.Tensor,
    ids: torch.Tensor | None,
    anchors: torch.Tensor,
    hidden: torch.Tensor,
    codebooks: tuple[torch.Tensor, torch.Tensor],
    multiplier: float,
    softcap: float,
    out_ids: torch.Tensor,
    out_scores: torch.Tensor,
) -> None:
    """Candidates' token ids int32 [R, S, K] and scores fp32 [R, S, K, K] of taking b (last) after a of the slot before.

    packed int32 [R * S, 2 K + 4]: every slot's best K rows of the head as `RowTop` leaves them; ids int64: token ids of
    the head's rows, None where they are the vocabulary; anchors int [R], the predecessor of slot 0; hidden [R * S,
    rank]; codebooks: predecessors and successors [V, rank]; a softcap of 0 is none.
    """
    slots, count = out_ids.shape[1:]
    predecessors, successors = codebooks
    rank = hidden.shape[1]
    assert out_ids.is_contiguous() and out_scores.is_contiguous() and packed.is_contiguous() and hidden.is_contiguous()
    assert predecessors.is_contiguous() and successors.is_contiguous() and predecessors.shape[1] == rank
    on = pdl.dependent(packed)
    _pair_scores[(packed.shape[0],)](
        packed, anchors if ids is None else ids, anchors, hidden, predecessors, successors, out_ids, out_scores,
        rank, multiplier, softcap if softcap > 0 else 1.0,
        slots, count, max(16, triton.next_power_of_2(count)), width(count), max(16, triton.next_power_of_2(rank)),
        ids is not None, softcap > 0, PDL=on, num_warps=4, **pdl.launch(on),
    )  # fmt: skip
