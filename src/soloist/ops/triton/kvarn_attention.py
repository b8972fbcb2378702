"""Attention over KVarN tiles, for rows of a running step (verify) and of a prompt.

What a row reads follows from its position alone: standing in tile t it reads tiles 1 .. t - 2 packed, and tile 0 and
everything from tile t - 1 on as computed, from the slot's window and from the step's (or the slice's) own rows. All of
it is turned by the Hadamard matrix (`kvarn.py`), queries too, and so is the output until the end. Reference:
`models/tiled.py` over `ops/attention.py`.

As in `attention.py`, splits have a fixed length and lie at absolute positions. `_past` computes for all rows of a
request the splits that they read alike, `_recent` the last two of every row. Both walk a split page by page with the
same products, so it does not matter to a row's bits which of the two computed a split.

What can go wrong: a tile between the two. Rows of one step stand in tile t, where the first of them belongs, or in the
next one, so tile t - 1 is packed for some and not for others; no shared split may contain it. And a compiler that sees
8-bit loads behind a product hands its operands to the matrix unit in another order than behind a branch: both kernels
choose what they read in a branch (tests/ops/test_aot.py compares the products' layouts).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from soloist.ops.kvarn import TILE as TILE_TOKENS
from soloist.ops.kvarn import StoredTiles
from soloist.ops.stored_rows import StoredRows
from soloist.ops.triton import kv as stored
from soloist.ops.triton import pdl
from soloist.ops.triton.attention import COMBINED, PAGE, ROW_TILE, SPLIT, Partials, _block, _combine
from soloist.ops.triton.kvarn import TILE, WINDOW, lane, packed_keys, packed_values, record_views, stages, turn_rows


@triton.jit
def _shared(length, SPLIT: tl.constexpr):
    """How many splits all rows after `length` settled tokens read alike: all their tiles but the first are packed."""
    return tl.maximum(length // TILE - 1, 0) // (SPLIT // TILE)


@triton.jit
def _past(
    q, window_k, window_v, codes, scales, page_table, starts, counts, settled, slots, parts, acc_out, top_out,
    total_out, scale, pages_stride,
    HEADS: tl.constexpr, KV: tl.constexpr, D: tl.constexpr, M: tl.constexpr, SPLIT: tl.constexpr, PAGE: tl.constexpr,
    TILES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    pdl.begin(PDL)
    split = tl.program_id(0) // TILES
    first = tl.program_id(0) % TILES * M
    kv = tl.program_id(1)
    request = tl.program_id(2)
    GROUP: tl.constexpr = HEADS // KV
    rows = tl.load(counts + request) * GROUP
    length = tl.load(settled + request)
    if (first < rows) & (split < _shared(length, SPLIT)):
        start = tl.load(starts + request)
        slot = tl.load(slots + request).to(tl.int64)
        in_page, cols = tl.arange(0, PAGE), tl.arange(0, D)
        at = first + tl.arange(0, M)
        row = (start + at // GROUP).to(tl.int64)
        head = kv * GROUP + at % GROUP
        mine = at < rows
        qt = tl.load(q + (row * HEADS + head)[:, None] * D + cols[None, :], mask=mine[:, None], other=0.0)
        top = tl.full((M,), float("-inf"), tl.float32)
        total = tl.zeros((M,), tl.float32)
        acc = tl.zeros((M, D), tl.float32)
        for begin in range(split * SPLIT, (split + 1) * SPLIT, PAGE):
            if begin >= TILE:
                page = tl.load(page_table + request * pages_stride + begin // PAGE).to(tl.int64)
                record = page // (TILE // PAGE) * KV + kv
                half = page % (TILE // PAGE)
                k = packed_keys(codes, scales, record, half, D, qt.dtype)
                v = packed_values(codes, scales, record, half, D, qt.dtype)
            else:
                at_kv = ((slot * WINDOW + begin + in_page) * KV + kv)[:, None] * D + cols[None, :]
                k = tl.trans(tl.load(window_k + at_kv))
                v = tl.load(window_v + at_kv)
            # True throughout, but as `_recent` asks: a compiler that knew would fuse the score's scaling otherwise.
            seen = begin + in_page < length
            top, total, acc = _block(qt, tl.trans(k), v, seen[None, :], top, total, acc, scale)
        part = (tl.load(parts + row, mask=mine, other=0) + split).to(tl.int64) * HEADS + head
        tl.store(acc_out + part[:, None] * D + cols[None, :], acc, mask=mine[:, None])
        tl.store(top_out + part, top, mask=mine)
        tl.store(total_out + part, total, mask=mine)


@triton.jit
def _recent(
    q, k_rows, v_rows, window_k, window_v, codes, scales, page_table, request_of, positions, settled, slots, lanes,
    parts, acc_out, top_out, total_out, scale, pages_stride, lanes_stride,
    HEADS: tl.constexpr, KV: tl.constexpr, D: tl.constexpr, M: tl.constexpr, SPLIT: tl.constexpr, PAGE: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    pdl.begin(PDL)
    row = tl.program_id(0).to(tl.int64)
    kv = tl.program_id(1)
    GROUP: tl.constexpr = HEADS // KV
    request = tl.load(request_of + row)
    length = tl.load(settled + request)
    position = tl.load(positions + row)
    own_tile = position // TILE
    split = _shared(length, SPLIT) + tl.program_id(2)
    if split * SPLIT <= position:
        slot = tl.load(slots + request).to(tl.int64)
        at = tl.arange(0, M)
        head = kv * GROUP + at
        mine = at < GROUP
        in_page = tl.arange(0, PAGE)
        cols = tl.arange(0, D)
        qt = tl.load(q + (row * HEADS + head)[:, None] * D + cols[None, :], mask=mine[:, None], other=0.0)
        top = tl.full((M,), float("-inf"), tl.float32)
        total = tl.zeros((M,), tl.float32)
        acc = tl.zeros((M, D), tl.float32)
        last = tl.minimum((split + 1) * SPLIT, position + 1)
        for begin in range(split * SPLIT, last, PAGE):
            where = begin + in_page
            seen = where <= position
            if (begin >= TILE) & (begin // TILE < own_tile - 1):
                page = tl.load(page_table + request * pages_stride + begin // PAGE).to(tl.int64)
                record = page // (TILE // PAGE) * KV + kv
                half = page % (TILE // PAGE)
                k = packed_keys(codes, scales, record, half, D, qt.dtype)
                v = packed_values(codes, scales, record, half, D, qt.dtype)
            else:
                old = where < length
                old_at = (slot * WINDOW + lane(where)) * KV + kv
                mine_at = lanes + row * lanes_stride + (where - length)
                ancestor = tl.load(mine_at, mask=seen & (where >= length), other=0)
                own_at = ancestor.to(tl.int64) * KV + kv
                k = tl.trans(
                    stored.load_either(
                        window_k, window_k, k_rows, k_rows, 1.0, old_at, own_at, old, seen, cols, D, qt.dtype, 0
                    )
                )
                v = stored.load_either(
                    window_v, window_v, v_rows, v_rows, 1.0, old_at, own_at, old, seen, cols, D, qt.dtype, 0
                )
            top, total, acc = _block(qt, tl.trans(k), v, seen[None, :], top, total, acc, scale)
        part = (tl.load(parts + row) + split).to(tl.int64) * HEADS + head
        tl.store(acc_out + part[:, None] * D + cols[None, :], acc, mask=mine[:, None])
        tl.store(top_out + part, top, mask=mine)
        tl.store(total_out + part, total, mask=mine)


def verify_attention(
    q: torch.Tensor,
    k_rows: StoredRows | torch.Tensor,
    v_rows: StoredRows | torch.Tensor,
    tiles: StoredTiles,
    table: dict[str, torch.Tensor],
    partials: Partials,
    qkv: torch.Tensor,
    out: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """out [T, H * D] = sigmoid(gate) * attention of every row over what its tile lets it read.

    q [T, H, D], k_rows, v_rows [T, kv, D] of the step's rows as `qk_prepare` leaves them: they are turned here, in
    place, and stay so. tiles: one layer's. table, partials, qkv and out as in `attention.verify_attention`; paths
    are shorter than a tile. D a power of two, a multiple of 64.
    """
    keys, values = StoredRows.of(k_rows).data, StoredRows.of(v_rows).data
    rows, heads, dim = q.shape
    kv = keys.shape[1]
    group = heads // kv
    assert group <= ROW_TILE and table["lanes"].shape[1] <= TILE_TOKENS
    assert tiles.window_k.is_contiguous() and tiles.window_v.is_contiguous()
    turn_rows(q, keys, values)
    codes, scales = record_views(tiles)
    pages = table["page_table"]
    requests, pages_stride = pages.shape
    splits = pages_stride * PAGE // SPLIT
    on = pdl.dependent(q)
    # Both kernels alike: over how many warps a row is summed is part of its bits.
    warps = 4 if dim <= 128 else 8
    row_tiles = triton.cdiv(rows * group, ROW_TILE)
    if splits:
        _past[(splits * row_tiles, kv, requests)](
            q, tiles.window_k, tiles.window_v, codes, scales, pages, table["starts"], table["counts"], table["settled"],
            table["slots"], table["parts"], partials.acc, partials.top, partials.total, scale, pages_stride,
            heads, kv, dim, ROW_TILE, SPLIT, PAGE, row_tiles, PDL=on, num_warps=warps, num_stages=1, **pdl.launch(on),
        )  # fmt: skip
    _recent[(rows, kv, 2)](
        q, keys, values, tiles.window_k, tiles.window_v, codes, scales, pages, table["request"], table["positions"],
        table["settled"], table["slots"], table["lanes"], table["parts"], partials.acc, partials.top, partials.total,
        scale, pages_stride, table["lanes"].stride(0), heads, kv, dim, max(16, triton.next_power_of_2(group)), SPLIT,
        PAGE, PDL=on, num_warps=warps, num_stages=1, **pdl.launch(on),
    )  # fmt: skip
    _combine[(rows, heads)](
        partials.acc, partials.top, partials.total, table["parts"], table["positions"], qkv, out, qkv.stride(0),
        heads, dim, SPLIT, BLOCK=COMBINED, STAGES=stages(dim), PDL=on, num_warps=4, **pdl.launch(on),
    )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["start", "slot"])
def _prompt(
    q, k_rows, v_rows, window_k, window_v, codes, scales, places, out, start, slot, scale,
    HEADS: tl.constexpr, KV: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr,
):  # fmt: skip
    # The longest blocks first: they decide when the launch ends.
    block = tl.num_programs(0) - 1 - tl.program_id(0)
    head = tl.program_id(1)
    kv = head // (HEADS // KV)
    at, cols = tl.arange(0, PAGE), tl.arange(0, D)
    row = (block * PAGE + at).to(tl.int64)
    position = start + block * PAGE + at
    end = start + (block + 1) * PAGE
    q_at = (row * HEADS + head)[:, None] * D + cols[None, :]
    qt = tl.load(q + q_at)
    top = tl.full((PAGE,), float("-inf"), tl.float32)
    total = tl.zeros((PAGE,), tl.float32)
    acc = tl.zeros((PAGE, D), tl.float32)
    near = (end - 1) // TILE * TILE - TILE  # from here on nothing is packed for these rows
    for begin in range(0, end, PAGE):
        if (begin >= TILE) & (begin < near):
            first = tl.load(places + begin).to(tl.int64)
            record = first // TILE * KV + kv
            half = first // PAGE % (TILE // PAGE)
            k = packed_keys(codes, scales, record, half, D, qt.dtype)
            v = packed_values(codes, scales, record, half, D, qt.dtype)
        else:
            # A page is wholly of this slice or wholly before it: both begin at multiples of a page.
            mine = begin >= start
            token = tl.where(mine, begin - start, slot * WINDOW + lane(begin)) + at
            at_kv = (token.to(tl.int64) * KV + kv)[:, None] * D + cols[None, :]
            k = tl.trans(tl.load(tl.where(mine, k_rows, window_k) + at_kv))
            v = tl.load(tl.where(mine, v_rows, window_v) + at_kv)
        visible = (begin + at)[None, :] <= position[:, None]
        top, total, acc = _block(qt, tl.trans(k), v, visible, top, total, acc, scale)
    tl.store(out + q_at, (acc / total[:, None]).to(out.dtype.element_ty))


def prompt_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    tiles: StoredTiles,
    start: int,
    slot: int,
    places: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """q [T, H, D], k, v [T, kv, D] of prompt rows from `start` on, all turned -> [T, H, D], still turned.

    T and start multiples of 64. tiles: one layer's, those that the rows complete packed already (`pack_prompt`), the
    slot's window as the rows before `start` left it; places int64 [start + T]: position p is row places[p] of the
    pages.
    """
    tokens, heads, dim = q.shape
    if tokens % PAGE or start % PAGE or dim != triton.next_power_of_2(dim):
        raise ValueError(f"prompt attention runs blocks of {PAGE} rows on the grid, got {tokens} rows from {start}")
    assert q.is_contiguous() and k.is_contiguous() and v.is_contiguous()
    assert tiles.window_k.is_contiguous() and tiles.window_v.is_contiguous() and k.dtype == tiles.window_k.dtype
    codes, scales = record_views(tiles)
    out = torch.empty_like(q)
    _prompt[(tokens // PAGE, heads)](
        q, k, v, tiles.window_k, tiles.window_v, codes, scales, places, out, start, slot, scale, heads, k.shape[1], dim,
        PAGE, num_warps=4 if dim <= 128 else 8, num_stages=1,
    )  # fmt: skip
    return out
