"""Gated DeltaNet on a card: convolution and gates of a step's rows, the walk along the tree, the fold of what was kept.

The walk starts from the settled state, visits the rows in depth-first order and never writes the state. `fold`
replays the accepted rows of the record afterwards, all layers in one launch: `_advance` is the one place where
a token meets a state, so folding is bit-identical to having decoded the tokens one by one. References:
`ops/conv.py`, `ops/gated_delta.py`.

What can go wrong: a compiler that fuses multiply and add in one kernel and not in the other (fusion is off in both).
A row whose parent is not the row before it needs the parent's state; rows with such a child
(`keep`) leave theirs in a scratch buffer.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from soloist.ops.triton import pdl


@triton.jit
def _conv_head(
    u, conv, taps, weight, row, slot, channel, inside, u_stride, channels,
    TAPS: tl.constexpr,
):  # fmt: skip
    """silu(sum_j weight[j] * tap_j) of one row, some channels. Tap >= 0: a row of the step; -1 - j: stored column j."""
    total = tl.zeros(channel.shape, dtype=tl.float32)
    for j in tl.static_range(TAPS):
        tap = tl.load(taps + row * TAPS + j).to(tl.int64)
        if tap >= 0:
            value = tl.load(u + tap * u_stride + channel, mask=inside, other=0.0)
        else:
            column = slot * (TAPS - 1) + (-1 - tap)
            value = tl.load(conv + column * channels + channel, mask=inside, other=0.0)
        total += value.to(tl.float32) * tl.load(weight + j * channels + channel, mask=inside, other=0.0)
    silu = total / (1.0 + tl.exp(-total))
    return silu.to(u.dtype.element_ty).to(tl.float32)


@triton.jit
def conv_program(
    u, conv, taps, request, slots, weight, q_out, k_out, v_out, u_stride, scale, row, head,
    HK: tl.constexpr, HV: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, TAPS: tl.constexpr, CHANNELS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """One row of one head: a query or key head (head < 2 HK), convolved and normalised, or a value head, convolved."""
    slot = tl.load(slots + tl.load(request + row)).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    if head < 2 * HK:
        inside = cols < DK
        y = _conv_head(u, conv, taps, weight, row, slot, head * DK + cols, inside, u_stride, CHANNELS, TAPS)
        y = tl.where(inside, y, 0.0)
        y = y * (1.0 / tl.sqrt(tl.sum(y * y, 0) + 1e-6))
        if head < HK:
            tl.store(q_out + (row * HK + head) * DK + cols, y * scale, mask=inside)
        else:
            tl.store(k_out + (row * HK + head - HK) * DK + cols, y, mask=inside)
    else:
        inside = cols < DV
        at = head - 2 * HK
        y = _conv_head(u, conv, taps, weight, row, slot, 2 * HK * DK + at * DV + cols, inside, u_stride, CHANNELS, TAPS)
        tl.store(v_out + (row * HV + at) * DV + cols, y, mask=inside)


@triton.jit
def log_decay(a, dt_bias, negative_a):
    """softplus(a + dt_bias) * -exp(A_log)."""
    a += dt_bias
    return tl.where(a > 20.0, a, tl.log(1.0 + tl.exp(tl.minimum(a, 20.0)))) * negative_a


@triton.jit
def _prepare(
    u, ba, conv, taps, request, slots, weight, negative_a, dt_bias, q_out, k_out, v_out, decay_out, beta_out,
    u_stride, ba_stride, ba_half, scale,
    HK: tl.constexpr, HV: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, TAPS: tl.constexpr, CHANNELS: tl.constexpr,
    BLOCK: tl.constexpr, GATES: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    pdl.begin(PDL)
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    if head < 2 * HK + HV:
        conv_program(
            u, conv, taps, request, slots, weight, q_out, k_out, v_out, u_stride, scale, row, head,
            HK, HV, DK, DV, TAPS, CHANNELS, BLOCK,
        )  # fmt: skip
    else:
        heads = tl.arange(0, GATES)
        real = heads < HV
        b = tl.load(ba + row * ba_stride + heads, mask=real, other=0.0).to(tl.float32)
        a = tl.load(ba + row * ba_stride + ba_half + heads, mask=real, other=0.0).to(tl.float32)
        dt = tl.load(dt_bias + heads, mask=real, other=0.0)
        g = log_decay(a, dt, tl.load(negative_a + heads, mask=real, other=0.0))
        tl.store(decay_out + row * HV + heads, tl.exp(g), mask=real)
        tl.store(beta_out + row * HV + heads, 1.0 / (1.0 + tl.exp(-b)), mask=real)


def prepare(
    u: torch.Tensor,
    ba: torch.Tensor,
    conv: torch.Tensor,
    taps: torch.Tensor,
    request: torch.Tensor,
    slots: torch.Tensor,
    weight: torch.Tensor,
    negative_a: torch.Tensor,
    dt_bias: torch.Tensor,
    record: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor],
) -> None:
    """Convolution, SiLU, L2 norms and gates of every row.

    u [T, >= C] 16-bit projections, the convolved channels first; ba [T, 2 * half]; conv [slots, K-1, C]; taps int32
    [T, K]; weight [K, C] fp32. Writes record = (q, k [T, Hk, dk], v [T, Hv, dv], decay, beta [T, Hv]), fp32.
    """
    q, k, v, decay, beta = record
    rows, key_heads, dk = q.shape
    value_heads, dv = v.shape[1], v.shape[2]
    assert u.stride(1) == 1 and ba.stride(1) == 1 and conv.is_contiguous() and taps.is_contiguous()
    on = pdl.dependent(u)
    _prepare[(rows, 2 * key_heads + value_heads + 1)](
        u, ba, conv, taps, request, slots, weight, negative_a, dt_bias, q, k, v, decay, beta,
        u.stride(0), ba.stride(0), ba.shape[1] // 2, dk**-0.5,
        key_heads, value_heads, dk, dv, taps.shape[1], weight.shape[1],
        triton.next_power_of_2(max(dk, dv)), triton.next_power_of_2(value_heads), PDL=on, num_warps=2,
        **pdl.launch(on),
    )  # fmt: skip


@triton.jit
def _advance(state, k, v, decay, beta, STATE: tl.constexpr):
    """S <- exp(g) S; d = beta (v - S^T k); S <- S + k d^T; rounded to the storage type after every token.

    state [BV, DK], transposed: a warp holds eight columns of S, so both dot products stay inside it.
    """
    state = state * decay
    d = (v - tl.sum(state * k[None, :], 1)) * beta
    state = state + d[:, None] * k[None, :]
    return state.to(STATE).to(tl.float32)


@triton.jit
def _fetch(k, q, v, decay, beta, parent, keep, row, key_head, head, rows_k, cols_v, HK, HV, DK, DV):
    """What the walk needs to know of one row."""
    at_k = (row * HK + key_head) * DK + rows_k
    return (
        tl.load(k + at_k),
        tl.load(q + at_k),
        tl.load(v + (row * HV + head) * DV + cols_v),
        tl.load(decay + row * HV + head),
        tl.load(beta + row * HV + head),
        tl.load(parent + row),
        tl.load(keep + row),
    )


@triton.jit
def _visit(state, x, row, first, settled, scratch, keep, out, head, cols_v, tile, HV, DK, DV, STATE: tl.constexpr):
    """Advance by one row: from the row before, or from wherever its parent's state is kept."""
    ki, qi, vi, di, bi, above, entry = x
    if row != first and above != row - 1:
        if above < 0:
            state = tl.load(settled).to(tl.float32)
        else:
            kept = tl.load(keep + above).to(tl.int64)
            state = tl.load(scratch + (kept * HV + head) * DK * DV + tile).to(tl.float32)
    state = _advance(state, ki, vi, di, bi, STATE)
    tl.store(out + (row * HV + head) * DV + cols_v, tl.sum(state * qi[None, :], 1))
    if entry > 0:
        tl.store(scratch + (entry.to(tl.int64) * HV + head) * DK * DV + tile, state.to(STATE))
        tl.debug_barrier()
    return state


