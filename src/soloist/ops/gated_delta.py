"""The gated delta rule: one token at a time (decode, verify, fold) and by chunks of 64 (prefill).

Per value head with state S [dk, dv]: S <- exp(g) S; d = beta (v - S^T k); S <- S + k d^T; o = S^T q.
Decode always uses `delta_step`, so a state does not depend on where steps begin and end, and folding a
record of accepted rows is bit-identical to having decoded them: it is the same function.

What can go wrong: a state kept in 16 bits must be rounded after every token in decode and at every
64-grid point in prefill, not once per call.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

CHUNK = 64


@dataclass
class DeltaInputs:
    """What the recurrence consumes, per row: this is the record that can be folded later.

    q, k [T, Hv, dk] normalised, key heads already expanded; v [T, Hv, dv]; decay = exp(g), beta [T, Hv]; all fp32.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    decay: torch.Tensor
    beta: torch.Tensor

    def rows(self, index: torch.Tensor) -> DeltaInputs:
        return DeltaInputs(*(t.index_select(0, index) for t in (self.q, self.k, self.v, self.decay, self.beta)))


def delta_step(state: torch.Tensor, x: DeltaInputs, state_dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Advance n states by one token each. state [n, Hv, dk, dv] fp32, overwritten; returns (o [n, Hv, dv], state).

    With a 16-bit `state_dtype` the state is rounded before it is read with q, as if it had been stored.
    """
    state.mul_(x.decay[..., None, None])
    k = x.k.unsqueeze(-1)
    d = (x.v - (state * k).sum(-2)).mul_(x.beta.unsqueeze(-1))
    state.addcmul_(k, d.unsqueeze(-2))
    if state_dtype != torch.float32:
        state.copy_(state.to(state_dtype))
    return (state * x.q.unsqueeze(-1)).sum(-2), state


def fold(state: torch.Tensor, record: DeltaInputs, path: list[int], state_dtype: torch.dtype) -> torch.Tensor:
    """The settled state after the rows `path` of one request's record. state [1, Hv, dk, dv] fp32, overwritten."""
    for row in path:
        index = torch.tensor([row], device=state.device)
        delta_step(state, record.rows(index), state_dtype)
    return state


def walk(
    states: torch.Tensor, x: DeltaInputs, levels: list[Level], state_dtype: torch.dtype
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Verify a forest of rows. states [R, Hv, dk, dv] fp32: the settled state of each request, not modified.

    Rows are visited level by level (all rows of equal depth together); each starts from its parent's state.
    Returns o [T, Hv, dv] and the states after each level's rows: the reference keeps them in place of a second
    fold pass (the bits are those of `fold`).
    """
    out = torch.empty_like(x.v)
    after: list[torch.Tensor] = []
    for depth, level in enumerate(levels):
        source = states if depth == 0 else after[depth - 1]
        state = source.index_select(0, level.parents)
        o, state = delta_step(state, x if level.everything else x.rows(level.rows), state_dtype)
        after.append(state)
        if level.everything:
            return o, after
        out.index_copy_(0, level.rows, o)
    return out, after


@dataclass(frozen=True)
class Level:
    """Rows of equal depth. `parents` index the level above (or the requests, at depth 0).

    `everything`: this level holds all rows of the step in order, so nothing need be gathered.
    """

    rows: torch.Tensor
    parents: torch.Tensor
    everything: bool


def chunk_scan(
    state: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    state_dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The chunked form over rows that start on the 64-grid; T is a multiple of 64.

    state [Hv, dk, dv] fp32; q, k [T, Hv, dk]; v [T, Hv, dv]; g (log-decay), beta [T, Hv]. Padded rows carry
    beta = g = 0 and leave the state alone. Returns (o [T, Hv, dv], state), the state rounded to `state_dtype`
    at every grid point. Each chunk runs in the same shapes, so results do not depend on how many are given.
    """
    if q.is_cuda:
        from soloist.ops.triton.delta_prefill import chunk_scan as on_card

        return on_card(state, q, k, v, g, beta, state_dtype)
    tokens = q.shape[0]
    out = torch.empty_like(v)
    eye = torch.eye(CHUNK, device=q.device)
    causal = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=q.device).tril()
    strict = causal.tril(-1)
    for start in range(0, tokens, CHUNK):
        rows = slice(start, start + CHUNK)
        qc, kc, vc = (t[rows].transpose(0, 1) for t in (q, k, v))  # [Hv, 64, d]
        bc = beta[rows].t().unsqueeze(-1)  # [Hv, 64, 1]
        cg = g[rows].t().cumsum(-1)  # [Hv, 64]
        decay = (cg.unsqueeze(-1) - cg.unsqueeze(-2)).masked_fill(~causal, float("-inf")).exp_()
        grown = cg.exp().unsqueeze(-1)
        kb = kc * bc
        a = (kb @ kc.transpose(1, 2)).mul_(decay).masked_fill_(~strict, 0.0)
        rhs = torch.cat([vc * bc, kb * grown], -1)
        solved = torch.linalg.solve_triangular(a + eye, rhs, upper=False, unitriangular=True)
        u, w = solved.split([vc.shape[-1], kc.shape[-1]], -1)
        fresh = u - w @ state
        out[rows] = ((qc * grown) @ state + (qc @ kc.transpose(1, 2)).mul_(decay) @ fresh).transpose(0, 1)
        last = cg[:, -1:]
        tail = kc * (last - cg).exp_().unsqueeze(-1)
        state = last.exp().unsqueeze(-1) * state + tail.transpose(1, 2) @ fresh
        if state_dtype != torch.float32:
            state = state.to(state_dtype).float()
    return out, state
