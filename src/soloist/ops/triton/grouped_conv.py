"""The dynamic grouped convolution around a sublayer of the block drafter, in two launches.

`convolve_in` computes the coefficients of both sides and the convolution in front of the sublayer: the product's tiles
are whole groups, so the last program of a tile has all that its groups' channels need. `convolve_out` is the
convolution behind the sublayer with the residual sum and the next norm, one program per row. Neither lets a row see
past the start of its block. Reference: `GroupedConv` of models/dflash2.py.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from soloist.ops.triton import pdl
from soloist.ops.triton.dense import COLUMNS, ROWS, DenseProduct, root_arguments, tile_product
from soloist.ops.triton.embed import normed

LINE = 1024  # channels of a program where the convolution runs alone


@triton.jit
def _convolved(
    x, coefficients, base, row, place, cols, inside, width, columns,
    SIDE: tl.constexpr, TAPS: tl.constexpr, PADDED: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Channels `cols` of one row, fp32. Taps are oldest first; those before the block's start are not there."""
    total = tl.zeros(cols.shape, tl.float32)
    for t in tl.static_range(TAPS):
        back = TAPS - 1 - t
        there = cols < tl.where(place >= back, width, 0)
        source = tl.load(x + (row - back) * width + cols, mask=there, other=0.0).to(tl.float32)
        at = row * columns + cols // GROUP * (2 * PADDED) + 2 * t + SIDE
        dynamic = tl.load(coefficients + at, mask=inside, other=0.0).to(tl.float32)
        total += source * (dynamic + tl.load(base + (SIDE * TAPS + t) * width + cols, mask=inside, other=0.0))
    return total


