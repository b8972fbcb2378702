"""Products over 16-bit weights with many rows: y = x W^T, one tile shape and one K order for any number of rows.

Row tiles of 16 make a row's bits independent of its neighbours (rows of an MMA tile do not mix) and of how many
there are (the K loop never splits). For dense checkpoints and heads; the narrow matrices of a prepared checkpoint
take `dense.py`, which splits K.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from soloist.ops.triton import pdl


@triton.jit
def _wide(
    x, w, bias, y, rows, n, k, x_stride, y_stride,
    HAS_BIAS: tl.constexpr, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    pdl.begin(PDL)
    n_at = tl.program_id(0) * N + tl.arange(0, N)
    m_at = tl.program_id(1) * M + tl.arange(0, M)
    k_at = tl.arange(0, K)
    x_at = x + m_at.to(tl.int64)[:, None] * x_stride + k_at[None, :]
    w_at = w + n_at.to(tl.int64)[:, None] * k + k_at[None, :]
    total = tl.zeros((M, N), dtype=tl.float32)
    for start in range(0, k, K):
        inside = start + k_at < k
        a = tl.load(x_at + start, mask=(m_at < rows)[:, None] & inside[None, :], other=0.0)
        b = tl.load(w_at + start, mask=(n_at < n)[:, None] & inside[None, :], other=0.0)
        total = tl.dot(a, tl.trans(b), total, input_precision="ieee")
    if HAS_BIAS:
        total += tl.load(bias + n_at, mask=n_at < n, other=0.0).to(tl.float32)[None, :]
    tl.store(
        y + m_at.to(tl.int64)[:, None] * y_stride + n_at[None, :],
        total.to(y.dtype.element_ty),
        mask=(m_at < rows)[:, None] & (n_at < n)[None, :],
    )


def wide(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor) -> torch.Tensor:
    """out [T, N] = x [T, K] weight [N, K]^T (+ bias); x and weight of one 16-bit dtype, fp32 accumulation."""
    rows, k = x.shape
    n = weight.shape[0]
    assert x.stride(1) == 1 and weight.is_contiguous() and out.stride(1) == 1 and out.shape == (rows, n)
    block_n = 32 if n <= 8192 else 64
    on = pdl.dependent(x)
    _wide[(triton.cdiv(n, block_n), triton.cdiv(rows, 16))](
        x, weight, weight if bias is None else bias, out, rows, n, k, x.stride(0), out.stride(0),
        bias is not None, 16, block_n, 128, PDL=on, num_warps=4, num_stages=3, **pdl.launch(on),
    )  # fmt: skip
    return out
