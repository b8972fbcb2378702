"""Embedding look-ups of a card's rows, and the norm that follows them, in one launch each.

One program per row. A quantised table is decoded as `QuantizedWeight.rows` does: (code - zero) times scale in fp32 with
one rounding to the activations' type, which is exact up to that rounding, so `embed` leaves the same bits. References:
`ops/linear.py`, `ops/norms.py`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from soloist.ops.linear import DenseWeight, QuantizedWeight, Weight
from soloist.ops.triton import pdl


@dataclass(frozen=True)
class Table:
    """An embedding as the kernels read it: codes int32 [V, words] and scales [V, groups], or rows [V, H] (bits 0)."""

    rows: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor
    group: int
    bits: int
    has_zeros: bool

    @classmethod
    def of(cls, weight: Weight) -> Table:
        if isinstance(weight, DenseWeight):
            assert weight.weight.is_contiguous()
            return cls(weight.weight, weight.weight, weight.weight, 1, 0, False)
        assert isinstance(weight, QuantizedWeight) and 32 % weight.bits == 0
        zeros = weight.scales if weight.zeros is None else weight.zeros
        assert weight.codes.is_contiguous() and weight.scales.is_contiguous() and zeros.is_contiguous()
        return cls(weight.codes, weight.scales, zeros, weight.group, weight.bits, weight.zeros is not None)

    @property
    def arguments(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, int, int, int]:
        """What `look_up` reads, as launched."""
        return self.rows, self.scales, self.zeros, self.rows.shape[1], self.scales.shape[1], self.group


@triton.jit
def look_up(
    table, scales, zeros, words, groups, group, token, cols, inside, BITS: tl.constexpr, HAS_ZEROS: tl.constexpr
):
    """fp32 values of columns `cols` of row `token` (int64)."""
    if BITS == 0:
        value = tl.load(table + token * words + cols, mask=inside, other=0.0).to(tl.float32)
    else:
        EACH: tl.constexpr = 32 // BITS
        word = tl.load(table + token * words + cols // EACH, mask=inside, other=0)
        code = (word >> (cols % EACH * BITS)) & ((1 << BITS) - 1)
        at = token * groups + cols // group
        if HAS_ZEROS:
            zero = tl.load(zeros + at, mask=inside, other=0).to(tl.float32)
            centred = code.to(tl.float32) - zero
        else:
            centred = (code - (1 << (BITS - 1))).to(tl.float32)
        value = centred * tl.load(scales + at, mask=inside, other=0.0).to(tl.float32)
    return value


@triton.jit
def normed(value, factor, inside, width, eps):
    """RMS norm of a row, zero where not `inside`, times `factor`; fp32."""
    value = tl.where(inside, value, 0.0)
    return value * (1.0 / tl.sqrt(tl.sum(value * value, 0) / width + eps)) * factor


@triton.jit
def _embed(
    table, scales, zeros, words, groups, group, tokens, x, width,
    BITS: tl.constexpr, HAS_ZEROS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    pdl.begin(PDL)
    row = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = cols < width
    token = tl.load(tokens + row).to(tl.int64)
    value = look_up(table, scales, zeros, words, groups, group, token, cols, inside, BITS, HAS_ZEROS)
    tl.store(x + row * width + cols, value.to(x.dtype.element_ty), mask=inside)


def embed(table: Table, tokens: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """x [T, H] = rows `tokens` (int [T]) of the table, rounded to x's type: the bits of `Weight.rows`."""
    rows, width = x.shape
    assert x.is_contiguous() and tokens.is_contiguous() and tokens.shape == (rows,)
    block = 1024
    on = pdl.dependent(x)
    _embed[(rows, triton.cdiv(width, block))](
        *table.arguments, tokens, x, width, table.bits, table.has_zeros, block, PDL=on, num_warps=4, **pdl.launch(on)
    )
    return x


