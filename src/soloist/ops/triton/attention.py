"""Verify attention over pages, split by fixed length; rows of the running step gather their ancestors into lanes.

A key's lane is its absolute position. Splits that lie wholly in the settled past are shared by all rows of a request
(`_past`); the splits from the first running position on are computed per row (`_recent`), with the row's own
ancestors in the lanes after the settled ones. Both walk a split page by page with the same products, so it does not
matter to a row's bits which of the two computed a split, nor how many rows came along. Reference: `ops/attention.py`.

What can go wrong: a product whose inner order depends on the tile's row count. Row tiles stay below 64, where every
supported card uses the same 16-row MMA.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from soloist.ops.triton import pdl

PAGE = 64
SPLIT = 256
ROW_TILE = 32


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
def _past(
    q, keys, values, page_table, starts, counts, settled, parts, acc_out, top_out, total_out, scale, pages_stride,
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
    if first < rows and (split + 1) * SPLIT <= tl.load(settled + request) // SPLIT * SPLIT:
        start = tl.load(starts + request)
        lane = tl.arange(0, PAGE)
        cols = tl.arange(0, D)
        at = first + tl.arange(0, M)
        row = (start + at // GROUP).to(tl.int64)
        head = kv * GROUP + at % GROUP
        mine = at < rows
        qt = tl.load(q + (row * HEADS + head)[:, None] * D + cols[None, :], mask=mine[:, None], other=0.0)
        top = tl.full((M,), float("-inf"), tl.float32)
        total = tl.zeros((M,), tl.float32)
        acc = tl.zeros((M, D), tl.float32)
        for b in range(SPLIT // PAGE):
            page = tl.load(page_table + request * pages_stride + split * (SPLIT // PAGE) + b).to(tl.int64)
            at_kv = ((page * PAGE + lane) * KV + kv)[:, None] * D + cols[None, :]
            k = tl.load(keys + at_kv)
            v = tl.load(values + at_kv)
            top, total, acc = _block(qt, k, v, True, top, total, acc, scale)
        part = (tl.load(parts + row, mask=mine, other=0) + split).to(tl.int64) * HEADS + head
        tl.store(acc_out + part[:, None] * D + cols[None, :], acc, mask=mine[:, None])
        tl.store(top_out + part, top, mask=mine)
        tl.store(total_out + part, total, mask=mine)


@triton.jit
def _recent(
    q, k_rows, v_rows, keys, values, page_table, request_of, positions, settled, lanes, parts,
    acc_out, top_out, total_out, scale, pages_stride, lanes_stride,
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
    split = length // SPLIT + tl.program_id(2)
    if split * SPLIT <= position:
        at = tl.arange(0, M)
        head = kv * GROUP + at
        mine = at < GROUP
        lane = tl.arange(0, PAGE)
        cols = tl.arange(0, D)
        qt = tl.load(q + (row * HEADS + head)[:, None] * D + cols[None, :], mask=mine[:, None], other=0.0)
        top = tl.full((M,), float("-inf"), tl.float32)
        total = tl.zeros((M,), tl.float32)
        acc = tl.zeros((M, D), tl.float32)
        last = tl.minimum((split + 1) * SPLIT, position + 1)
        for begin in range(split * SPLIT, last, PAGE):
            where = begin + lane
            old = where < length
            own = (where >= length) & (where <= position)
            page = tl.load(page_table + request * pages_stride + begin // PAGE).to(tl.int64)
            old_at = ((page * PAGE + lane) * KV + kv)[:, None] * D + cols[None, :]
            ancestor = tl.load(lanes + row * lanes_stride + (where - length), mask=own, other=0).to(tl.int64)
            own_at = (ancestor * KV + kv)[:, None] * D + cols[None, :]
            k = tl.load(keys + old_at, mask=old[:, None], other=0.0)
            k += tl.load(k_rows + own_at, mask=own[:, None], other=0.0)
            v = tl.load(values + old_at, mask=old[:, None], other=0.0)
            v += tl.load(v_rows + own_at, mask=own[:, None], other=0.0)
            top, total, acc = _block(qt, k, v, (where <= position)[None, :], top, total, acc, scale)
        part = (tl.load(parts + row) + split).to(tl.int64) * HEADS + head
        tl.store(acc_out + part[:, None] * D + cols[None, :], acc, mask=mine[:, None])
        tl.store(top_out + part, top, mask=mine)
        tl.store(total_out + part, total, mask=mine)


@triton.jit
def _combine(
    acc_in, top_in, total_in, parts, positions, gate, out, gate_stride,
    HEADS: tl.constexpr, D: tl.constexpr, SPLIT: tl.constexpr,
    BLOCK: tl.constexpr, PDL: tl.constexpr,
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
    o = (acc / total).to(out.dtype.element_ty).to(tl.float32)
    g = tl.load(gate + row * gate_stride + head * 2 * D + D + cols).to(tl.float32)
    tl.store(out + (row * HEADS + head) * D + cols, (o / (1.0 + tl.exp(-g))).to(out.dtype.element_ty))


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


def verify_attention(
    q: torch.Tensor,
    k_rows: torch.Tensor,
    v_rows: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    table: dict[str, torch.Tensor],
    partials: Partials,
    qkv: torch.Tensor,
    out: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """out [T, H * D] = sigmoid(gate) * attention of every row over its settled keys and its ancestors.

    q [T, H, D]; k_rows, v_rows [T, kv, D]: the step's rows; keys, values [pages * 64, kv, D]: one layer's planes;
    `table` int32: page_table [R, P], starts, counts, settled [R], request, positions, parts [T], lanes [T, depth] (the
    step's row at each depth of a row's path); qkv: the fused projection, whose query halves carry the gate. D a power
    of two.
    """
    rows, heads, dim = q.shape
    kv = keys.shape[1]
    group = heads // kv
    assert dim == triton.next_power_of_2(dim) and keys.is_contiguous() and values.is_contiguous()
    pages = table["page_table"]
    requests, pages_stride = pages.shape
    splits = pages_stride * PAGE // SPLIT
    on = pdl.dependent(q)
    tiles = triton.cdiv(rows * group, ROW_TILE)
    if splits:
        _past[(splits * tiles, kv, requests)](
            q, keys, values, pages, table["starts"], table["counts"], table["settled"], table["parts"],
            partials.acc, partials.top, partials.total, scale, pages_stride,
            heads, kv, dim, ROW_TILE, SPLIT, PAGE, TILES=tiles, PDL=on, num_warps=4, num_stages=2, **pdl.launch(on),
        )  # fmt: skip
    _recent[(rows, kv, 2)](
        q, k_rows, v_rows, keys, values, pages, table["request"], table["positions"], table["settled"], table["lanes"],
        table["parts"], partials.acc, partials.top, partials.total, scale, pages_stride, table["lanes"].stride(0),
        heads, kv, dim, max(16, triton.next_power_of_2(group)), SPLIT, PAGE, PDL=on, num_warps=4, num_stages=1,
        **pdl.launch(on),
    )  # fmt: skip
    _combine[(rows, heads)](
        partials.acc, partials.top, partials.total, table["parts"], table["positions"], qkv, out, qkv.stride(0),
        heads, dim, SPLIT, BLOCK=8, PDL=on, num_warps=2, **pdl.launch(on),
    )  # fmt: skip
    return out


@triton.jit
def _settle_kv(
    k_rows, v_rows, keys, values, path, lengths, settled, page_table,
    rows_layer, planes_layer, path_stride, pages_stride, WIDTH: tl.constexpr, BLOCK: tl.constexpr, PAGE: tl.constexpr,
):  # fmt: skip
    layer = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1)
    request = tl.program_id(2)
    if i < tl.load(lengths + request):
        position = tl.load(settled + request) + i
        row = tl.load(path + request * path_stride + i).to(tl.int64)
        page = tl.load(page_table + request * pages_stride + position // PAGE).to(tl.int64)
        cols = tl.arange(0, BLOCK)
        inside = cols < WIDTH
        source = layer * rows_layer + row * WIDTH + cols
        target = layer * planes_layer + (page * PAGE + position % PAGE) * WIDTH + cols
        tl.store(keys + target, tl.load(k_rows + source, mask=inside), mask=inside)
        tl.store(values + target, tl.load(v_rows + source, mask=inside), mask=inside)


def settle_kv(
    k_rows: torch.Tensor,
    v_rows: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    path: torch.Tensor,
    lengths: torch.Tensor,
    settled: torch.Tensor,
    page_table: torch.Tensor,
) -> None:
    """Write the accepted rows of every layer to consecutive positions from `settled` on.

    k_rows, v_rows [L, T, kv, D]; keys, values [L, pages * 64, kv, D]; path int32 [R, longest]; lengths, settled [R].
    """
    layers = k_rows.shape[0]
    width = k_rows.shape[2] * k_rows.shape[3]
    _settle_kv[(layers, path.shape[1], lengths.numel())](
        k_rows, v_rows, keys, values, path, lengths, settled, page_table,
        k_rows.stride(0), keys.stride(0), path.stride(0), page_table.stride(0),
        width, triton.next_power_of_2(width), PAGE, num_warps=4,
    )  # fmt: skip
