"""Verify attention over pages, split by fixed length; rows of the running step gather their ancestors into lanes.

A key's lane is its absolute position. A split is walked block by block, each an online softmax update. The blocks that
lie wholly in the settled past are shared by all rows of a request (`_past`); from the first running position's block on
a row goes alone (`_recent`), taking up its sums of the split where `_past` left them, with its own ancestors in the
lanes after the settled ones. Both update a row with the same products in the same order, so it does not matter to its
bits which of the two took a block, nor how many rows came along. Reference: `ops/attention.py`.

Keys and values are decoded as they are read (`kv.py`), those of the running step too: they stand in its buffers as
they will be stored.

What can go wrong: a product whose inner order depends on the tile's row count. Where a card has 16-row products only,
tiles stay below 64 rows; on sm_90, whose warp groups multiply 64 rows, every tile has whole groups of 64 (`_form`). And
a compiler that knows no key of a shared block is hidden makes one fused operation of a score's scaling and what
follows, which it cannot make in `_recent`: where the scale is no power of two, the shared blocks are masked too, though
all of it is seen.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from soloist.ops.stored_rows import StoredRows
from soloist.ops.triton import kv as stored
from soloist.ops.triton import kvarn, pdl

PAGE = 64
SPLIT = 256
ROW_TILE = 32
COMBINED = 32  # partial results that are on their way together


@triton.jit
def _block(q, k, v, visible, top, total, acc, scale):
    """One page of keys: the online softmax update of a tile of rows."""
    s = tl.dot(q, tl.trans(k)) * scale
    s = tl.where(visible, s, float("-inf"))
    new = tl.maximum(top, tl.max(s, 1))
    p = tl.exp(s - new[:, None])
    shrink = tl.exp(top - new)
    total = total * shrink + tl.sum(p, 1)
    acc = tl.dot(p.to(v.dtype), v, acc * shrink[:, None])
    return new, total, acc


@triton.jit
def _columns(at, x, mine, M: tl.constexpr, D: tl.constexpr):
    """Rows x [M, D] to pointers `at` [M], 64 columns at a time: warps exchange them through shared memory."""
    if D > 64:
        left, right = tl.split(tl.permute(tl.reshape(x, (M, 2, D // 2)), (0, 2, 1)))
        _columns(at, left, mine, M, D // 2)
        _columns(at + D // 2, right, mine, M, D // 2)
    else:
        tl.store(at[:, None] + tl.arange(0, D)[None, :], x, mask=mine[:, None])


@triton.jit
def _leave(acc, top, total, acc_out, top_out, total_out, part, mine, M: tl.constexpr, D: tl.constexpr):
    """Store the sums of one split as entries `part` [M]."""
    _columns(acc_out + part.to(tl.int64) * D, acc, mine, M, D)
    tl.store(top_out + part, top, mask=mine)
    tl.store(total_out + part, total, mask=mine)


@triton.jit(do_not_specialize=["requests", "walkers"])
def _past(
    q, keys, k_scales, k_factor, values, v_scales, v_factor, page_table, starts, counts, settled, parts,
    acc_out, top_out, total_out, scale, pages_stride, requests, walkers,
    HEADS: tl.constexpr, KV: tl.constexpr, D: tl.constexpr, M: tl.constexpr, SPLIT: tl.constexpr, PAGE: tl.constexpr,
    BLOCK: tl.constexpr, REQUESTS: tl.constexpr, K_KIND: tl.constexpr, V_KIND: tl.constexpr, MASKED: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    pdl.begin(PDL)
    program = tl.program_id(0)
    kv = tl.program_id(1)
    GROUP: tl.constexpr = HEADS // KV
    BLOCKS: tl.constexpr = SPLIT // BLOCK
    # Every tile of a request has `share` programs: its part of `walkers`, and one at least.
    every = tl.arange(0, REQUESTS)
    tiles = (tl.load(counts + every, mask=every < requests, other=0) * GROUP + M - 1) // M
    splits = (tl.load(settled + every, mask=every < requests, other=0) // BLOCK + BLOCKS - 1) // BLOCKS
    work = tl.maximum(tl.sum(tiles * splits, 0), 1)
    share = tl.minimum(tl.maximum(walkers * splits // work, 1), splits)
    until = tl.cumsum(tiles * share, 0)
    if program < tl.max(until, 0):
        request = tl.sum((until <= program).to(tl.int32), 0)
        place = program - tl.max(tl.where(every < request, until, 0), 0)
        start = tl.load(starts + request)
        rows = tl.load(counts + request) * GROUP
        blocks = tl.load(settled + request) // BLOCK
        this = every == request
        each = tl.sum(tl.where(this, tiles, 0), 0)
        whole, parted = tl.sum(tl.where(this, splits, 0), 0), tl.sum(tl.where(this, share, 0), 0)
        # Tiles first: programs that read the same keys run at the same time.
        begin = whole * (place // each) // parted
        end = whole * (place // each + 1) // parted
        lane = tl.arange(0, BLOCK)
        cols = tl.arange(0, D)
        member = place % each * M + tl.arange(0, M)
        row = (start + member // GROUP).to(tl.int64)
        head = kv * GROUP + member % GROUP
        mine = member < rows
        qt = tl.load(q + (row * HEADS + head)[:, None] * D + cols[None, :], mask=mine[:, None], other=0.0)
        part = (tl.load(parts + row, mask=mine, other=0) + begin) * HEADS + head  # entries, far fewer than 2^31
        pages = page_table + request * pages_stride
        last = tl.minimum(end * BLOCKS, blocks) - 1
        page = tl.load(pages + begin * (SPLIT // PAGE))
        top = tl.full((M,), float("-inf"), tl.float32)
        total = tl.zeros((M,), tl.float32)
        acc = tl.zeros((M, D), tl.float32)
        # One loop over all splits, so that keys stay on their way across their ends.
        for b in range(begin * BLOCKS, last + 1):
            if (b % BLOCKS == 0) & (b > begin * BLOCKS):
                _leave(acc, top, total, acc_out, top_out, total_out, part, mine, M, D)
                part += HEADS
                # What was summed up to here is thereby multiplied with exp(-inf), zero.
                top = tl.full((M,), float("-inf"), tl.float32)
            following = tl.load(pages + tl.minimum(b + 1, last) // (PAGE // BLOCK))
            at_kv = (page.to(tl.int64) * PAGE + b % (PAGE // BLOCK) * BLOCK + lane) * KV + kv
            k = stored.load(keys, k_scales, k_factor, at_kv, cols, D, qt.dtype, K_KIND)
            v = stored.load(values, v_scales, v_factor, at_kv, cols, D, qt.dtype, V_KIND)
            if MASKED:
                seen = b * BLOCK + lane < tl.load(settled + request)  # all of them
                top, total, acc = _block(qt, k, v, seen[None, :], top, total, acc, scale)
            else:
                top, total, acc = _block(qt, k, v, True, top, total, acc, scale)
            page = following
        _leave(acc, top, total, acc_out, top_out, total_out, part, mine, M, D)


@triton.jit
def _recent(
    q, k_rows, k_row_scales, v_rows, v_row_scales, keys, k_scales, k_factor, values, v_scales, v_factor,
    page_table, request_of, positions, settled, lanes, parts, acc_out, top_out, total_out,
    scale, pages_stride, lanes_stride,
    HEADS: tl.constexpr, KV: tl.constexpr, D: tl.constexpr, M: tl.constexpr, SPLIT: tl.constexpr, PAGE: tl.constexpr,
    BLOCK: tl.constexpr, K_KIND: tl.constexpr, V_KIND: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    pdl.begin(PDL)
    row = tl.program_id(0).to(tl.int64)
    kv = tl.program_id(1)
    GROUP: tl.constexpr = HEADS // KV
    request = tl.load(request_of + row)
    length = tl.load(settled + request)
    position = tl.load(positions + row)
    split = length // SPLIT + tl.program_id(2)
    if split * SPLIT <= position:
        at = tl.arange(0, M)
        head = kv * GROUP + at
        mine = at < GROUP
        lane = tl.arange(0, BLOCK)
        cols = tl.arange(0, D)
        qt = tl.load(q + (row * HEADS + head)[:, None] * D + cols[None, :], mask=mine[:, None], other=0.0)
        part = (tl.load(parts + row) + split).to(tl.int64) * HEADS + head
        # `_past` took the whole blocks of settled keys; a row of padding stands before them and goes alone.
        begun = tl.maximum(tl.where(position < length, 0, length // BLOCK * BLOCK), split * SPLIT)
        kept = at < tl.where(begun > split * SPLIT, GROUP, 0)
        top = tl.load(top_out + part, mask=kept, other=float("-inf"))
        total = tl.load(total_out + part, mask=kept, other=0.0)
        acc = tl.load(acc_out + part[:, None] * D + cols[None, :], mask=kept[:, None], other=0.0)
        last = tl.minimum((split + 1) * SPLIT, position + 1)
        for begin in range(begun, last, BLOCK):
            where = begin + lane
            old = where < length
            seen = where <= position
            page = tl.load(page_table + request * pages_stride + begin // PAGE).to(tl.int64)
            old_at = (page * PAGE + begin % PAGE + lane) * KV + kv
            ancestor = tl.load(lanes + row * lanes_stride + (where - length), mask=seen & (where >= length), other=0)
            own_at = ancestor.to(tl.int64) * KV + kv
            k = stored.load_either(
                keys, k_scales, k_rows, k_row_scales, k_factor, old_at, own_at, old, seen, cols, D, qt.dtype, K_KIND
            )
            v = stored.load_either(
                values, v_scales, v_rows, v_row_scales, v_factor, old_at, own_at, old, seen, cols, D, qt.dtype, V_KIND
            )
            top, total, acc = _block(qt, k, v, seen[None, :], top, total, acc, scale)
        _columns(acc_out + part * D, acc, mine, M, D)
        tl.store(top_out + part, top, mask=mine)
        tl.store(total_out + part, total, mask=mine)


@triton.jit
def _combine(
    acc_in, top_in, total_in, parts, positions, gate, out, gate_stride,
    HEADS: tl.constexpr, D: tl.constexpr, SPLIT: tl.constexpr,
    BLOCK: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    pdl.begin(PDL)
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    cols = tl.arange(0, D)
    first = tl.load(parts + row).to(tl.int64)
    splits = tl.load(positions + row) // SPLIT + 1
    top = -float("inf")
    total = 0.0
    acc = tl.zeros((D,), tl.float32)
    # Splits in fixed blocks: loads of a block are in flight together, the order does not depend on their number.
    for block in range(0, splits, BLOCK):
        split = block + tl.arange(0, BLOCK)
        real = split < splits
        part = (first + split) * HEADS + head
        tops = tl.load(top_in + part, mask=real, other=float("-inf"))
        new = tl.maximum(top, tl.max(tops, 0))
        scales = tl.exp(tops - new)
        accs = tl.load(acc_in + part[:, None] * D + cols[None, :], mask=real[:, None], other=0.0)
        old_scale = tl.exp(top - new)
        acc = acc * old_scale + tl.sum(accs * scales[:, None], 0)
        total = total * old_scale + tl.sum(tl.load(total_in + part, mask=real, other=0.0) * scales, 0)
        top = new
    o = acc / total
    if STAGES > 0:  # values of KVarN are turned until here
        o = kvarn.turn(o, D, STAGES)
    o = o.to(out.dtype.element_ty).to(tl.float32)
    g = tl.load(gate + row * gate_stride + head * 2 * D + D + cols).to(tl.float32)
    tl.store(out + (row * HEADS + head) * D + cols, (o / (1.0 + tl.exp(-g))).to(out.dtype.element_ty))


def _exact(scale: float) -> bool:
    """Whether scaling a score rounds nothing: powers of two."""
    return math.frexp(scale)[0] == 0.5


@dataclass(frozen=True)
class Partials:
    """Per-split results of every row: acc [P, H, D], top and total [P, H], fp32; row t owns parts[t] + split."""

    acc: torch.Tensor
    top: torch.Tensor
    total: torch.Tensor

    @classmethod
    def allocate(cls, entries: int, heads: int, dim: int, device: torch.device) -> Partials:
        def make(*shape: int) -> torch.Tensor:
            return torch.empty(shape, dtype=torch.float32, device=device)

        return cls(make(entries, heads, dim), make(entries, heads), make(entries, heads))


@dataclass(frozen=True)
class Form:
    """How a card walks a split: `block` keys at a time, `stages` blocks on their way or worked on, in tiles of `rows`
    rows over `warps` warps (`own` rows for the heads of a single one, over 4). All splits are dealt among about
    `walkers` programs for each head of keys."""

    block: int
    rows: int
    warps: int
    own: int
    stages: int
    walkers: int


def _form(q: torch.Tensor, kv: int) -> Form:
    """A row's part in a product has one shape however many rows there are: on sm_90 a group of four warps has 64 rows,
    and a tile one or two such groups; elsewhere four warps share the columns of a tile's 16-row products."""
    rows, heads, _ = q.shape
    group = heads // kv
    if pdl.warp_groups(q) and q.element_size() == 2:
        tile, warps = (64, 4) if rows * group <= 64 else (128, 8)
        # One program fills a multiprocessor.
        return Form(PAGE // 2, tile, warps, 64, 4, triton.cdiv(pdl.multiprocessors(q), kv))
    stages = 2 if pdl.shared_memory(q) >= 163840 else 1
    own = max(16, triton.next_power_of_2(group))
    return Form(PAGE, ROW_TILE, 4, own, stages, triton.cdiv(2 * pdl.multiprocessors(q), kv))


def verify_attention(
    q: torch.Tensor,
    k_rows: StoredRows | torch.Tensor,
    v_rows: StoredRows | torch.Tensor,
    keys: StoredRows | torch.Tensor,
    values: StoredRows | torch.Tensor,
    table: dict[str, torch.Tensor],
    partials: Partials,
    qkv: torch.Tensor,
    out: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """out [T, H * D] = sigmoid(gate) * attention of every row over its settled keys and its ancestors.

    q [T, H, D]; k_rows, v_rows [T, kv, D]: the step's rows as they will be stored; keys, values [pages * 64, kv, D]:
    one layer's planes; `table` int32: page_table [R, P], starts, counts, settled [R], request, positions, parts [T],
    lanes [T, depth] (the step's row at each depth of a row's path); qkv: the fused projection, whose query halves carry
    the gate. D a power of two. Rows and planes of keys have one form, those of values another if need be.
    """
    k_rows, v_rows, keys, values = (StoredRows.of(x) for x in (k_rows, v_rows, keys, values))
    rows, heads, dim = q.shape
    kv = keys.data.shape[1]
    group = heads // kv
    assert dim == triton.next_power_of_2(dim) and group <= ROW_TILE
    kinds = stored.kind(keys), stored.kind(values)
    assert kinds == (stored.kind(k_rows), stored.kind(v_rows))
    pages = table["page_table"]
    requests, pages_stride = pages.shape
    on = pdl.dependent(q)
    form = _form(q, kv)
    past = (*stored.arguments(keys), *stored.arguments(values))
    programs = form.walkers + requests + triton.cdiv(rows * group, form.rows)
    _past[(programs, kv)](
        q, *past, pages, table["starts"], table["counts"], table["settled"], table["parts"],
        partials.acc, partials.top, partials.total, scale, pages_stride, requests, form.walkers,
        heads, kv, dim, form.rows, SPLIT, PAGE, form.block, triton.next_power_of_2(requests), *kinds,
        MASKED=not _exact(scale), PDL=on, num_warps=form.warps, num_stages=form.stages, **pdl.launch(on),
    )  # fmt: skip
    _recent[(rows, kv, 2)](
        q, *stored.arguments(k_rows)[:2], *stored.arguments(v_rows)[:2], *past, pages, table["request"],
        table["positions"], table["settled"], table["lanes"],
        table["parts"], partials.acc, partials.top, partials.total, scale, pages_stride, table["lanes"].stride(0),
        heads, kv, dim, form.own, SPLIT, PAGE, form.block, *kinds, PDL=on, num_warps=4, num_stages=1,
        **pdl.launch(on),
    )  # fmt: skip
    _combine[(rows, heads)](
        partials.acc, partials.top, partials.total, table["parts"], table["positions"], qkv, out, qkv.stride(0),
        heads, dim, SPLIT, BLOCK=COMBINED, STAGES=0, PDL=on, num_warps=4, **pdl.launch(on),
    )  # fmt: skip
    return out


@triton.jit
def _settle_kv(
    k_rows, k_row_scales, v_rows, v_row_scales, keys, k_scales, values, v_scales, path, lengths, settled, page_table,
    rows_layer, planes_layer, path_stride, pages_stride,
    HEADS: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, PAGE: tl.constexpr,
    K_SCALED: tl.constexpr, V_SCALED: tl.constexpr,
):  # fmt: skip
    layer = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1)
    request = tl.program_id(2)
    if i < tl.load(lengths + request):
        position = tl.load(settled + request) + i
        page = tl.load(page_table + request * pages_stride + position // PAGE).to(tl.int64)
        source = layer * rows_layer + tl.load(path + request * path_stride + i).to(tl.int64)
        target = layer * planes_layer + page * PAGE + position % PAGE
        cols = tl.arange(0, BLOCK)
        inside = cols < WIDTH
        k = tl.load(k_rows + source * WIDTH + cols, mask=inside)
        v = tl.load(v_rows + source * WIDTH + cols, mask=inside)
        tl.store(keys + target * WIDTH + cols, k, mask=inside)
        tl.store(values + target * WIDTH + cols, v, mask=inside)
        heads = cols < HEADS
        if K_SCALED:
            scale = tl.load(k_row_scales + source * HEADS + cols, mask=heads)
            tl.store(k_scales + target * HEADS + cols, scale, mask=heads)
        if V_SCALED:
            scale = tl.load(v_row_scales + source * HEADS + cols, mask=heads)
            tl.store(v_scales + target * HEADS + cols, scale, mask=heads)


def settle_kv(
    rows: tuple[StoredRows, StoredRows],
    planes: tuple[StoredRows, StoredRows],
    path: torch.Tensor,
    lengths: torch.Tensor,
    settled: torch.Tensor,
    page_table: torch.Tensor,
) -> None:
    """Move the accepted rows of every layer, as they are, to consecutive positions from `settled` on.

    rows: keys and values [L, T, kv, D]; planes: [L, pages * 64, kv, D], of the same forms; path int32 [R, longest];
    lengths, settled [R].
    """
    (k_rows, v_rows), (keys, values) = rows, planes
    layers, count, heads, dim = k_rows.data.shape
    width = heads * dim
    _settle_kv[(layers, path.shape[1], lengths.numel())](
        *stored.arguments(k_rows)[:2], *stored.arguments(v_rows)[:2], *stored.arguments(keys)[:2],
        *stored.arguments(values)[:2], path, lengths, settled, page_table,
        count, keys.data.shape[1], path.stride(0), page_table.stride(0),
        heads, width, triton.next_power_of_2(width), PAGE, keys.scale is not None, values.scale is not None,
        num_warps=4,
    )  # fmt: skip
