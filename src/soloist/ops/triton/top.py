"""The best entries of rows of 16-bit logits, exactly and without sorting. Reference: `ops/top.py`.

A 16-bit value and its place make a key of 32 bits that orders entries by value, lowest id first among equals, and no
two keys are equal. `_groups` reduces every group of ids to its largest key; the `count` best entries of a row lie in
its `count` best groups. `_select` finds those, then the best entries inside them, both times by building the
threshold bit by bit from counts. Survivors keep the order of their ids.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from soloist.ops.top import width
from soloist.ops.triton import pdl

GROUP = 64  # ids per group, more where a row would have over MOST groups
MOST = 4096
TILE = 64  # groups per program of the first pass


@triton.jit
def _ordered(x, INF: tl.constexpr):
    """(key of 16 bits that orders like the value, whether it is NaN). -0 and 0 are one value."""
    bits = x.to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
    bits = tl.where(bits == 0x8000, 0, bits)
    return tl.where(bits >= 0x8000, 0xFFFF - bits, bits + 0x8000), (bits & 0x7FFF) > INF


@triton.jit
def _groups(
    logits, group_keys, tile_best, tile_sum, tile_nan, vocab, stride, groups, tiles,
    GROUP: tl.constexpr, TILE: tl.constexpr, PLACES: tl.constexpr, INF: tl.constexpr, SUM: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    pdl.begin(PDL)
    tile = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    group = tile * TILE + tl.arange(0, TILE)
    ids = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    inside = ids < vocab
    x = tl.load(logits + row * stride + ids, mask=inside, other=0.0)
    key, nan = _ordered(x, INF)
    nan = nan & inside
    key = tl.where(inside & (nan == 0), key, -1)
    best = tl.max(key, 1)
    packed = tl.where(best < 0, -1, best * (1 << PLACES) + ((1 << PLACES) - 1 - group))
    tl.store(group_keys + row * groups + group, packed, mask=group < groups)
    if SUM:
        value = tl.where(inside, x.to(tl.float32), float("-inf"))
        top = tl.max(tl.max(value, 1), 0)
        shifted = value - tl.where(top == float("-inf"), 0.0, top)
        tl.store(tile_best + row * tiles + tile, top)
        tl.store(tile_sum + row * tiles + tile, tl.sum(tl.sum(tl.exp(shifted), 1), 0))
        tl.store(tile_nan + row * tiles + tile, tl.max(tl.max(nan.to(tl.int32), 1), 0))


@triton.jit
def _threshold(keys, COUNT: tl.constexpr, BITS: tl.constexpr):
    """The COUNT-th largest of distinct non-negative keys of BITS bits; 0 where there are fewer."""
    found = 0
    for i in range(BITS):
        bit = found + (1 << (BITS - 1 - i))
        enough = tl.sum((keys >= bit).to(tl.int32), 0) >= COUNT
        found = tl.where(enough, bit, found)
    return found


@triton.jit
def _select(
    logits, group_keys, tile_best, tile_sum, tile_nan, chosen, out, vocab, stride, groups, tiles,
    GROUP: tl.constexpr, COUNT: tl.constexpr, GROUPS: tl.constexpr, TILES: tl.constexpr, PLACES: tl.constexpr,
    INSIDE: tl.constexpr, INF: tl.constexpr, SUM: tl.constexpr, WIDTH: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    pdl.begin(PDL)
    row = tl.program_id(0).to(tl.int64)
    group = tl.arange(0, GROUPS)
    keys = tl.load(group_keys + row * groups + group, mask=group < groups, other=-1)
    picked = keys >= _threshold(keys, COUNT, 16 + PLACES)
    rank = tl.cumsum(picked.to(tl.int32), 0) - 1
    found = tl.sum(picked.to(tl.int32), 0)
    tl.store(chosen + row * COUNT + rank, group, mask=picked)
    tl.debug_barrier()
    at = tl.arange(0, COUNT * GROUP)
    real = at // GROUP < found
    ids = tl.load(chosen + row * COUNT + at // GROUP, mask=real, other=0) * GROUP + at % GROUP
    real = real & (ids < vocab)
    x = tl.load(logits + row * stride + ids, mask=real, other=0.0)
    key, nan = _ordered(x, INF)
    key = tl.where(real & (nan == 0), key * (1 << INSIDE) + ((1 << INSIDE) - 1 - at), -1)
    picked = key >= tl.maximum(_threshold(key, COUNT, 16 + INSIDE), 0)
    rank = tl.cumsum(picked.to(tl.int32), 0) - 1
    found = tl.sum(picked.to(tl.int32), 0)
    value = x.to(tl.float32)
    line = out + row * WIDTH
    tl.store(line + rank, ids, mask=picked)
    tl.store(line + COUNT + rank, value.to(tl.int32, bitcast=True), mask=picked)
    rest = tl.arange(0, COUNT)
    tl.store(line + rest, tl.full((COUNT,), -1, tl.int32), mask=rest >= found)
    nothing = tl.full((COUNT,), float("-inf"), tl.float32)
    tl.store(line + COUNT + rest, nothing.to(tl.int32, bitcast=True), mask=rest >= found)
    best = tl.max(key, 0)
    mine = key == best
    tl.store(line + 2 * COUNT, tl.max(tl.where(mine, ids, -1), 0))
    maximum = tl.max(tl.where(mine & picked, value, float("-inf")), 0)
    total = maximum
    if SUM:
        tile = tl.arange(0, TILES)
        there = tile < tiles
        tops = tl.load(tile_best + row * tiles + tile, mask=there, other=float("-inf"))
        sums = tl.load(tile_sum + row * tiles + tile, mask=there, other=0.0)
        total = tl.sum(sums * tl.exp(tops - tl.where(maximum == float("-inf"), 0.0, maximum)), 0)
        bad = tl.max(tl.load(tile_nan + row * tiles + tile, mask=there, other=0), 0)
        maximum = tl.where(bad > 0, float("nan"), maximum)
    tl.store(line + 2 * COUNT + 1, maximum.to(tl.int32, bitcast=True))
    tl.store(line + 2 * COUNT + 2, total.to(tl.int32, bitcast=True))
    tl.store(line + 2 * COUNT + 3, found)


class RowTop:
    """Scratch and launches for up to `rows` rows of `vocab` logits, `count` entries each.

    `stats` False leaves out NaN detection and the sum over the row; argmax and maximum are then those of the numbers.
    """

    def __init__(self, rows: int, vocab: int, count: int, device: torch.device, stats: bool = True) -> None:
        self.vocab, self.count, self.stats = vocab, count, stats
        self.group = max(GROUP, triton.next_power_of_2(triton.cdiv(vocab, MOST)))
        self.groups = triton.cdiv(vocab, self.group)
        self.tiles = triton.cdiv(self.groups, TILE)
        self._keys = torch.zeros(rows, self.groups, dtype=torch.int32, device=device)
        self._chosen = torch.zeros(rows, count, dtype=torch.int32, device=device)
        self._nan = torch.zeros(rows, self.tiles, dtype=torch.int32, device=device)
        self._best = torch.zeros(rows, self.tiles, dtype=torch.float32, device=device)
        self._sum = torch.zeros_like(self._best)

    def __call__(self, logits: torch.Tensor, out: torch.Tensor) -> None:
        """logits [T, V] of a 16-bit type, unit column stride -> out int32 [T, 2 * count + STATS] (`Heads.unpack`)."""
        rows, vocab = logits.shape
        assert vocab == self.vocab and logits.stride(1) == 1 and logits.element_size() == 2 and out.is_contiguous()
        infinity = 0x7F80 if logits.dtype is torch.bfloat16 else 0x7C00
        places = max(1, (triton.next_power_of_2(self.groups) - 1).bit_length())
        inside = (self.count * self.group - 1).bit_length()
        on = pdl.dependent(logits)
        _groups[(self.tiles, rows)](
            logits, self._keys, self._best, self._sum, self._nan, vocab, logits.stride(0), self.groups, self.tiles,
            self.group, TILE, places, infinity, self.stats, PDL=on, num_warps=4, **pdl.launch(on),
        )  # fmt: skip
        _select[(rows,)](
            logits, self._keys, self._best, self._sum, self._nan, self._chosen, out, vocab, logits.stride(0),
            self.groups, self.tiles, self.group, self.count, triton.next_power_of_2(self.groups),
            triton.next_power_of_2(self.tiles), places, inside, infinity, self.stats, width(self.count), PDL=on,
            num_warps=8 if self.count * self.group <= 4096 else 16, **pdl.launch(on),
        )  # fmt: skip
