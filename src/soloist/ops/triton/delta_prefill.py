"""The gated delta rule by chunks of 64, for prompts on a card. Reference: `chunk_scan` of ops/gated_delta.py.

`_chunk` works on all chunks and heads at once: the triangular solve and what the state has no part in. `_scan` then
carries the state from chunk to chunk, blocks of its columns in parallel, and rounds it to the storage type at every
grid point. The triangular solve is fp32; dot products are tf32 with fp32 sums, finer than the bf16 rows that go in.
Every chunk runs in one shape, so a resumed prompt repeats a cold one bit for bit.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

CHUNK = 64


@triton.jit
def _chunk(
    q, k, v, g, beta, u_out, w_out, p_out, cg_out,
    H: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    chunk, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    at = tl.arange(0, C)
    row = chunk * C + at
    k_at = (row * H + head)[:, None] * DK + tl.arange(0, DK)[None, :]
    v_at = (row * H + head)[:, None] * DV + tl.arange(0, DV)[None, :]
    kt = tl.load(k + k_at)
    bt = tl.load(beta + row * H + head)
    cg = tl.cumsum(tl.load(g + row * H + head), 0)
    lower = at[:, None] >= at[None, :]
    decay = tl.exp(tl.where(lower, cg[:, None] - cg[None, :], float("-inf")))
    p = tl.dot(tl.load(q + k_at), tl.trans(kt), input_precision="tf32") * decay
    cells = (chunk * H + head) * C * C + at[:, None] * C + at[None, :]
    tl.store(p_out + cells, p)
    a = tl.dot(kt * bt[:, None], tl.trans(kt), input_precision="tf32") * decay
    a = tl.where(at[:, None] > at[None, :], a, 0.0)
    # (I + A)^-1 by forward substitution: row i is e_i minus the rows above weighted by A's row i.
    inverse = tl.where(at[:, None] == at[None, :], 1.0, 0.0)
    for i in range(1, C):
        weights = tl.sum(tl.where(at[:, None] == i, a, 0.0), 0)
        change = tl.sum(weights[:, None] * inverse, 0)
        inverse = tl.where(at[:, None] == i, inverse - change[None, :], inverse)
    u = tl.dot(inverse, tl.load(v + v_at) * bt[:, None], input_precision="tf32")
    tl.store(u_out + v_at, u)
    w = tl.dot(inverse, kt * (bt * tl.exp(cg))[:, None], input_precision="tf32")
    tl.store(w_out + k_at, w)
    tl.store(cg_out + row * H + head, cg)


@triton.jit
def _scan(
    state, q, k, u, w, p, cg, out, chunks,
    H: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, BV: tl.constexpr, C: tl.constexpr, ROUND: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(0)
    at, rows_k = tl.arange(0, C), tl.arange(0, DK)
    cols = tl.program_id(1) * BV + tl.arange(0, BV)
    tile = head * DK * DV + rows_k[:, None] * DV + cols[None, :]
    s = tl.load(state + tile)
    for chunk in range(chunks):
        row = (chunk * C + at).to(tl.int64)
        k_at = (row * H + head)[:, None] * DK + rows_k[None, :]
        v_at = (row * H + head)[:, None] * DV + cols[None, :]
        grown = tl.load(cg + row * H + head)
        last = tl.load(cg + (chunk * C + C - 1) * H + head)
        fresh = tl.load(u + v_at) - tl.dot(tl.load(w + k_at), s, input_precision="tf32")
        o = tl.dot(tl.load(q + k_at) * tl.exp(grown)[:, None], s, input_precision="tf32")
        cells = (chunk * H + head) * C * C + at[:, None] * C + at[None, :]
        o = tl.dot(tl.load(p + cells), fresh, o, input_precision="tf32")
        tl.store(out + v_at, o)
        tail = tl.load(k + k_at) * tl.exp(last - grown)[:, None]
        s = tl.dot(tl.trans(tail), fresh, s * tl.exp(last), input_precision="tf32")
        s = s.to(ROUND).to(tl.float32)
    tl.store(state + tile, s)


_TYPES = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}


def chunk_scan(
    state: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    state_dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor]:
    """As the reference: state [Hv, dk, dv] fp32; q, k [T, Hv, dk]; v [T, Hv, dv]; g, beta [T, Hv], T a multiple of 64.

    Returns (o [T, Hv, dv], state). dk and dv are powers of two of at least 16.
    """
    tokens, heads, dk = q.shape
    dv = v.shape[2]
    q, k, v, g, beta = (t.float().contiguous() for t in (q, k, v, g, beta))
    chunks = tokens // CHUNK
    u, w, cg, out = torch.empty_like(v), torch.empty_like(k), torch.empty_like(g), torch.empty_like(v)
    p = torch.empty(chunks, heads, CHUNK, CHUNK, dtype=torch.float32, device=q.device)
    _chunk[(chunks, heads)](q, k, v, g, beta, u, w, p, cg, heads, dk, dv, CHUNK, num_warps=8, num_stages=1)
    state = state.float().clone()
    bv = min(16, dv)
    _scan[(heads, dv // bv)](
        state, q, k, u, w, p, cg, out, chunks, heads, dk, dv, bv, CHUNK, _TYPES[state_dtype], num_warps=4, num_stages=1
    )
    return out, state
