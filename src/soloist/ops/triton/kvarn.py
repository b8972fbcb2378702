"""KVarN tiles on a card: the Hadamard turn, packing of settled tiles, and decoding of packed ones where they are read.

A card keeps every key and value turned, those of the window and of a running step too: queries are turned once, scores
need no turning back, and attention's output is turned once at its end. Codes and scales are laid out as
`ops/kvarn.py` says, which is the reference. Decoding is bit for bit the reference's: a code times an fp16 scale is
exact in fp32, so it does not matter whether a compiler fuses the addition.

Packing follows the reference's steps in fp32, but exponentials, logarithms and the order of sums are the card's: a
scale may differ in its last bit and a code that lies half way between two may fall to the other side
(tests/ops/test_triton_kvarn.py bounds both). All tiles are packed by the same code, whoever asks, so that what a row
reads does not depend on where steps begin and end.

What can go wrong: packing before the last token of a tile has settled, or after its place in the ring was given away.
`settle` therefore moves rows first and packs behind it; a step settles fewer rows than a tile has.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from soloist.ops.kvarn import ITERATIONS, StoredTiles, fields, record_bytes
from soloist.ops.kvarn import TILE as TILE_TOKENS
from soloist.ops.kvarn import WINDOW as WINDOW_TOKENS
from soloist.ops.triton import pdl

TILE = tl.constexpr(TILE_TOKENS)
WINDOW = tl.constexpr(WINDOW_TOKENS)


def stages(dim: int) -> int:
    """Butterflies of a turn: the binary logarithm of the head size."""
    return dim.bit_length() - 1


def record_views(tiles: StoredTiles) -> tuple[torch.Tensor, torch.Tensor]:
    """(codes, scales): the records as bytes and as fp16 numbers, flat."""
    flat = tiles.records.reshape(-1)
    heads, dim = tiles.window_k.shape[-2:]
    assert tiles.records.is_contiguous() and tiles.records.shape[-1] * TILE_TOKENS == heads * record_bytes(dim)
    # The kernels know where the parts of a record begin; these are the places.
    places = (64 * dim, 68 * dim + 256, 100 * dim + 256, 102 * dim + 512)
    assert tuple(fields(dim)[name][0] for name in ("k.a", "v.codes", "v.c", "v.zp")) == places
    return flat, flat.view(torch.float16)


@triton.jit
def turn(x, D: tl.constexpr, STAGES: tl.constexpr):
    """x [D] fp32 times the normalised Hadamard matrix. Every butterfly takes the top bit of the index and makes it the
    lowest, so that the last one leaves all channels where they were."""
    for _ in tl.static_range(STAGES):
        a, b = tl.split(tl.trans(tl.reshape(x, (2, D // 2))))
        x = tl.reshape(tl.join(a + b, a - b), (D,))
    return x * (D**-0.5)


@triton.jit
def lane(position):
    """Where positions lie in a slot's window."""
    return tl.where(position < TILE, position, TILE + (position - TILE) % (2 * TILE))


@triton.jit
def packed_keys(codes, scales, record, half, D: tl.constexpr, DTYPE: tl.constexpr):
    """Keys [D, 64], turned, of one half (a page) of the tile whose records entry is `record` (int64)."""
    channel, byte, token = tl.arange(0, D), tl.arange(0, 32), half * 64 + tl.arange(0, 64)
    packed = tl.load(codes + record * (102 * D + 768) + channel[:, None] * 64 + half * 32 + byte[None, :])
    code = tl.interleave(packed & 15, packed >> 4).to(tl.float32)
    at = scales + record * (51 * D + 384) + 32 * D
    a, zp = tl.load(at + channel).to(tl.float32), tl.load(at + D + channel).to(tl.float32)
    c = tl.load(at + 2 * D + token).to(tl.float32)
    return ((code * a[:, None] + zp[:, None]) * c[None, :]).to(DTYPE)


