"""Parking: a running request leaves the device when the pool is dry and comes back bit for bit.

Everything that a request owns on the device goes to host memory: its pages (all of them, shared ones too,
so that nothing it needs can be evicted meanwhile) and its slot (recurrent state, convolution state, the record
of the last step, the drafter's context). The slot's content is named tensors made by whoever owns slots.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from soloist.cache.pages import PAGE, PageAllocator, pages_for
from soloist.cache.prefix import PageStorage, Planes
from soloist.cache.snapshot import host_copy

Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Parked:
    """One request's device content in host memory. `pages` counts those it will need again."""

    planes: Planes
    pages: int
    slot: Tensors

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for t in (*self.planes.values(), *self.slot.values()))


def park(
    pages: list[int], settled: int, slot: Tensors, storage: PageStorage, allocator: PageAllocator
) -> tuple[Parked, int]:
    """Copy out and release. `settled` tokens are in the pages; pages beyond them hold nothing and are not copied.
    Tensors of `slot` may stand on any device.

    Returns the parked content and how many pages became free; the caller's page list is no longer its own.
    """
    used = pages_for(settled, allocator.group)
    if used > len(pages):
        raise ValueError(f"{settled} settled tokens do not fit {len(pages)} pages of {PAGE} tokens")
    before = allocator.free
    parked = Parked(storage.export(pages[:used]), used, {name: host_copy(t) for name, t in slot.items()})
    allocator.release(pages)
    return parked, allocator.free - before


def unpark(
    parked: Parked, storage: PageStorage, allocator: PageAllocator, evict: Callable[[int], int]
) -> list[int] | None:
    """Pages for a parked request with its content in them, or None while the pool has no room (nothing changed).

    `evict(n)` gives up cached pages (`PrefixCache.evict`). The caller restores `parked.slot` into a slot.
    """
    if allocator.free < parked.pages:
        evict(parked.pages - allocator.free)
    pages = allocator.allocate(parked.pages)
    if pages is None:
        return None
    try:
        storage.load(pages, parked.planes)
    except Exception:
        allocator.release(pages)
        raise
    return pages
