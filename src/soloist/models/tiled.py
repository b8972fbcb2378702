"""Attention over a store with tiles (KVarN): each row reads the past as the tile it stands in may see it.

Which keys are packed and which are not follows from a row's position alone, so a step whose rows stand on both
sides of a tile's edge attends twice, once for each side, and every row keeps its own side's result.

This is the reference. On a card rows of a step go through `models/card.py`, and a prompt's slice takes the road below
(`prefill_on_card`), where everything is turned by the Hadamard matrix from the start.
"""

from __future__ import annotations

from typing import Protocol, TypeGuard

import torch
import torch.nn.functional as F

from soloist.models.state import KV
from soloist.models.step import GRID, PrefillStep, VerifyStep, Where
from soloist.ops.attention import prefill_attention, verify_attention
from soloist.ops.kvarn import StoredTiles


class TiledKV(KV, Protocol):
    """What is needed of `cache/tiles.py`."""

    def read_settled(
        self, layer: int, index: torch.Tensor, slot: int, tile: int
    ) -> tuple[torch.Tensor, torch.Tensor]: ...

    def tiles(self, layer: int | None) -> StoredTiles: ...


def is_tiled(kv: KV) -> TypeGuard[TiledKV]:
    """Whether what a row reads depends on the tile it stands in: stores whose tiles are longer than a page."""
    return kv.tile > GRID


def verify(
    kv: TiledKV, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, step: VerifyStep, scale: float
) -> torch.Tensor:
    """Rows of a verify step. q [T, H, D], k, v [T, kv, D] -> [T, H, D]."""
    rows = step.attention
    slots = step.slots.tolist()
    tile_of = step.positions // kv.tile
    first = [part.settled // kv.tile for part in rows]
    beyond = int((tile_of - torch.tensor(first)[step.request]).max())
    out = torch.empty_like(q)
    for ahead in range(beyond + 1):
        settled = [
            kv.read_settled(layer, index, slot, tile + ahead)
            for index, slot, tile in zip(step.page_rows, slots, first, strict=True)
        ]
        o = verify_attention(q, k, v, settled, rows, scale)
        mine = tile_of == torch.tensor(first)[step.request] + ahead
        out[mine] = o[mine]
    return out


def prefill(
    kv: TiledKV, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, step: PrefillStep, scale: float
) -> torch.Tensor:
    """Rows of a prompt slice, tile by tile: written, then attended, so that the next tile finds them as it should.

    q [T, H, D], k, v [T, kv, D] -> [T, H, D].
    """
    if q.is_cuda:
        return prefill_on_card(kv, layer, q, k, v, step, scale)
    out = torch.empty_like(q)
    at = 0
    while at < q.shape[0]:
        position = step.start + at
        tile = position // kv.tile
        end = min(q.shape[0], (tile + 1) * kv.tile - step.start)
        valid = min(end, step.valid)
        positions = step.positions[at:valid]
        where = Where(torch.full_like(positions, step.slot), positions)
        kv.write(layer, step.page_rows[position : step.start + valid], k[at:valid], v[at:valid], where)
        keys, values = kv.read_settled(layer, step.page_rows[: step.start + valid], step.slot, tile)
        padding = (0, 0, 0, 0, 0, end - valid)
        out[at:end] = prefill_attention(q[at:end], F.pad(keys, padding), F.pad(values, padding), position, GRID, scale)
        at = end
    return out


def prefill_on_card(
    kv: TiledKV, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, step: PrefillStep, scale: float
) -> torch.Tensor:
    """`prefill` by the kernels: the slice's complete tiles are packed, all rows attend, then the window takes the rest.

    In that order: the window still holds what these rows read of the tile before them. The step's tables are where the
    rows are.
    """
    from soloist.ops.triton.kvarn import keep_window, pack_prompt, turn_rows
    from soloist.ops.triton.kvarn_attention import prompt_attention

    tiles = kv.tiles(layer)
    dtype = tiles.window_k.dtype
    q, k, v = (x.to(dtype, copy=True, memory_format=torch.contiguous_format) for x in (q, k, v))
    turn_rows(q, k, v)
    pack_prompt(k, v, tiles, step.start, step.valid, step.slot, step.page_rows)
    out = prompt_attention(q, k, v, tiles, step.start, step.slot, step.page_rows, scale)
    keep_window(k, v, tiles, step.start, step.valid, step.slot)
    turn_rows(out)
    return out