@triton.jit
def packed_values(codes, scales, record, half, D: tl.constexpr, DTYPE: tl.constexpr):
    """Values [64, D], turned; see `packed_keys`."""
    channel, byte, token = tl.arange(0, D), tl.arange(0, D // 4), half * 64 + tl.arange(0, 64)
    packed = tl.load(
        codes + record * (102 * D + 768) + (68 * D + 256) + token[:, None] * (D // 4) + byte[None, :]
    )  # four channels in every byte: the even ones and the odd ones meet last
    even = tl.interleave(packed & 3, (packed >> 4) & 3)
    odd = tl.interleave((packed >> 2) & 3, packed >> 6)
    code = tl.interleave(even, odd).to(tl.float32)
    at = scales + record * (51 * D + 384) + 50 * D + 128
    c = tl.load(at + channel).to(tl.float32)
    a, zp = tl.load(at + D + token).to(tl.float32), tl.load(at + D + 128 + token).to(tl.float32)
    return ((code * a[:, None] + zp[:, None]) * c[None, :]).to(DTYPE)


@triton.jit
def _turn_rows(
    q, k, v, HEADS: tl.constexpr, KV: tl.constexpr, D: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr
):
    pdl.begin(PDL)
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    if head < HEADS:
        at = q + (row * HEADS + head) * D
    elif head < HEADS + KV:
        at = k + (row * KV + head - HEADS) * D
    else:
        at = v + (row * KV + head - HEADS - KV) * D
    cols = tl.arange(0, D)
    x = tl.load(at + cols).to(tl.float32)
    tl.store(at + cols, turn(x, D, STAGES).to(q.dtype.element_ty))


def turn_rows(q: torch.Tensor, k: torch.Tensor | None = None, v: torch.Tensor | None = None) -> None:
    """Multiply every head of q [T, H, D], and of k and v [T, kv, D], by the Hadamard matrix, in place, rounded to their
    type.

    All contiguous and of one floating dtype; D a power of two.
    """
    rows, heads, dim = q.shape
    kv = 0 if k is None else k.shape[1]
    k, v = q if k is None else k, q if v is None else v
    assert q.dtype == k.dtype == v.dtype and q.is_contiguous() and k.is_contiguous() and v.is_contiguous()
    assert dim == triton.next_power_of_2(dim)
    on = pdl.dependent(q)
    _turn_rows[(rows, heads + 2 * kv)](q, k, v, heads, kv, dim, stages(dim), PDL=on, num_warps=1, **pdl.launch(on))


@triton.jit
def _deviation(x, AXIS: tl.constexpr, N: tl.constexpr):
    """Unbiased standard deviation over an axis of N."""
    away = x - tl.expand_dims(tl.sum(x, AXIS) / N, AXIS)
    total = tl.sum(away * away, AXIS)
    return tl.sqrt_rn(tl.math.div_rn(total, tl.zeros_like(total) + (N - 1.0)))


@triton.jit
def _corrected(scale, deviation):
    """A log scale after one correction."""
    moved = scale + tl.log(tl.minimum(tl.maximum(deviation, 1e-3), 1e3))
    return tl.minimum(tl.maximum(moved, -0.3), 10.0)


@triton.jit
def _scaled(m, tokens, channels):
    return m.to(tl.float32) * tl.exp(-tokens[:, None] - channels[None, :])


@triton.jit
def _spread(deviations):
    return tl.math.div_rn(tl.max(deviations, 0), tl.min(deviations, 0))


@triton.jit
def _encode(m, codes, scales, record, KEYS: tl.constexpr, D: tl.constexpr, ITERATIONS: tl.constexpr):
    """Pack one tile m [128, D], turned, as the keys or the values of records entry `record`."""
    tokens = tl.zeros((TILE,), tl.float32)
    channels = tl.zeros((D,), tl.float32)
    best_t, best_c = tokens, channels
    x = m.to(tl.float32)
    by_token, by_channel = _deviation(x, 1, D), _deviation(x, 0, TILE)
    least = _spread(by_token) + _spread(by_channel)
    least = tl.where(least == least, least, float("inf"))
    for _ in range(ITERATIONS):
        # Columns are corrected before rows: tokens first where rows are channels.
        if KEYS:
            tokens = _corrected(tokens, by_token)
            channels = _corrected(channels, _deviation(_scaled(m, tokens, channels), 0, TILE))
        else:
            channels = _corrected(channels, by_channel)
            tokens = _corrected(tokens, _deviation(_scaled(m, tokens, channels), 1, D))
        x = _scaled(m, tokens, channels)
        by_token, by_channel = _deviation(x, 1, D), _deviation(x, 0, TILE)
        now = _spread(by_token) + _spread(by_channel)
        now = tl.where(now == now, now, float("inf"))
        better = now <= least
        best_t, best_c = tl.where(better, tokens, best_t), tl.where(better, channels, best_c)
        least = tl.where(better, now, least)
    x = _scaled(m, best_t, best_c)
    token, channel = tl.arange(0, TILE), tl.arange(0, D)
    bytes_at = codes + record * (102 * D + 768)
    at = scales + record * (51 * D + 384)
    if KEYS:
        rows, columns = tl.exp(best_c), tl.exp(best_t)
        low, step, code = _codes(x, 0, 15.0)
        first, second = tl.split(tl.permute(tl.reshape(code, (TILE // 2, 2, D)), (0, 2, 1)))
        pair = tl.arange(0, TILE // 2)
        tl.store(bytes_at + channel[None, :] * 64 + pair[:, None], first | (second << 4))
        at += 32 * D
        tl.store(at + channel, (rows * step).to(tl.float16))
        tl.store(at + D + channel, (rows * low).to(tl.float16))
        tl.store(at + 2 * D + token, columns.to(tl.float16))
    else:
        rows, columns = tl.exp(best_t), tl.exp(best_c)
        low, step, code = _codes(x, 1, 3.0)
        first, second = tl.split(tl.reshape(code, (TILE, D // 2, 2)))
        first, second = tl.split(tl.reshape(first | (second << 2), (TILE, D // 4, 2)))
        byte = tl.arange(0, D // 4)
        tl.store(bytes_at + (68 * D + 256) + token[:, None] * (D // 4) + byte[None, :], first | (second << 4))
        at += 50 * D + 128
        tl.store(at + channel, columns.to(tl.float16))
        tl.store(at + D + token, (rows * step).to(tl.float16))
        tl.store(at + D + 128 + token, (rows * low).to(tl.float16))


@triton.jit
def _codes(x, AXIS: tl.constexpr, TOP: tl.constexpr):
    """(least value, step, codes uint8) of x along AXIS, codes 0 .. TOP to nearest even."""
    low, high = tl.min(x, AXIS), tl.max(x, AXIS)
    step = tl.maximum(tl.math.div_rn(high - low, tl.zeros_like(low) + TOP), 1e-10)
    counted = tl.math.div_rn(x - tl.expand_dims(low, AXIS), tl.zeros_like(x) + tl.expand_dims(step, AXIS))
    # Adding 2^23 rounds to whole numbers.
    whole = (tl.minimum(counted, TOP) + 8388608.0).to(tl.uint32, bitcast=True)
    return low, step, (whole & 15).to(tl.uint8)


@triton.jit
def _pack_settled(
    window, codes, scales, lengths, settled, slots, page_table, pages_stride, slots_count, tiles_count,
    KEYS: tl.constexpr, KV: tl.constexpr, D: tl.constexpr, ITERATIONS: tl.constexpr,
):  # fmt: skip
    layer = tl.program_id(0).to(tl.int64)
    kv = tl.program_id(1)
    request = tl.program_id(2)
    before = tl.load(settled + request)
    after = before + tl.load(lengths + request)
    tile = after // TILE - 1
    if (after // TILE > before // TILE) & (tile > 0):
        token, cols = tl.arange(0, TILE), tl.arange(0, D)
        slot = layer * slots_count + tl.load(slots + request)
        at = (slot * WINDOW + lane(tile * TILE) + token) * KV + kv
        m = tl.load(window + at[:, None] * D + cols[None, :])
        page = tl.load(page_table + request * pages_stride + 2 * tile).to(tl.int64)
        _encode(m, codes, scales, (layer * tiles_count + page // 2) * KV + kv, KEYS, D, ITERATIONS)


@triton.jit(do_not_specialize=["first", "start", "slot"])
def _pack_prompt(
    own, window, codes, scales, places, first, start, slot,
    KEYS: tl.constexpr, KV: tl.constexpr, D: tl.constexpr, ITERATIONS: tl.constexpr,
):  # fmt: skip
    tile = first + tl.program_id(0)
    kv = tl.program_id(1)
    cols = tl.arange(0, D)
    position = tile * TILE + tl.arange(0, TILE)
    mine = (position >= start)[:, None]
    own_at = ((position - start).to(tl.int64) * KV + kv)[:, None] * D + cols[None, :]
    old_at = ((slot * WINDOW + lane(position)).to(tl.int64) * KV + kv)[:, None] * D + cols[None, :]
    m = tl.load(tl.where(mine, own + own_at, window + old_at))
    block = tl.load(places + tile * TILE).to(tl.int64) // TILE
    _encode(m, codes, scales, block * KV + kv, KEYS, D, ITERATIONS)


def _warps(dim: int) -> int:
    """Warps that keep a tile in registers: 64 of its numbers a thread."""
    return max(4, dim // 16)


def pack_prompt(
    k: torch.Tensor, v: torch.Tensor, tiles: StoredTiles, start: int, valid: int, slot: int, places: torch.Tensor
) -> None:
    """Pack the tiles that prompt rows k, v [>= valid, kv, D] (turned, positions from `start` on) complete.

    tiles: one layer's; places int64 [>= start + valid]: position p is row places[p] of the pages. What a tile has
    before `start` is read from the slot's window.
    """
    codes, scales = record_views(tiles)
    heads, dim = k.shape[1:]
    first, end = max(1, start // TILE_TOKENS), (start + valid) // TILE_TOKENS
    if end <= first:
        return
    for own, window, keys in ((k, tiles.window_k, True), (v, tiles.window_v, False)):
        assert own.is_contiguous() and window.is_contiguous() and own.dtype == window.dtype
        _pack_prompt[(end - first, heads)](
            own, window, codes, scales, places, first, start, slot, keys, heads, dim, ITERATIONS, num_warps=_warps(dim)
        )


def keep_window(k: torch.Tensor, v: torch.Tensor, tiles: StoredTiles, start: int, valid: int, slot: int) -> None:
    """Leave in the slot's window what later rows read of prompt rows k, v (turned, positions `start` .. `start` +
    `valid` - 1): those of the first tile and of the last two. Plain copies of consecutive lanes."""
    end = start + valid
    recent = max(start, TILE_TOKENS, ((end - 1) // TILE_TOKENS - 1) * TILE_TOKENS)
    spans = [(start, min(end, TILE_TOKENS), 0)]
    for tile in range(recent // TILE_TOKENS, -(-end // TILE_TOKENS)):
        base = TILE_TOKENS + (tile - 1) % 2 * TILE_TOKENS - tile * TILE_TOKENS
        spans.append((max(recent, tile * TILE_TOKENS), min(end, (tile + 1) * TILE_TOKENS), base))
    for a, b, shift in spans:
        if a < b:
            tiles.window_k[slot, a + shift : b + shift] = k[a - start : b - start]
            tiles.window_v[slot, a + shift : b + shift] = v[a - start : b - start]


@triton.jit
def _settle(
    k_rows, v_rows, window_k, window_v, path, lengths, settled, slots, rows_count, slots_count, path_stride,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    layer = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1)
    request = tl.program_id(2)
    if i < tl.load(lengths + request):
        position = tl.load(settled + request) + i
        source = layer * rows_count + tl.load(path + request * path_stride + i)
        target = (layer * slots_count + tl.load(slots + request)) * WINDOW + lane(position)
        cols = tl.arange(0, BLOCK)
        inside = cols < WIDTH
        k = tl.load(k_rows + source * WIDTH + cols, mask=inside)
        v = tl.load(v_rows + source * WIDTH + cols, mask=inside)
        tl.store(window_k + target * WIDTH + cols, k, mask=inside)
        tl.store(window_v + target * WIDTH + cols, v, mask=inside)


def settle(
    k_rows: torch.Tensor,
    v_rows: torch.Tensor,
    tiles: StoredTiles,
    path: torch.Tensor,
    lengths: torch.Tensor,
    settled: torch.Tensor,
    slots: torch.Tensor,
    page_table: torch.Tensor,
) -> None:
    """Move the accepted rows of every layer into their slots' windows, and pack the tiles they complete.

    k_rows, v_rows [L, T, kv, D], turned; tiles of all layers; int32: path [R, longest] (longest <= 128), lengths,
    settled, slots [R], page_table [R, P].
    """
    layers, count, heads, dim = k_rows.shape
    slots_count, width, requests = tiles.window_k.shape[1], heads * dim, lengths.numel()
    assert path.shape[1] <= TILE_TOKENS and k_rows.is_contiguous() and v_rows.is_contiguous()
    assert tiles.window_k.is_contiguous() and tiles.window_v.is_contiguous()
    _settle[(layers, path.shape[1], requests)](
        k_rows, v_rows, tiles.window_k, tiles.window_v, path, lengths, settled, slots, count, slots_count,
        path.stride(0), width, triton.next_power_of_2(width), num_warps=4,
    )  # fmt: skip
    codes, scales = record_views(tiles)
    for window, keys in ((tiles.window_k, True), (tiles.window_v, False)):
        _pack_settled[(layers, heads, requests)](
            window, codes, scales, lengths, settled, slots, page_table, page_table.stride(0), slots_count,
            tiles.records.shape[1] // TILE_TOKENS, keys, heads, dim, ITERATIONS, num_warps=_warps(dim),
        )  # fmt: skip