@triton.jit
def _embed_block(
    table, scales, zeros, words, groups, group, anchors, mask_token, factor, x, h, times, eps, width,
    ROWS: tl.constexpr, BITS: tl.constexpr, HAS_ZEROS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    pdl.begin(PDL)
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    inside = cols < width
    anchor = tl.load(anchors + row // ROWS)
    token = tl.where(row % ROWS == 0, anchor, mask_token).to(tl.int64)
    value = look_up(table, scales, zeros, words, groups, group, token, cols, inside, BITS, HAS_ZEROS)
    value = (value.to(x.dtype.element_ty).to(tl.float32) * times).to(x.dtype.element_ty)
    tl.store(x + row * width + cols, value, mask=inside)
    weight = tl.load(factor + cols, mask=inside, other=0.0)
    out = normed(value.to(tl.float32), weight, inside, width, eps)
    tl.store(h + row * width + cols, out.to(h.dtype.element_ty), mask=inside)


def embed_block(
    table: Table,
    anchors: torch.Tensor,
    mask_token: int,
    times: float,
    factor: torch.Tensor,
    eps: float,
    x: torch.Tensor,
    h: torch.Tensor,
) -> None:
    """x [R * block, H] = embeddings of [anchor, mask, mask, ..] per request, times `times`; h = rms_norm(x) * factor.

    anchors int [R]; factor fp32 [H].
    """
    rows, width = x.shape
    assert x.is_contiguous() and h.is_contiguous() and h.shape == x.shape and rows % anchors.numel() == 0
    on = pdl.dependent(x)
    _embed_block[(rows,)](
        *table.arguments, anchors, mask_token, factor, x, h, times, eps, width, rows // anchors.numel(), table.bits,
        table.has_zeros, triton.next_power_of_2(width), PDL=on, num_warps=8, **pdl.launch(on),
    )  # fmt: skip


@triton.jit
def _embed_pair(
    table, scales, zeros, words, groups, group, tokens, hidden, sources, factors, pair, eps, width,
    CHOSEN: tl.constexpr, BITS: tl.constexpr, HAS_ZEROS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    pdl.begin(PDL)
    row = tl.program_id(0).to(tl.int64)
    half = tl.program_id(1)
    cols = tl.arange(0, BLOCK)
    inside = cols < width
    if half == 0:
        token = tl.load(tokens + row).to(tl.int64)
        value = look_up(table, scales, zeros, words, groups, group, token, cols, inside, BITS, HAS_ZEROS)
        value = value.to(pair.dtype.element_ty).to(tl.float32)
    else:
        source = row
        if CHOSEN:
            source = tl.load(sources + row).to(tl.int64)
        value = tl.load(hidden + source * width + cols, mask=inside, other=0.0).to(tl.float32)
    weight = tl.load(factors + half * width + cols, mask=inside, other=0.0)
    out = normed(value, weight, inside, width, eps)
    tl.store(pair + (row * 2 + half) * width + cols, out.to(pair.dtype.element_ty), mask=inside)


def embed_pair(
    table: Table,
    tokens: torch.Tensor,
    hidden: torch.Tensor,
    sources: torch.Tensor | None,
    factors: torch.Tensor,
    eps: float,
    pair: torch.Tensor,
) -> None:
    """pair [T, 2, H]: the normed embedding of every row's token beside a normed hidden state.

    tokens int [T]; hidden [n, H], of which row t takes row sources[t] (int [T]), or row t where `sources` is None;
    factors fp32 [2, H].
    """
    rows, _, width = pair.shape
    assert pair.is_contiguous() and hidden.is_contiguous() and factors.is_contiguous()
    on = pdl.dependent(pair)
    _embed_pair[(rows, 2)](
        *table.arguments, tokens, hidden, tokens if sources is None else sources, factors, pair, eps, width,
        sources is not None, table.bits, table.has_zeros, triton.next_power_of_2(width), PDL=on, num_warps=8,
        **pdl.launch(on),
    )  # fmt: skip
