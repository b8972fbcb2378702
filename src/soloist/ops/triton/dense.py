"""Row-invariant product over a dense bf16 weight, for the small matrices that stay unquantised.

One tile of 16 rows, a fixed number of K splits that depends on K alone, parts summed in order by the last program of a
tile to arrive: a row's bits do not depend on how many rows there are. A program's share of the weight is one block, on
its way before the kernel in front has ended.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from soloist.ops.linear_cuda import Squares
from soloist.ops.scratch import dense_parts
from soloist.ops.triton import pdl

ROWS = 16
COLUMNS = 16
K_BLOCK = 128


@triton.jit
def roots(squares, m, rows, parts, stride, width, eps, PARTS: tl.constexpr):
    """rsqrt(mean of squares + eps) of rows m, whose sums of squares come in `parts` <= PARTS parts."""
    part = tl.arange(0, PARTS)
    known = (m < rows)[:, None] & (part < parts)[None, :]
    total = tl.sum(tl.load(squares + m.to(tl.int64)[:, None] * stride + part[None, :], mask=known, other=0.0), 1)
    return 1.0 / tl.sqrt(total / width + eps)


@triton.jit
def tile_product(
    x_ptr, w_ptr, part_ptr, arrivals_ptr, squares, rows, n_out, k_in, x_row, k_split, parts, stride, width, eps,
    tile, tiles, split, row_block,
    SPLITS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, PARTS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One K split of an output tile: (sum over all splits [BM, BN] fp32 if this program is the last, whether it is)."""
    m = row_block * BM + tl.arange(0, BM)
    n = tile * BN + tl.arange(0, BN)
    k = split * k_split + tl.arange(0, BK)
    inside = (k < k_in) & (k < (split + 1) * k_split)
    # The weight depends on no kernel before this one: it is on its way before that one has ended.
    w_at = w_ptr + n.to(tl.int64)[None, :] * k_in + k[:, None]
    w = tl.load(w_at, mask=(n < n_out)[None, :] & inside[:, None], other=0.0)
    pdl.begin(PDL)
    x_at = x_ptr + m.to(tl.int64)[:, None] * x_row + k[None, :]
    x = tl.load(x_at, mask=(m < rows)[:, None] & inside[None, :], other=0.0)
    if PARTS > 0:
        roots_of_rows = roots(squares, m, rows, parts, stride, width, eps, PARTS)
    total = tl.dot(x, w, input_precision="ieee")
    last = split == 0
    if SPLITS > 1:
        slot = row_block * tiles + tile
        cell = tl.arange(0, BM)[:, None] * BN + tl.arange(0, BN)[None, :]
        base = part_ptr + slot.to(tl.int64) * (SPLITS * BM * BN) + cell
        tl.store(base + split * (BM * BN), total)
        tl.debug_barrier()
        last = tl.atomic_add(arrivals_ptr + slot, 1, sem="acq_rel") == SPLITS - 1
        if last:
            total = tl.load(base, cache_modifier=".cg")
            for s in tl.static_range(1, SPLITS):
                total += tl.load(base + s * (BM * BN), cache_modifier=".cg")
            tl.store(arrivals_ptr + slot, 0)
    if PARTS > 0:
        # Asked for by all: by the time the last one is known, its roots are there.
        total *= tl.where(last, roots_of_rows, 1.0)[:, None]
    return total, last


@triton.jit
def _dense(
    x_ptr, w_ptr, y_ptr, part_ptr, arrivals_ptr, squares, rows, n_out, k_in, x_row, y_row, k_split, parts, stride,
    width, eps, SPLITS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, PARTS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    tile, row_block = tl.program_id(0), tl.program_id(2)
    total, last = tile_product(
        x_ptr, w_ptr, part_ptr, arrivals_ptr, squares, rows, n_out, k_in, x_row, k_split, parts, stride, width, eps,
        tile, tl.num_programs(0), tl.program_id(1), row_block, SPLITS, BM, BN, BK, PARTS, PDL,
    )  # fmt: skip
    if last:
        m = row_block * BM + tl.arange(0, BM)
        n = tile * BN + tl.arange(0, BN)
        y_at = y_ptr + m.to(tl.int64)[:, None] * y_row + n[None, :]
        tl.store(y_at, total.to(y_ptr.dtype.element_ty), mask=(m < rows)[:, None] & (n < n_out)[None, :])


class DenseProduct:
    """y = x W^T for a dense weight [N, K]; rows in blocks of 16. Parts and counters are shared by all that run on the
    engine's stream: a launch writes them only when the one in front has ended."""

    def __init__(self, weight: torch.Tensor, max_rows: int = 128) -> None:
        self.weight = weight.contiguous()
        n, k = weight.shape
        # 256 of K per program: a [128, 5120] product is 160 programs, and a block of weight few registers.
        self.splits = max(1, min(32, k // 256))
        self.k_split = triton.cdiv(triton.cdiv(k, self.splits), K_BLOCK) * K_BLOCK
        self.block = triton.next_power_of_2(self.k_split)
        self.tiles = triton.cdiv(n, COLUMNS)
        slots = self.tiles * triton.cdiv(max_rows, ROWS)
        self.max_rows = max_rows
        self._scratch = dense_parts(weight.device, slots * self.splits * ROWS * COLUMNS, slots)

    @property
    def parts(self) -> torch.Tensor:
        """fp32: the K splits of every tile, until its last program adds them up."""
        return self._scratch.parts

    @property
    def arrivals(self) -> torch.Tensor:
        """int32: how many programs of a tile have arrived; zero between launches."""
        return self._scratch.arrivals

    def __call__(
        self, x: torch.Tensor, out: torch.Tensor | None = None, squares: Squares | None = None
    ) -> torch.Tensor:
        """x [M, K], unit column stride -> [M, N] in x's dtype. `squares`: what x lacks of its RMS norm."""
        n = self.weight.shape[0]
        on = pdl.dependent(x)
        y = torch.empty(x.shape[0], n, dtype=x.dtype, device=x.device) if out is None else out
        for first in range(0, x.shape[0], self.max_rows):
            part = x[first : first + self.max_rows]
            into = y[first : first + self.max_rows]
            known = None if squares is None else squares.values[first:]
            _dense[(self.tiles, self.splits, triton.cdiv(part.shape[0], ROWS))](
                part, self.weight, into, self.parts, self.arrivals, self.parts if known is None else known,
                part.shape[0], n, self.weight.shape[1], part.stride(0), into.stride(0), self.k_split,
                *root_arguments(squares), **self.shape(squares), PDL=on, num_warps=2, **pdl.launch(on),
            )  # fmt: skip
        return y

    def shape(self, squares: Squares | None) -> dict[str, int]:
        """The compile-time shape of `tile_product`."""
        parts = 0 if squares is None else triton.next_power_of_2(squares.values.shape[1])
        return {"SPLITS": self.splits, "BM": ROWS, "BN": COLUMNS, "BK": self.block, "PARTS": parts}


def root_arguments(squares: Squares | None) -> tuple[int, int, float, float]:
    """(parts, stride, width, eps) of `roots`."""
    if squares is None:
        return 0, 0, 1.0, 0.0
    return squares.values.shape[1], squares.values.stride(0), float(squares.width), squares.eps
