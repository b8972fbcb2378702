"""KV in KVarN tiles: what a row reads depends on its position alone.

A row in tile t (128 tokens) reads tiles 1 .. t - 2 packed, and tile 0, tile t - 1 and tile t as they were
computed, in prefill and in decode alike. Packed records live in the pages; the unpacked tiles live in a window
per state slot: 128 lanes for the first tile, then a ring of two tiles. A tile is packed when its last token has
settled, which is before the ring needs its place and before any row may read it packed.

What can go wrong: packing is irreversible, so only settled tokens may be written; a request that resumes or
comes back from parking needs its window too (`export_slot`, `load_slot`), and resumes at multiples of 128.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from soloist.cache.codecs import Planes, token_codec
from soloist.cache.kv import KVStore
from soloist.cache.pages import PAGE
from soloist.models.step import Where
from soloist.ops.kvarn import TILE, WINDOW, StoredTiles, decode_tiles, encode_tile, lane, record_bytes


class RecordCodec:
    """The storage plane of packed tiles: every token row holds 1/128 of its tile's records."""

    name = "kvarn"

    def planes(self, kv_heads: int, head_dim: int) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        if head_dim % PAGE:
            raise ValueError(f"KVarN needs a head size that is a multiple of {PAGE}, not {head_dim}")
        return {"record": ((kv_heads * record_bytes(head_dim) // TILE,), torch.uint8)}

    def encode(self, x: torch.Tensor, layer: int = 0) -> Planes:
        raise TypeError("KVarN encodes whole tiles")

    def decode(self, planes: Planes, dtype: torch.dtype, layer: int = 0) -> torch.Tensor:
        raise TypeError("KVarN decodes whole tiles")


class _Nothing(RecordCodec):
    """Values share the record of their keys."""

    def planes(self, kv_heads: int, head_dim: int) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        return {}


class TileStore(KVStore):
    """Packed tiles in pages (page ids 2 i and 2 i + 1 form one tile) and a window of unpacked tokens per slot."""

    tile = TILE

    def __init__(
        self,
        *,
        layers: int,
        kv_heads: int,
        head_dim: int,
        pages: int,
        slots: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
    ) -> None:
        super().__init__(
            layers=layers, kv_heads=kv_heads, head_dim=head_dim, pages=pages, codec_k=RecordCodec(),
            codec_v=_Nothing(), dtype=dtype, device=device,
        )  # fmt: skip
        shape = (layers, slots, WINDOW, kv_heads, head_dim)
        self.window_k = torch.zeros(shape, dtype=dtype, device=device)
        self.window_v = torch.zeros(shape, dtype=dtype, device=device)

    @property
    def format(self) -> str:
        return "kvarn"

    @property
    def nbytes(self) -> int:
        return super().nbytes + self.window_k.nbytes + self.window_v.nbytes

    def tiles(self, layer: int | None) -> StoredTiles:
        """Records and windows as the kernels of a card take them: of one layer, or of all."""
        parts = self.planes["k.record"], self.window_k, self.window_v
        return StoredTiles(*(parts if layer is None else (part[layer] for part in parts)))

    def row_planes(self, rows: int) -> Planes:
        """Rows of a running step are kept as computed: k.data and v.data [layers, rows, kv_heads, D]."""
        return {f"{n}.data": self.window_k.new_zeros(self.layers, rows, self.kv_heads, self.head_dim) for n in "kv"}

    def write(
        self, layer: int, index: torch.Tensor, k: torch.Tensor, v: torch.Tensor, where: Where | None = None
    ) -> None:
        """Store settled rows [n], consecutive per slot; tiles that become complete are packed.

        index [n] as in `KVStore.write`; `where` names slot and position of every row and is required here.
        """
        if where is None:
            raise ValueError("a tile store is written by slot and position")
        positions, slots = where.positions.tolist(), where.slots.tolist()
        start = 0
        while start < len(positions):
            # One tile of one slot at a time: the ring must not lose a tile before it is packed.
            end = start + 1
            while (
                end < len(positions)
                and slots[end] == slots[start]
                and positions[end] // TILE == positions[start] // TILE
            ):
                end += 1
            part = slice(start, end)
            lanes = lane(where.positions[part])
            self.window_k[layer, slots[start], lanes] = k[part].to(self.dtype)
            self.window_v[layer, slots[start], lanes] = v[part].to(self.dtype)
            if positions[end - 1] % TILE == TILE - 1 and positions[end - 1] >= TILE:
                self._pack(layer, slots[start], positions[end - 1] // TILE, int(index[end - 1]) // TILE)
            start = end

    def _pack(self, layer: int, slot: int, tile: int, block: int) -> None:
        """Pack tile `tile` of a slot into page pair `block`."""
        first = TILE + (tile - 1) * TILE % (2 * TILE)
        lanes = slice(first, first + TILE)
        records = encode_tile(self.window_k[layer, slot, lanes], self.window_v[layer, slot, lanes])
        self.planes["k.record"][layer, block * TILE : (block + 1) * TILE] = records.reshape(TILE, -1)

    def read_settled(self, layer: int, index: torch.Tensor, slot: int, tile: int) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V [n, kv_heads, D] of positions 0 .. n - 1 (rows `index` [n]) as a row in tile `tile` reads them.

        n reaches at most into `tile`; the last settled token is in `tile` or in the one before it.
        """
        n = index.numel()
        packed = min(max(tile - 1, 1), -(-n // TILE))  # tiles 1 .. packed - 1 are read from their records
        parts_k, parts_v = [], []
        if packed > 1:
            rows = self.planes["k.record"][layer].view(-1, TILE * self.planes["k.record"].shape[2])
            blocks = index[TILE : packed * TILE : TILE] // TILE
            records = rows[blocks].view(blocks.numel(), self.kv_heads, record_bytes(self.head_dim))
            k, v = decode_tiles(records, self.head_dim)
            parts_k.append(k.to(self.dtype))
            parts_v.append(v.to(self.dtype))
        recent = lane(torch.arange(min(packed * TILE, n), n, device=index.device))
        first = min(TILE, n)
        return tuple(
            torch.cat([window[layer, slot, :first], *parts, window[layer, slot, recent]])
            for window, parts in ((self.window_k, parts_k), (self.window_v, parts_v))
        )  # type: ignore[return-value]

    def read_rows(self, layer: int, index: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        raise TypeError("a tile store is read for a tile: read_settled")

    def roundtrip(self, layer: int, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Rows of the running step are in the row's own tile or the one before: read as computed."""
        return k.to(self.dtype), v.to(self.dtype)

    def _needed(self, cut: int) -> torch.Tensor:
        """Window lanes a request of `cut` settled tokens still reads: tile 0 and everything from the tile before."""
        recent = torch.arange(min(cut, max(TILE, (cut // TILE - 1) * TILE)), cut)
        return torch.cat([torch.arange(min(cut, TILE)), lane(recent)]).to(self.window_k.device)

    def export_slot(self, slot: int, cut: int) -> dict[str, torch.Tensor]:
        lanes = self._needed(cut)
        return {
            "window.k": self.window_k[:, slot, lanes].to("cpu", copy=True),
            "window.v": self.window_v[:, slot, lanes].to("cpu", copy=True),
        }

    def load_slot(self, slot: int, cut: int, tensors: dict[str, torch.Tensor]) -> None:
        lanes = self._needed(cut)
        self.window_k[:, slot, lanes] = tensors["window.k"].to(self.window_k.device)
        self.window_v[:, slot, lanes] = tensors["window.v"].to(self.window_v.device)


def make_store(
    format_k: str,
    format_v: str,
    *,
    layers: int,
    kv_heads: int,
    head_dim: int,
    pages: int,
    slots: int,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    scales: tuple[Sequence[float], Sequence[float]] = ((), ()),
) -> KVStore:
    """The store of a KV format. `scales` are fp8's per-layer scales of keys and values."""
    if format_k == "kvarn":
        return TileStore(
            layers=layers, kv_heads=kv_heads, head_dim=head_dim, pages=pages, slots=slots, dtype=dtype, device=device
        )
    return KVStore(
        layers=layers, kv_heads=kv_heads, head_dim=head_dim, pages=pages, dtype=dtype, device=device,
        codec_k=token_codec(format_k, scales[0]), codec_v=token_codec(format_v, scales[1]),
    )  # fmt: skip
