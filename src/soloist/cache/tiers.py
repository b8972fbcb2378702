"""Whole pages in and out of the device pool: every store that lives on the same page ids moves together.

The target's KV and the MTP module's are two `KVStore`s on one set of page ids. A page that leaves the pool
takes both along, and comes back bit for bit as it was, codes and scales included.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from soloist.cache.codecs import Planes
from soloist.cache.kv import KVStore
from soloist.cache.pages import PAGE


class PagedStores:
    """Named stores on shared page ids, for example {"target": ..., "mtp": ...}."""

    def __init__(self, stores: Mapping[str, KVStore]) -> None:
        pages = {store.pages for store in stores.values()}
        if len(pages) != 1:
            raise ValueError(f"stores of {sorted(pages)} pages cannot share page ids")
        self.stores = dict(stores)

    @property
    def format(self) -> str:
        """Part of a session's identity: the format of every store by name."""
        return ",".join(f"{name}={store.format}" for name, store in sorted(self.stores.items()))

    def bytes_per_token(self) -> int:
        return sum(store.bytes_per_token() for store in self.stores.values())

    def page_nbytes(self) -> int:
        """Bytes of one page in all stores."""
        return self.bytes_per_token() * PAGE

    def export(self, pages: Sequence[int]) -> Planes:
        """Host copies of whole pages: "<store>.<plane>" -> [layers, p * 64, ...]."""
        return {
            f"{name}.{plane}": tensor
            for name, store in self.stores.items()
            for plane, tensor in store.export(pages).items()
        }

    def load(self, pages: Sequence[int], planes: Planes) -> None:
        """Put exported pages back under any page ids. ValueError, and nothing written, when they do not fit."""
        parts: dict[str, Planes] = {name: {} for name in self.stores}
        for key, tensor in planes.items():
            name, _, plane = key.partition(".")
            if name not in parts:
                raise ValueError(f"pages carry {key!r}, which no store here has")
            parts[name][plane] = tensor
        for name, store in self.stores.items():
            store.expect(pages, parts[name])
        for name, store in self.stores.items():
            store.load(pages, parts[name])

    def copy_page(self, source: int, destination: int) -> None:
        for store in self.stores.values():
            store.copy_page(source, destination)
