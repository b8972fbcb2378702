"""Paged K and V of the attention layers: where the settled tokens' keys and values are kept.

Every layer shares the page ids of `cache/pages.py`; token `p` of a request lies in its page p // 64 at
lane p % 64. The target's layers are one store; the MTP module's single layer is another on the same
page ids. Rows of a running step are not in here: attention reads them from the step's own buffers, as
`roundtrip` gives them, and the engine writes the accepted path with `write` afterwards.

What can go wrong: writing to a page somebody else reads. The store does not know owners; a request writes only
behind the pages it shares.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from soloist.cache.codecs import Codec, Fp8Codec, Planes, bytes_per_token, roundtrip
from soloist.cache.pages import PAGE
from soloist.models.step import Where
from soloist.ops.stored_rows import StoredRows

# Bytes of a plane on their way to or from the host. They stand on the device beside a pool that was given all the room
# there is, so a long request moves a share at a time.
MOVED = 32 << 20


class KVStore:
    """K and V of `layers` attention layers over `pages` pages, allocated once and never grown.

    Storage of a plane is [layers, pages * 64, ...]; `planes` exposes it to kernels under "k.data", "v.scale", ...
    `dtype` is the compute dtype that `read` and `roundtrip` return.
    """

    tile = PAGE  # tokens encoded together are at most a page: nothing to pack later

    def __init__(
        self,
        *,
        layers: int,
        kv_heads: int,
        head_dim: int,
        pages: int,
        codec_k: Codec,
        codec_v: Codec,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
    ) -> None:
        self.layers, self.kv_heads, self.head_dim, self.pages = layers, kv_heads, head_dim, pages
        self.codec_k, self.codec_v = codec_k, codec_v
        self.dtype = dtype
        self.planes: Planes = {}
        for part, codec in (("k", codec_k), ("v", codec_v)):
            for name, (shape, kind) in codec.planes(kv_heads, head_dim).items():
                # Zeros, not empty: unwritten lanes are masked, and masked NaN would still poison a product.
                self.planes[f"{part}.{name}"] = torch.zeros((layers, pages * PAGE, *shape), dtype=kind, device=device)
        self._lanes = torch.arange(PAGE, device=device)

    @property
    def format(self) -> str:
        """Name of the stored format, part of every cache key: "bf16", or "fp8+int8" when K and V differ."""
        k, v = self.codec_k.name, self.codec_v.name
        return k if k == v else f"{k}+{v}"

    @property
    def nbytes(self) -> int:
        return sum(plane.nbytes for plane in self.planes.values())

    def bytes_per_token(self) -> int:
        """Bytes of one token in all layers of this store, K and V."""
        one = sum(bytes_per_token(codec, self.kv_heads, self.head_dim) for codec in (self.codec_k, self.codec_v))
        return one * self.layers

    def _part(self, part: str, layer: int) -> Planes:
        return {name[2:]: plane[layer] for name, plane in self.planes.items() if name[0] == part}

    def write(
        self, layer: int, index: torch.Tensor, k: torch.Tensor, v: torch.Tensor, where: Where | None = None
    ) -> None:
        """Store rows. index [n] int64 = page * 64 + lane, distinct; k, v [n, kv_heads, D] floating."""
        if self._lanes.is_cuda:
            from soloist.ops.triton.kv import write

            for x, into in zip((k, v), self.stored(layer), strict=True):
                write(x.to(self.dtype), index, into)
            return
        for part, codec, x in (("k", self.codec_k, k), ("v", self.codec_v, v)):
            planes = self._part(part, layer)
            for name, rows in codec.encode(x, layer).items():
                planes[name][index] = rows

    def rows(self, pages: torch.Tensor | Sequence[int]) -> torch.Tensor:
        """Row numbers [p * 64] of whole pages, in order."""
        ids = torch.as_tensor(pages, dtype=torch.int64, device=self._lanes.device)
        return (ids[:, None] * PAGE + self._lanes).flatten()

    def read_rows(self, layer: int, index: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V [n, kv_heads, D] in the compute dtype of rows index [n] int64."""
        index = index.to(self._lanes.device)
        k = {name: plane.index_select(0, index) for name, plane in self._part("k", layer).items()}
        v = {name: plane.index_select(0, index) for name, plane in self._part("v", layer).items()}
        return self.codec_k.decode(k, self.dtype, layer), self.codec_v.decode(v, self.dtype, layer)

    def read(self, layer: int, pages: torch.Tensor | Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V [p * 64, kv_heads, D] of whole pages, in the compute dtype. Unwritten lanes hold anything finite."""
        return self.read_rows(layer, self.rows(pages))

    def roundtrip(self, layer: int, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """k, v [n, kv_heads, D] as `read` will return them once written: what the rows of a step must read."""
        return roundtrip(self.codec_k, k, layer), roundtrip(self.codec_v, v, layer)

    def stored(self, layer: int | None, planes: Planes | None = None) -> tuple[StoredRows, StoredRows]:
        """Keys and values as the kernels of a card take them: of one layer, or of all ([layers, ...], codes only).

        `planes` are rows of a running step (`row_planes`); by default the pages.
        """
        parts = []
        for part, codec in (("k", self.codec_k), ("v", self.codec_v)):
            named = {
                n[2:]: p if layer is None else p[layer] for n, p in (planes or self.planes).items() if n[0] == part
            }
            factor = codec.scale(layer) if isinstance(codec, Fp8Codec) and layer is not None else 1.0
            parts.append(StoredRows(named["data"], named.get("scale"), factor))
        return parts[0], parts[1]

    def row_planes(self, rows: int) -> Planes:
        """Room for `rows` rows of a running step as they will be stored: the planes' names, [layers, rows, ...]."""
        return {n: p.new_zeros(self.layers, rows, *p.shape[2:]) for n, p in self.planes.items()}

    def export_slot(self, slot: int, cut: int) -> dict[str, torch.Tensor]:
        """Host copies of what is kept per state slot beside the pages after `cut` settled tokens; here nothing."""
        return {}

    def load_slot(self, slot: int, cut: int, tensors: dict[str, torch.Tensor]) -> None:
        """Take over what `export_slot` gave."""

    def copy_page(self, source: int, destination: int) -> None:
        """Copy one page in every layer, codes as they are."""
        for plane in self.planes.values():
            plane[:, destination * PAGE : (destination + 1) * PAGE] = plane[:, source * PAGE : (source + 1) * PAGE]

    def export(self, pages: Sequence[int]) -> Planes:
        """Host copies of whole pages, codes as they are: name -> [layers, p * 64, ...] on the CPU."""
        index = self.rows(pages)
        out: Planes = {}
        for name, plane in self.planes.items():
            out[name] = torch.empty((self.layers, index.numel(), *plane.shape[2:]), dtype=plane.dtype)
            for at, rows in _shares(plane, index):
                out[name][:, at].copy_(plane[:, rows])
        return out

    def expect(self, pages: Sequence[int], planes: Planes) -> None:
        """Raise ValueError unless `planes` are what `export` of so many pages of a store like this gives."""
        if planes.keys() != self.planes.keys():
            raise ValueError(f"planes {sorted(planes)} do not belong to a {self.format} store")
        for name, plane in self.planes.items():
            given = planes[name]
            expected = (self.layers, len(pages) * PAGE, *plane.shape[2:])
            if tuple(given.shape) != expected or given.dtype != plane.dtype:
                raise ValueError(f"plane {name} is {tuple(given.shape)} {given.dtype}, not {expected} {plane.dtype}")

    def load(self, pages: Sequence[int], planes: Planes) -> None:
        """Put exported pages back, into any page ids. ValueError, and nothing written, when they do not fit."""
        self.expect(pages, planes)
        index = self.rows(pages)
        for name, plane in self.planes.items():
            for at, rows in _shares(plane, index):
                plane[:, rows] = planes[name][:, at].to(plane.device)


def _shares(plane: torch.Tensor, index: torch.Tensor) -> Iterator[tuple[slice, torch.Tensor]]:
    """Rows `index` [n] of a plane [layers, rows, ...] in shares of at most MOVED bytes: (place in n, row numbers)."""
    most = max(PAGE, MOVED // (plane.nbytes // plane.shape[1]))
    for first in range(0, index.numel(), most):
        rows = index[first : first + most]
        yield slice(first, first + rows.numel()), rows