@triton.jit
def _convolve(
    x, coefficients, base, out, width, columns,
    SIDE: tl.constexpr, TAPS: tl.constexpr, PADDED: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr,
    BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    pdl.begin(PDL)
    row = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = cols < width
    value = _convolved(
        x, coefficients, base, row, row % ROWS, cols, inside, width, columns, SIDE, TAPS, PADDED, GROUP
    )  # fmt: skip
    tl.store(out + row * width + cols, value.to(out.dtype.element_ty), mask=inside)


def convolve(
    x: torch.Tensor, coefficients: torch.Tensor, base: torch.Tensor, padded: int, block: int, out: torch.Tensor
) -> None:
    """The convolution in front of a sublayer from coefficients at hand: where their product is not `convolve_in`'s.

    x, out [R * block, H]; coefficients [R * block, groups * padded * 2], columns (group, tap, side); base fp32
    [2, taps, H].
    """
    rows, width = x.shape
    columns = coefficients.shape[1]
    assert x.is_contiguous() and out.is_contiguous() and coefficients.is_contiguous() and base.is_contiguous()
    group = width * 2 * padded // columns
    on = pdl.dependent(x)
    _convolve[(rows, triton.cdiv(width, LINE))](
        x, coefficients, base, out, width, columns, 0, base.shape[1], padded, group, block, LINE,
        PDL=on, num_warps=4, **pdl.launch(on),
    )  # fmt: skip


@triton.jit
def _convolve_in(
    x, weight, part_ptr, arrivals_ptr, rows, n_out, k_in, k_split, no_parts, no_stride, no_width, no_eps,
    coefficients, base, out, width,
    TAPS: tl.constexpr, PADDED: tl.constexpr, GROUP: tl.constexpr, LANES: tl.constexpr, BLOCK: tl.constexpr,
    SPLITS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, PARTS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    tile, row_block = tl.program_id(0), tl.program_id(2)
    total, last = tile_product(
        x, weight, part_ptr, arrivals_ptr, part_ptr, rows, n_out, k_in, width, k_split, no_parts, no_stride, no_width,
        no_eps, tile, tl.num_programs(0), tl.program_id(1), row_block, SPLITS, BM, BN, BK, PARTS, PDL,
    )  # fmt: skip
    if last:
        G: tl.constexpr = BN // (2 * PADDED)
        m = row_block * BM + tl.arange(0, BM)
        row = m.to(tl.int64)
        n = tile * BN + tl.arange(0, BN)
        # Rounded as a product's output is; the other side reads them back.
        dynamic = total.to(coefficients.dtype.element_ty)
        at = row[:, None] * n_out + n[None, :]
        tl.store(coefficients + at, dynamic, mask=(m < rows)[:, None] & (n < n_out)[None, :])
        of_group = tl.reshape(dynamic.to(tl.float32), (BM, G, 2 * PADDED))
        which = tl.arange(0, 2 * PADDED)
        channel = (tile * G + tl.arange(0, G))[:, None] * GROUP + tl.arange(0, LANES)[None, :]
        real = (channel < width) & (tl.arange(0, LANES) < GROUP)[None, :]
        place = m % BLOCK
        value = tl.zeros((BM, G, LANES), tl.float32)
        for t in tl.static_range(TAPS):
            back = TAPS - 1 - t
            mine = tl.sum(tl.where((which == 2 * t)[None, None, :], of_group, 0.0), 2)
            fixed = tl.load(base + t * width + channel, mask=real, other=0.0)
            there = ((m < rows) & (place >= back))[:, None, None] & real[None, :, :]
            source = tl.load(x + ((row - back) * width)[:, None, None] + channel[None, :, :], mask=there, other=0.0)
            value += source.to(tl.float32) * (mine[:, :, None] + fixed[None, :, :])
        to = out + (row * width)[:, None, None] + channel[None, :, :]
        tl.store(to, value.to(out.dtype.element_ty), mask=(m < rows)[:, None, None] & real[None, :, :])


def why_not_inside(product: DenseProduct | None, padded: int) -> str | None:
    """Why `convolve_in` cannot take this product of coefficients, or None."""
    if product is None:
        return "the coefficients' product is not the small dense one"
    if COLUMNS % (2 * padded):
        return f"a tile of {COLUMNS} columns does not hold whole groups of {2 * padded}"
    return None


def convolve_in(
    x: torch.Tensor,
    product: DenseProduct,
    base: torch.Tensor,
    padded: int,
    block: int,
    coefficients: torch.Tensor,
    out: torch.Tensor,
) -> None:
    """coefficients = x W^T, and out = x convolved with those of side 0 within each block.

    x, out [R * block, H] contiguous; the product's rows are (group, tap, side); coefficients [R * block, groups *
    padded * 2]; base fp32 [2, taps, H], taps <= padded, oldest first.
    """
    rows, width = x.shape
    n, k_in = product.weight.shape
    assert x.is_contiguous() and out.is_contiguous() and coefficients.is_contiguous() and base.is_contiguous()
    assert k_in == width and coefficients.shape == (rows, n)
    group = width * 2 * padded // n
    on = pdl.dependent(x)
    # More rows than the product's scratch holds run as several launches, each of whole blocks.
    most = product.max_rows // block * block
    assert most > 0
    for first in range(0, rows, most):
        part = slice(first, min(rows, first + most))
        count = part.stop - first
        _convolve_in[(product.tiles, product.splits, triton.cdiv(count, ROWS))](
            x[part], product.weight, product.parts, product.arrivals, count, n, k_in, product.k_split,
            *root_arguments(None), coefficients[part], base, out[part], width,
            base.shape[1], padded, group, triton.next_power_of_2(group), block, **product.shape(None),
            PDL=on, num_warps=2, **pdl.launch(on),
        )  # fmt: skip


@triton.jit
def _convolve_out(
    delta, coefficients, base, x, factor, out, eps, width, columns,
    TAPS: tl.constexpr, PADDED: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, SKIP: tl.constexpr,
    BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    pdl.begin(PDL)
    row = tl.program_id(0).to(tl.int64)
    place = row % ROWS
    cols = tl.arange(0, BLOCK)
    inside = cols < width
    value = _convolved(delta, coefficients, base, row, place, cols, inside, width, columns, 1, TAPS, PADDED, GROUP)
    value = value.to(x.dtype.element_ty).to(tl.float32)
    value += tl.load(x + row * width + cols, mask=inside, other=0.0).to(tl.float32)
    rounded = value.to(x.dtype.element_ty)
    tl.store(x + row * width + cols, rounded, mask=inside)
    y = normed(rounded.to(tl.float32), tl.load(factor + cols, mask=inside, other=0.0), inside, width, eps)
    to = row
    if SKIP:
        to = row // ROWS * (ROWS - 1) + place - 1
        inside = cols < tl.where(place > 0, width, 0)
    tl.store(out + to * width + cols, y.to(out.dtype.element_ty), mask=inside)


def convolve_out(
    delta: torch.Tensor,
    coefficients: torch.Tensor,
    base: torch.Tensor,
    padded: int,
    block: int,
    x: torch.Tensor,
    factor: torch.Tensor,
    eps: float,
    out: torch.Tensor,
) -> None:
    """x += delta convolved with the coefficients of side 1, out = rms_norm(x) * factor.

    delta, x [R * block, H]; coefficients and base as of `convolve_in`; factor fp32 [H]; out [R * block, H], or
    [R * (block - 1), H]: without the first row of every block.
    """
    rows, width = x.shape
    columns = coefficients.shape[1]
    skips = out.shape[0] != rows
    assert delta.is_contiguous() and x.is_contiguous() and out.is_contiguous() and coefficients.is_contiguous()
    assert out.shape[0] == (rows // block * (block - 1) if skips else rows)
    group = width * 2 * padded // columns
    on = pdl.dependent(x)
    _convolve_out[(rows,)](
        delta, coefficients, base, x, factor, out, eps, width, columns, base.shape[1], padded, group, block, skips,
        triton.next_power_of_2(width), PDL=on, num_warps=8, **pdl.launch(on),
    )  # fmt: skip
