"""Who owns which page of KV: reference counts over a fixed pool of 64-token pages.

Plain host bookkeeping, no tensors: a page id indexes every attention layer's storage at once. A page
with several owners is read-only; nobody needs a copy, because what is shared ends on the grid and a
request writes only behind it. What can go wrong: releasing a page twice would hand it to two
requests, so every operation checks its argument and raises instead of going on.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

PAGE = 64  # tokens; also the prefill grid and the length of one KV block in every attention kernel


def pages_for(tokens: int, group: int = 1) -> int:
    """Pages that `tokens` tokens occupy, rounded up to whole groups."""
    span = PAGE * group
    return -(-tokens // span) * group


class PageAllocator:
    """Reference-counted pages 0 .. total - 1.

    `group` pages are handed out together and aligned (KVarN packs tiles of 128 tokens = 2 pages, so page
    ids 2i and 2i + 1 always belong to one tile); the group returns to the free list when its last page does.
    """

    def __init__(self, total: int, group: int = 1) -> None:
        if total < group or total % group or group < 1:
            raise ValueError(f"a pool of {total} pages cannot be divided into groups of {group}")
        self.total = total
        self.group = group
        self._references = [0] * total
        # The most recently released group is used next: it is the one most likely still in a cache.
        self._free = list(range(total - group, -1, -group))

    @property
    def free(self) -> int:
        """Pages nobody owns."""
        return len(self._free) * self.group

    @property
    def used(self) -> int:
        return self.total - self.free

    def allocate(self, count: int) -> list[int] | None:
        """`count` pages with one reference each, or None (and nothing taken) when fewer are free."""
        if count < 0 or count % self.group:
            raise ValueError(f"{count} pages are not a whole number of groups of {self.group}")
        if count > self.free:
            return None
        pages: list[int] = []
        for _ in range(count // self.group):
            first = self._free.pop()
            pages.extend(range(first, first + self.group))
        for page in pages:
            self._references[page] = 1
        return pages

    def retain(self, pages: Iterable[int]) -> None:
        """Add one owner to each page; the page must already have one."""
        pages = list(pages)
        for page in pages:
            if self.references(page) == 0:
                raise ValueError(f"page {page} is free and cannot be retained")
        for page in pages:
            self._references[page] += 1

    def release(self, pages: Iterable[int]) -> list[int]:
        """Drop one owner of each page; returns the pages that became free."""
        pages = list(pages)
        for page, times in Counter(pages).items():
            if self.references(page) < times:
                raise ValueError(f"page {page} is released {times} times but has {self._references[page]} owners")
        freed: list[int] = []
        for page in pages:
            self._references[page] -= 1
            first = page - page % self.group
            if not any(self._references[first : first + self.group]):
                self._free.append(first)
                freed.extend(range(first, first + self.group))
        return freed

    def references(self, page: int) -> int:
        if not 0 <= page < self.total:
            raise ValueError(f"page {page} is outside the pool of {self.total}")
        return self._references[page]

    def check(self, owners: Iterable[Iterable[int]] | None = None) -> None:
        """Assert the pool's integrity; with `owners` (one page list per owner) also that the counts are theirs.

        Callable at idle and in tests. A page counted but owned by nobody is a leak, the reverse is aliasing.
        """
        free = set(self._free)
        assert len(free) == len(self._free), "a group is in the free list twice"
        for first in range(0, self.total, self.group):
            counts = self._references[first : first + self.group]
            assert min(counts) >= 0, f"negative reference count in group {first}: {counts}"
            assert (first in free) == (not any(counts)), f"group {first} has counts {counts} and free={first in free}"
        if owners is not None:
            held = Counter(page for owner in owners for page in owner)
            for page in range(self.total):
                assert held[page] == self._references[page], (
                    f"page {page} has {self._references[page]} references but {held[page]} owners"
                )