@triton.jit
def _walk(
    states, q, k, v, decay, beta, out, scratch, slots, starts, counts, parent, keep,
    HK: tl.constexpr, HV: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, BV: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    pdl.begin(PDL)
    head = tl.program_id(0)
    request = tl.program_id(2)
    kh = head // (HV // HK)
    rk = tl.arange(0, DK)
    cv = tl.program_id(1) * BV + tl.arange(0, BV)
    tile = rk[None, :] * DV + cv[:, None]
    STATE: tl.constexpr = states.dtype.element_ty
    slot = tl.load(slots + request).to(tl.int64)
    settled = states + (slot * HV + head) * DK * DV + tile
    first = tl.load(starts + request).to(tl.int64)
    count = tl.load(counts + request)
    if count > 0:
        state = tl.load(settled).to(tl.float32)
        last = first + count - 1
        # Four rows' inputs are fetched together: their latency is paid once, not four times.
        for at in range(0, count, 4):
            r0 = first + at
            r1, r2, r3 = tl.minimum(r0 + 1, last), tl.minimum(r0 + 2, last), tl.minimum(r0 + 3, last)
            x0 = _fetch(k, q, v, decay, beta, parent, keep, r0, kh, head, rk, cv, HK, HV, DK, DV)
            x1 = _fetch(k, q, v, decay, beta, parent, keep, r1, kh, head, rk, cv, HK, HV, DK, DV)
            x2 = _fetch(k, q, v, decay, beta, parent, keep, r2, kh, head, rk, cv, HK, HV, DK, DV)
            x3 = _fetch(k, q, v, decay, beta, parent, keep, r3, kh, head, rk, cv, HK, HV, DK, DV)
            state = _visit(state, x0, r0, first, settled, scratch, keep, out, head, cv, tile, HV, DK, DV, STATE)
            if at + 1 < count:
                state = _visit(state, x1, r1, first, settled, scratch, keep, out, head, cv, tile, HV, DK, DV, STATE)
            if at + 2 < count:
                state = _visit(state, x2, r2, first, settled, scratch, keep, out, head, cv, tile, HV, DK, DV, STATE)
            if at + 3 < count:
                state = _visit(state, x3, r3, first, settled, scratch, keep, out, head, cv, tile, HV, DK, DV, STATE)


BLOCK_V = 8


def walk(
    states: torch.Tensor,
    record: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor],
    out: torch.Tensor,
    scratch: torch.Tensor,
    slots: torch.Tensor,
    starts: torch.Tensor,
    counts: torch.Tensor,
    parent: torch.Tensor,
    keep: torch.Tensor,
) -> None:
    """Verify the rows of every request from its settled state.

    states [slots, Hv, dk, dv]; out [T, Hv, dv] fp32; scratch [entries, Hv, dk, dv], at least
    as wide as states; per request: slots, first
    row, row count; per row: parent (global row or -1), keep (the scratch entry its state is left in, from 1 on, if a
    later row that is not the next one continues from it; else 0).
    """
    q, k, v, decay, beta = record
    key_heads, dk = q.shape[1], q.shape[2]
    value_heads, dv = v.shape[1], v.shape[2]
    bv = min(BLOCK_V, dv)
    on = pdl.dependent(out)
    # A state is a value of its storage type after every token, so the scratch holds it exactly, and in the layout of
    # the states: with another element size the compiler would compute each token twice, in two reduction orders.
    scratch = scratch.view(states.dtype)
    _walk[(value_heads, dv // bv, slots.numel())](
        states, q, k, v, decay, beta, out, scratch, slots, starts, counts, parent, keep,
        key_heads, value_heads, dk, dv, bv, PDL=on, num_warps=1, enable_fp_fusion=False, **pdl.launch(on),
    )  # fmt: skip


@triton.jit
def _fold(
    states, conv, k, v, decay, beta, u, taps, path, lengths, slots,
    state_layer, conv_layer, k_layer, v_layer, gate_layer, u_layer, u_stride, path_stride,
    HK: tl.constexpr, HV: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, BV: tl.constexpr,
    LOOP: tl.constexpr,
):  # fmt: skip
    layer = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) // (DV // (BV * LOOP))
    group = tl.program_id(1) % (DV // (BV * LOOP))
    request = tl.program_id(2)
    length = tl.load(lengths + request)
    if length > 0:
        key_head = head // (HV // HK)
        rows_k = tl.arange(0, DK)
        slot = tl.load(slots + request).to(tl.int64)
        STATE: tl.constexpr = states.dtype.element_ty
        k_at = k + layer * k_layer + key_head * DK + rows_k
        gates = layer * gate_layer + head
        steps = path + request * path_stride
        first, second = tl.load(steps).to(tl.int64), tl.load(steps + tl.minimum(1, length - 1)).to(tl.int64)
        # A program per eight columns would spend its time being launched: each takes LOOP blocks in turn.
        for i in range(LOOP):
            cols_v = (group * LOOP + i) * BV + tl.arange(0, BV)
            tile = rows_k[None, :] * DV + cols_v[:, None]
            settled = states + layer * state_layer + (slot * HV + head) * DK * DV + tile
            v_at = v + layer * v_layer + head * DV + cols_v
            state = tl.load(settled).to(tl.float32)
            ki, vi = tl.load(k_at + first * HK * DK), tl.load(v_at + first * HV * DV)
            di, bi = tl.load(decay + gates + first * HV), tl.load(beta + gates + first * HV)
            ahead = second
            for j in range(length):
                # Row j + 1's inputs and the number of row j + 2 are on their way while row j is computed.
                k_next, v_next = tl.load(k_at + ahead * HK * DK), tl.load(v_at + ahead * HV * DV)
                d_next, b_next = tl.load(decay + gates + ahead * HV), tl.load(beta + gates + ahead * HV)
                ahead = tl.load(steps + tl.minimum(j + 2, length - 1)).to(tl.int64)
                state = _advance(state, ki, vi, di, bi, STATE)
                ki, vi, di, bi = k_next, v_next, d_next, b_next
            tl.store(settled, state.to(STATE))


@triton.jit
def _settle_conv(
    conv, u, taps, path, lengths, slots, conv_layer, u_layer, u_stride, path_stride, channels,
    TAPS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    layer = tl.program_id(0).to(tl.int64)
    request = tl.program_id(2)
    length = tl.load(lengths + request)
    if length > 0:
        cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        inside = cols < channels
        slot = tl.load(slots + request).to(tl.int64)
        last = tl.load(path + request * path_stride + length - 1).to(tl.int64)
        columns = conv + layer * conv_layer + slot * (TAPS - 1) * channels + cols
        # Oldest first: column j is only ever replaced by a younger one, so reading ahead of the writes is safe.
        for j in tl.static_range(TAPS - 1):
            tap = tl.load(taps + last * TAPS + j + 1).to(tl.int64)
            if tap >= 0:
                value = tl.load(u + layer * u_layer + tap * u_stride + cols, mask=inside)
            else:
                value = tl.load(columns + (-1 - tap) * channels, mask=inside)
            tl.store(columns + j * channels, value, mask=inside)


def fold(
    states: torch.Tensor,
    conv: torch.Tensor,
    record: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor],
    u: torch.Tensor,
    taps: torch.Tensor,
    path: torch.Tensor,
    lengths: torch.Tensor,
    slots: torch.Tensor,
) -> None:
    """Settle every layer's accepted rows in two launches.

    states [L, slots, Hv, dk, dv]; conv [L, slots, K-1, C]; record tensors and u [L, T, ..] as `prepare` left them; path
    int32 [R, >= longest]: accepted rows, anchor first; lengths [R] (0: nothing to settle); taps [T, K] of the step.
    """
    _, k, v, decay, beta = record
    key_heads, dk = k.shape[2], k.shape[3]
    value_heads, dv = v.shape[2], v.shape[3]
    bv = min(BLOCK_V, dv)
    layers, requests = states.shape[0], slots.numel()
    loop = min(4, dv // bv)
    _fold[(layers, value_heads * (dv // (bv * loop)), requests)](
        states, conv, k, v, decay, beta, u, taps, path, lengths, slots,
        states.stride(0), conv.stride(0), k.stride(0), v.stride(0), decay.stride(0), u.stride(0), u.stride(1),
        path.stride(0), key_heads, value_heads, dk, dv, bv, loop, num_warps=1, enable_fp_fusion=False,
    )  # fmt: skip
    settle_conv(conv, u, taps, path, lengths, slots)


def settle_conv(
    conv: torch.Tensor,
    u: torch.Tensor,
    taps: torch.Tensor,
    path: torch.Tensor,
    lengths: torch.Tensor,
    slots: torch.Tensor,
) -> None:
    """The convolution's part of `fold`: every layer's columns as of the last accepted row."""
    layers, channels = conv.shape[0], conv.shape[-1]
    block = 1024
    _settle_conv[(layers, triton.cdiv(channels, block), slots.numel())](
        conv, u, taps, path, lengths, slots, conv.stride(0), u.stride(0), u.stride(1), path.stride(0), channels,
        taps.shape[1], block, num_warps=4,
    )  # fmt: skip


@triton.jit
def _gated_norm(
    o, z, weight, out, z_stride, eps, SIGMOID: tl.constexpr, HV: tl.constexpr, DV: tl.constexpr, BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    pdl.begin(PDL)
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    cols = tl.arange(0, BLOCK)
    inside = cols < DV
    x = tl.load(o + (row * HV + head) * DV + cols, mask=inside, other=0.0)
    x = x * (1.0 / tl.sqrt(tl.sum(x * x, 0) / DV + eps)) * tl.load(weight + cols, mask=inside, other=0.0)
    gate = tl.load(z + row * z_stride + head * DV + cols, mask=inside, other=0.0).to(tl.float32)
    act = 1.0 / (1.0 + tl.exp(-gate))
    if not SIGMOID:
        act = gate * act
    tl.store(out + (row * HV + head) * DV + cols, (x * act).to(out.dtype.element_ty), mask=inside)


def gated_norm(
    o: torch.Tensor, z: torch.Tensor, weight: torch.Tensor, eps: float, act: str, out: torch.Tensor
) -> torch.Tensor:
    """out [T, Hv * dv] = weight * o / rms(o) * act(z). o [T, Hv, dv] fp32; z [T, Hv * dv] with any row stride."""
    rows, heads, dim = o.shape
    assert z.stride(1) == 1 and out.is_contiguous()
    on = pdl.dependent(o)
    _gated_norm[(rows, heads)](
        o, z, weight, out, z.stride(0), eps, act == "sigmoid", heads, dim, triton.next_power_of_2(dim),
        PDL=on, num_warps=1, **pdl.launch(on),
    )  # fmt: skip
    return out
