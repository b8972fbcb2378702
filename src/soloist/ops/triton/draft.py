"""Kernels of drafting on a card: attention of draft rows over pages, and the choice of the rows to run next.

Drafts need no bits of their own: whatever is proposed, the target decides. So unlike the verify kernels these may split
and sum as they like, and the choice is a forecast of what the host will choose from the same candidates (it decides by
the reference's arithmetic, and a draft ends where the forecast was wrong).

A draft row sees the pages of its request from position 1 on (position 0 has no row, see `models/mtp.py`) up to `sees`,
and of the rows of the running draft, which stand level by level beside the pages, those in its bit mask.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from soloist.ops.top import width
from soloist.ops.triton import pdl

PAGE = 64
SPLIT = 256
TILE = 16  # query rows of a program; with 32 the registers spill and fewer programs stand on a multiprocessor
MERGED = 32  # partial results of a row on their way at a time
OWN = 16  # rows a request's running draft may have


@triton.jit
def _update(q, k, v, visible, top, total, acc, scale):
    """Online softmax of a tile of rows over a block of keys, any of which may be hidden."""
    s = tl.where(visible, tl.dot(q, tl.trans(k)) * scale, float("-inf"))
    new = tl.maximum(top, tl.max(s, 1))
    level = tl.where(new == float("-inf"), 0.0, new)
    p = tl.exp(s - level[:, None])
    shrink = tl.exp(top - level)
    return new, total * shrink + tl.sum(p, 1), tl.dot(p.to(v.dtype), v, acc * shrink[:, None])


@triton.jit
def _attend(
    q, keys, values, own_k, own_v, page_table, starts, counts, sees, mask, parts, acc_out, top_out, total_out,
    scale, pages_stride, level_rows,
    HEADS: tl.constexpr, KV: tl.constexpr, D: tl.constexpr, M: tl.constexpr, SPLIT: tl.constexpr, PAGE: tl.constexpr,
    TILES: tl.constexpr, BEAM: tl.constexpr, OWN: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    pdl.begin(PDL)
    split = tl.program_id(0)
    kv = tl.program_id(1)
    request = tl.program_id(2) // TILES
    first = tl.program_id(2) % TILES * M
    GROUP: tl.constexpr = HEADS // KV
    count = tl.load(counts + request)
    rows = count * GROUP
    start = tl.load(starts + request)
    last = tl.load(sees + start + count - 1, mask=count > 0, other=-1)
    if (first < rows) & (split * SPLIT <= last):
        at = first + tl.arange(0, M)
        row = (start + at // GROUP).to(tl.int64)
        head = kv * GROUP + at % GROUP
        mine = at < rows
        cols = tl.arange(0, D)
        lane = tl.arange(0, PAGE)
        seen = tl.load(sees + row, mask=mine, other=0)
        qt = tl.load(q + (row * HEADS + head)[:, None] * D + cols[None, :], mask=mine[:, None], other=0.0)
        top = tl.full((M,), float("-inf"), tl.float32)
        total = tl.zeros((M,), tl.float32)
        acc = tl.zeros((M, D), tl.float32)
        for begin in range(split * SPLIT, tl.minimum((split + 1) * SPLIT, last + 1), PAGE):
            where = begin + lane
            real = (where >= 1) & (where <= last)
            page = tl.load(page_table + request * pages_stride + begin // PAGE).to(tl.int64)
            at_kv = ((page * PAGE + lane) * KV + kv)[:, None] * D + cols[None, :]
            k = tl.load(keys + at_kv, mask=real[:, None], other=0.0)
            v = tl.load(values + at_kv, mask=real[:, None], other=0.0)
            visible = real[None, :] & (where[None, :] <= seen[:, None])
            top, total, acc = _update(qt, k, v, visible, top, total, acc, scale)
        if BEAM > 0:  # noqa: SIM102  decided when the kernel is compiled
            if split == 0:
                j = tl.arange(0, OWN)
                own = (j // BEAM) * level_rows + request * BEAM + j % BEAM
                bits = tl.load(mask + row, mask=mine, other=0)
                visible = ((bits[:, None] >> j[None, :]) & 1) != 0
                at_own = (own.to(tl.int64) * KV + kv)[:, None] * D + cols[None, :]
                # What was never written for this draft may be anything: hidden, NaN would still poison the product.
                written = (tl.max(visible.to(tl.int32), 0) > 0)[:, None]
                k = tl.load(own_k + at_own, mask=written, other=0.0)
                v = tl.load(own_v + at_own, mask=written, other=0.0)
                top, total, acc = _update(qt, k, v, visible, top, total, acc, scale)
        part = (tl.load(parts + row, mask=mine, other=0) + split).to(tl.int64) * HEADS + head
        tl.store(acc_out + part[:, None] * D + cols[None, :], acc, mask=mine[:, None])
        tl.store(top_out + part, top, mask=mine)
        tl.store(total_out + part, total, mask=mine)


@triton.jit
def _merge(
    acc_in, top_in, total_in, parts, sees, gate, out, gate_stride,
    HEADS: tl.constexpr, D: tl.constexpr, SPLIT: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    pdl.begin(PDL)
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    cols = tl.arange(0, D)
    first = tl.load(parts + row).to(tl.int64)
    splits = tl.load(sees + row) // SPLIT + 1
    top = -float("inf")
    total = 0.0
    acc = tl.zeros((D,), tl.float32)
    for block in range(0, splits, BLOCK):
        split = block + tl.arange(0, BLOCK)
        real = split < splits
        part = (first + split) * HEADS + head
        tops = tl.load(top_in + part, mask=real, other=float("-inf"))
        new = tl.maximum(top, tl.max(tops, 0))
        level = tl.where(new == float("-inf"), 0.0, new)
        scales = tl.exp(tops - level)
        accs = tl.load(acc_in + part[:, None] * D + cols[None, :], mask=real[:, None], other=0.0)
        shrink = tl.exp(top - level)
        acc = acc * shrink + tl.sum(accs * scales[:, None], 0)
        total = total * shrink + tl.sum(tl.load(total_in + part, mask=real, other=0.0) * scales, 0)
        top = new
    g = tl.load(gate + row * gate_stride + head * 2 * D + D + cols).to(tl.float32)
    o = (acc / total).to(out.dtype.element_ty).to(tl.float32)
    tl.store(out + (row * HEADS + head) * D + cols, (o / (1.0 + tl.exp(-g))).to(out.dtype.element_ty))


def attend(
    q: torch.Tensor,
    planes: tuple[torch.Tensor, torch.Tensor],
    own: tuple[torch.Tensor, torch.Tensor] | None,
    beam: int,
    table: dict[str, torch.Tensor],
    partials: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    qkv: torch.Tensor,
    out: torch.Tensor,
    scale: float,
) -> None:
    """out [T, H * D] = sigmoid(gate) * attention of draft rows.

    q [T, H, D]; planes [pages * 64, kv, D]; own: keys and values [OWN // beam, R * beam, kv, D] of the running draft,
    or None; table int32: page_table [R, P], starts, counts [R], sees, parts [T] and, with `own`, mask [T]; partials:
    acc [P, H, D], top and total [P, H] fp32, row t owns entries parts[t] + split; qkv: the fused projection with the
    gates.
    """
    rows, heads, dim = q.shape
    keys, values = planes
    kv = keys.shape[1]
    pages = table["page_table"]
    requests, stride = pages.shape
    splits = triton.cdiv(stride * PAGE, SPLIT)
    # A pass over settled rows may give all of them to one request, a level has `beam` of each.
    tiles = triton.cdiv((rows if own is None else beam) * (heads // kv), TILE)
    acc, top, total = partials
    own_k, own_v = own or planes
    level_rows = own_k.shape[1] if own is not None else 0
    on = pdl.dependent(q)
    _attend[(splits, kv, requests * tiles)](
        q, keys, values, own_k, own_v, pages, table["starts"], table["counts"], table["sees"],
        table["mask"] if own is not None else table["sees"], table["parts"], acc, top, total, scale, stride, level_rows,
        heads, kv, dim, TILE, SPLIT, PAGE, tiles, 0 if own is None else beam, OWN, PDL=on, num_warps=4, num_stages=2,
        **pdl.launch(on),
    )  # fmt: skip
    _merge[(rows, heads)](
        acc, top, total, table["parts"], table["sees"], qkv, out, qkv.stride(0), heads, dim, SPLIT, MERGED,
        PDL=on, num_warps=4, **pdl.launch(on),
    )  # fmt: skip


@triton.jit
def _store(
    k_rows, v_rows, keys, values, page_table, request_of, sees, pages_stride,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, PAGE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    pdl.begin(PDL)
    row = tl.program_id(0).to(tl.int64)
    request = tl.load(request_of + row)
    if request >= 0:
        position = tl.load(sees + row)
        page = tl.load(page_table + request * pages_stride + position // PAGE).to(tl.int64)
        cols = tl.arange(0, BLOCK)
        inside = cols < WIDTH
        to = (page * PAGE + position % PAGE) * WIDTH + cols
        tl.store(keys + to, tl.load(k_rows + row * WIDTH + cols, mask=inside), mask=inside)
        tl.store(values + to, tl.load(v_rows + row * WIDTH + cols, mask=inside), mask=inside)


def store(
    k_rows: torch.Tensor,
    v_rows: torch.Tensor,
    planes: tuple[torch.Tensor, torch.Tensor],
    table: dict[str, torch.Tensor],
) -> None:
    """Write rows [T, kv, D] to their positions (`sees`) in the pages; request -1 marks padding."""
    rows, kv, dim = k_rows.shape
    block = triton.next_power_of_2(kv * dim)
    on = pdl.dependent(k_rows)
    _store[(rows,)](
        k_rows, v_rows, *planes, table["page_table"], table["request"], table["sees"], table["page_table"].stride(0),
        kv * dim, block, PAGE, PDL=on, num_warps=4, **pdl.launch(on),
    )  # fmt: skip


@triton.jit
def _move_rows(source, taken, target, put, width, BLOCK: tl.constexpr, PDL: tl.constexpr):
    pdl.begin(PDL)
    line = tl.program_id(0)
    cols = tl.arange(0, BLOCK)
    inside = cols < width
    row, to = tl.load(taken + line).to(tl.int64), tl.load(put + line).to(tl.int64)
    tl.store(target + to * width + cols, tl.load(source + row * width + cols, mask=inside), mask=inside)


def move_rows(source: torch.Tensor, taken: torch.Tensor, target: torch.Tensor, put: torch.Tensor) -> None:
    """target[put[r]] = source[taken[r]] for every r; of lines put to one place, any one stays.

    source [T, H], target [n, H]; taken, put int [R].
    """
    width = source.shape[1]
    assert source.is_contiguous() and target.is_contiguous() and target.shape[1] == width
    on = pdl.dependent(source)
    _move_rows[(put.numel(),)](
        source, taken, target, put, width, triton.next_power_of_2(width), PDL=on, num_warps=8, **pdl.launch(on)
    )


@triton.jit
def _rotl(x, R: tl.constexpr):
    return (x << R) | (x >> (32 - R))


@triton.jit
def _absorb(state, word):
    word = _rotl(word * 0xCC9E2D51, 15) * 0x1B873593
    return _rotl(state ^ word, 13) * 5 + 0xE6546B64


@triton.jit
def _mix(h):
    h = (h ^ (h >> 16)) * 0x85EBCA6B
    h = (h ^ (h >> 13)) * 0xC2B2AE35
    return h ^ (h >> 16)


@triton.jit
def _gumbel(a, b, position, token):
    """Noise of `sampling/rng.py` from a key that has absorbed seed and stream, up to rounding."""
    word = position.to(tl.uint32)
    a = _mix(_absorb(a, word))
    b = _mix(_absorb(b, word))
    bits = _mix(_mix(token.to(tl.uint32) ^ a) ^ b)
    u = (bits.to(tl.float64) + 0.5) * (1.0 / 4294967296.0)
    return (-tl.log(-tl.log(u))).to(tl.float32)


@triton.jit
def _choose(
    packed, ids, settings, numbers, mask_in, alive_in, tokens, sources, mask_out, alive_out, rotary,
    level, chosen,
    BEFORE: tl.constexpr, BEAM: tl.constexpr, TREE: tl.constexpr, COUNT: tl.constexpr, WIDTH: tl.constexpr,
    MAPPED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    pdl.begin(PDL)
    request = tl.program_id(0)
    path = tl.arange(0, BEFORE)
    lane = tl.arange(0, COUNT)
    line = (request * BEFORE + path)[:, None] * WIDTH + lane[None, :]
    place = tl.load(packed + line)
    value = tl.load(packed + COUNT + line).to(tl.float32, bitcast=True)
    real = place >= 0
    place = tl.where(real, place, 0)
    token = tl.load(ids + place).to(tl.int32) if MAPPED else place
    noisy = tl.load(settings + request * 8)
    a = tl.load(settings + request * 8 + 1).to(tl.uint32, bitcast=True)
    b = tl.load(settings + request * 8 + 2).to(tl.uint32, bitcast=True)
    position = tl.load(settings + request * 8 + 3) + level
    score = tl.where(real, value * tl.load(numbers + request * 4), float("-inf"))
    noise = tl.where(noisy != 0, _gumbel(a, b, position, token), 0.0)
    if TREE:
        score = score + noise
        weight = tl.exp(score - tl.max(score, 1)[:, None])
        weight = weight / tl.sum(weight, 1)[:, None]
        worth = tl.where(real, weight * tl.load(alive_in + request * BEFORE + path)[:, None], -1.0)
    else:
        # The request's truncation, by ranks among the candidates: no order is needed.
        s = tl.reshape(score, (COUNT,))
        t = tl.reshape(token, (COUNT,))
        s = s - tl.max(s, 0)
        ahead = (s[None, :] > s[:, None]) | ((s[None, :] == s[:, None]) & (t[None, :] < t[:, None]))
        top_k = tl.load(settings + request * 8 + 4)
        rank = tl.sum((s[None, :] > s[:, None]).to(tl.int32), 1)
        kept = ((top_k == 0) | (rank < top_k)) & (s >= tl.load(numbers + request * 4 + 2))
        mass = tl.where(kept, tl.exp(s), 0.0)
        before = tl.sum(tl.where(ahead, mass[None, :], 0.0), 1)
        kept = kept & (before < tl.load(numbers + request * 4 + 1) * tl.sum(mass, 0))
        kept = kept | (noisy == 0)
        # Scores are compared as positive numbers, as a tree's are.
        drawn = tl.where(kept, s, float("-inf")) + tl.reshape(noise, (COUNT,))
        drawn = tl.exp(drawn - tl.max(drawn, 0))
        worth = tl.reshape(tl.where(kept, drawn, -1.0), (1, COUNT))
    index = path[:, None] * COUNT + lane[None, :]
    for n in tl.static_range(BEAM):
        best = tl.max(tl.max(worth, 1), 0)
        winner = tl.min(tl.min(tl.where(worth == best, index, BEFORE * COUNT), 1), 0)
        winner = tl.minimum(winner, BEFORE * COUNT - 1)
        mine = index == winner
        row = request * BEAM + n
        parent = winner // COUNT
        picked = tl.sum(tl.sum(tl.where(mine, token, 0), 1), 0)
        tl.store(tokens + row, picked)
        tl.store(sources + row, request * BEFORE + parent)
        tl.store(alive_out + row, tl.maximum(best, 0.0))
        above = tl.load(mask_in + request * BEFORE + parent)
        tl.store(mask_out + row, above | (1 << (level * BEAM + n)))
        tl.store(rotary + row, tl.load(settings + request * 8 + 5) + level)
        tl.store(chosen + row * 2, picked)
        tl.store(chosen + row * 2 + 1, parent)
        worth = tl.where(mine, -1.0, worth)


def choose(
    packed: torch.Tensor,
    ids: torch.Tensor | None,
    settings: torch.Tensor,
    numbers: torch.Tensor,
    before: dict[str, torch.Tensor],
    after: dict[str, torch.Tensor],
    level: int,
    chosen: torch.Tensor,
    beam: int,
    count: int,
) -> None:
    """The rows to run after level `level` of every request: `beam` of them (1: a chain).

    packed int32 [R * paths, 2 * count + 4]: candidates of every path as `RowTop` leaves them; ids: token ids of the
    head's rows; settings int32 [R, 8]: noisy, two words of key, position and (5) rotary position of the first draft,
    (4) top-k; numbers fp32 [R, 4]: 1 / temperature, top-p, ln min-p; before, after: mask and alive of the paths
    [R * paths] and of the rows, `after` also tokens, sources (the path a row continues) and rotary; chosen int32
    [R * beam, 2]: token and path.
    """
    requests = settings.shape[0]
    paths = packed.shape[0] // requests
    on = pdl.dependent(packed)
    _choose[(requests,)](
        packed, settings if ids is None else ids, settings, numbers, before["mask"], before["alive"], after["tokens"],
        after["sources"], after["mask"], after["alive"], after["rotary"], level, chosen,
        paths, beam, beam > 1, count, width(count), ids is not None, PDL=on, num_warps=4, **pdl.launch(on),
    )  # fmt: skip
