"""Convolution and gates of a step's rows in one launch, the gates' own small product included.

b and a are two rows of weight per head, kept in 16 bits: too little to stream well on its own, and independent of the
convolution. Programs of both kinds stand side by side: the first ones are the product's (`dense.tile_product`), the
others the convolution's (`delta.conv_program`). Reference: `DeltaNet.project` in models/layers.py.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from soloist.ops.linear_cuda import Squares
from soloist.ops.triton import pdl
from soloist.ops.triton.delta import conv_program, log_decay
from soloist.ops.triton.dense import ROWS, DenseProduct, root_arguments, tile_product


@triton.jit
def _prepare_gates(
    h, ba_weight, part_ptr, arrivals_ptr, squares, rows, n_out, k_in, h_row, k_split, parts, stride, width, eps,
    u, conv, taps, request, slots, weight, negative_a, dt_bias, q_out, k_out, v_out, decay_out, beta_out,
    u_stride, ba_half, scale, tiles, products,
    HK: tl.constexpr, HV: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, TAPS: tl.constexpr, CHANNELS: tl.constexpr,
    BLOCK: tl.constexpr, SPLITS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    PARTS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    if program < products:
        tile, split, row_block = program % tiles, program // tiles % SPLITS, program // (tiles * SPLITS)
        total, last = tile_product(
            h, ba_weight, part_ptr, arrivals_ptr, squares, rows, n_out, k_in, h_row, k_split, parts, stride, width, eps,
            tile, tiles, split, row_block, SPLITS, BM, BN, BK, PARTS, PDL,
        )  # fmt: skip
        if last:
            m = (row_block * BM + tl.arange(0, BM)).to(tl.int64)
            n = tile * BN + tl.arange(0, BN)
            head = tl.where(n < ba_half, n, n - ba_half)
            real = (m < rows)[:, None] & (head < HV)[None, :]
            # Rounded as a product's output is.
            value = total.to(h.dtype.element_ty).to(tl.float32)
            dt = tl.load(dt_bias + head, mask=head < HV, other=0.0)
            g = log_decay(value, dt[None, :], tl.load(negative_a + head, mask=head < HV, other=0.0)[None, :])
            at = m[:, None] * HV + head[None, :]
            tl.store(beta_out + at, 1.0 / (1.0 + tl.exp(-value)), mask=real & (n < ba_half)[None, :])
            tl.store(decay_out + at, tl.exp(g), mask=real & (n >= ba_half)[None, :])
    else:
        pdl.begin(PDL)
        row = ((program - products) // (2 * HK + HV)).to(tl.int64)
        head = (program - products) % (2 * HK + HV)
        conv_program(
            u, conv, taps, request, slots, weight, q_out, k_out, v_out, u_stride, scale, row, head,
            HK, HV, DK, DV, TAPS, CHANNELS, BLOCK,
        )  # fmt: skip


def prepare_gates(
    h: torch.Tensor,
    squares: Squares | None,
    ba: DenseProduct,
    u: torch.Tensor,
    conv: torch.Tensor,
    taps: torch.Tensor,
    request: torch.Tensor,
    slots: torch.Tensor,
    weight: torch.Tensor,
    negative_a: torch.Tensor,
    dt_bias: torch.Tensor,
    record: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor],
) -> None:
    """`delta.prepare` with b and a computed here: h [T, H] 16-bit rows; `ba` has N / 2 rows for b, then as many for a.

    `squares` is what h lacks of its RMS norm. At most `ba.max_rows` rows.
    """
    q, k, v, decay, beta = record
    rows, key_heads, dk = q.shape
    value_heads, dv = v.shape[1], v.shape[2]
    n, k_in = ba.weight.shape
    assert h.stride(1) == 1 and rows <= ba.max_rows and h.shape == (rows, k_in)
    assert u.stride(1) == 1 and conv.is_contiguous() and taps.is_contiguous()
    on = pdl.dependent(u)
    products = ba.tiles * ba.splits * triton.cdiv(rows, ROWS)
    _prepare_gates[(products + rows * (2 * key_heads + value_heads),)](
        h, ba.weight, ba.parts, ba.arrivals, ba.parts if squares is None else squares.values, rows, n, k_in,
        h.stride(0), ba.k_split, *root_arguments(squares),
        u, conv, taps, request, slots, weight, negative_a, dt_bias, q, k, v, decay, beta,
        u.stride(0), n // 2, dk**-0.5, ba.tiles, products,
        key_heads, value_heads, dk, dv, taps.shape[1], weight.shape[1], triton.next_power_of_2(max(dk, dv)),
        **ba.shape(squares), PDL=on, num_warps=2, **pdl.launch(on),
    )  # fmt: skip
