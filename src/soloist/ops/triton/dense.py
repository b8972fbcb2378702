"""Row-invariant product over a dense bf16 weight, for the small matrices that stay unquantised.

One tile of 16 rows, a fixed number of K splits that depends on K alone, parts summed in order by the last program of a
tile to arrive: a row's bits do not depend on how many rows there are.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from soloist.ops.triton import pdl

ROWS = 16
COLUMNS = 16
K_BLOCK = 128


@triton.jit
def _dense(
    x_ptr, w_ptr, y_ptr, part_ptr, arrivals_ptr, rows, n_out, k_in, x_row, y_row, k_split,
    SPLITS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    pdl.begin(PDL)
    tile, split, row_block = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    m = row_block * BM + tl.arange(0, BM)
    n = tile * BN + tl.arange(0, BN)
    k = split * k_split + tl.arange(0, BK)
    x_at = x_ptr + m.to(tl.int64)[:, None] * x_row + k[None, :]
    w_at = w_ptr + n.to(tl.int64)[None, :] * k_in + k[:, None]
    total = tl.zeros((BM, BN), dtype=tl.float32)
    for start in range(0, k_split, BK):
        inside = k + start < k_in
        x = tl.load(x_at + start, mask=(m < rows)[:, None] & inside[None, :], other=0.0)
        w = tl.load(w_at + start, mask=(n < n_out)[None, :] & inside[:, None], other=0.0)
        total = tl.dot(x, w, total, input_precision="ieee")
    out = (m < rows)[:, None] & (n < n_out)[None, :]
    y_at = y_ptr + m.to(tl.int64)[:, None] * y_row + n[None, :]
    if SPLITS == 1:
        tl.store(y_at, total.to(y_ptr.dtype.element_ty), mask=out)
    else:
        slot = row_block * tl.num_programs(0) + tile
        cell = tl.arange(0, BM)[:, None] * BN + tl.arange(0, BN)[None, :]
        base = part_ptr + slot.to(tl.int64) * (SPLITS * BM * BN) + cell
        tl.store(base + split * (BM * BN), total)
        tl.debug_barrier()
        before = tl.atomic_add(arrivals_ptr + slot, 1, sem="acq_rel")
        if before == SPLITS - 1:
            total = tl.load(base, cache_modifier=".cg")
            for s in tl.static_range(1, SPLITS):
                total += tl.load(base + s * (BM * BN), cache_modifier=".cg")
            tl.store(y_at, total.to(y_ptr.dtype.element_ty), mask=out)
            tl.store(arrivals_ptr + slot, 0)


class DenseProduct:
    """y = x W^T for a dense weight [N, K]; rows in blocks of 16. Holds its own parts and counters (one stream)."""

    def __init__(self, weight: torch.Tensor, max_rows: int = 256) -> None:
        self.weight = weight.contiguous()
        n, k = weight.shape
        # About 512 of K per program keeps a [96, 5120] product at 60 programs.
        self.splits = max(1, min(16, k // 512))
        self.k_split = triton.cdiv(triton.cdiv(k, self.splits), K_BLOCK) * K_BLOCK
        slots = triton.cdiv(n, COLUMNS) * triton.cdiv(max_rows, ROWS)
        self.max_rows = max_rows
        self.parts = torch.empty(slots * self.splits * ROWS * COLUMNS, dtype=torch.float32, device=weight.device)
        self.arrivals = torch.zeros(slots, dtype=torch.int32, device=weight.device)

    def __call__(self, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """x [M, K], unit column stride -> [M, N] in x's dtype."""
        n, k = self.weight.shape
        on = pdl.dependent(x)
        y = torch.empty(x.shape[0], n, dtype=x.dtype, device=x.device) if out is None else out
        for first in range(0, x.shape[0], self.max_rows):
            part = x[first : first + self.max_rows]
            into = y[first : first + self.max_rows]
            grid = (triton.cdiv(n, COLUMNS), self.splits, triton.cdiv(part.shape[0], ROWS))
            _dense[grid](
                part, self.weight, into, self.parts, self.arrivals, part.shape[0], n, k, part.stride(0),
                into.stride(0), self.k_split, SPLITS=self.splits, BM=ROWS, BN=COLUMNS, BK=K_BLOCK, PDL=on, num_warps=2,
                **pdl.launch(on),
            )  # fmt: skip
        return y
