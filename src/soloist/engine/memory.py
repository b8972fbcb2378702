"""Slots and pages of running requests: what is allocated, grown and given back.

Everything exists from the start; this room only moves ownership. A request holds one state slot and the
pages of its settled tokens, plus room for the rows of its next step.
"""

from __future__ import annotations

from collections.abc import Iterable

from soloist.cache.kv import KVStore
from soloist.cache.pages import PageAllocator, pages_for
from soloist.cache.prefix import Match, PrefixCache
from soloist.cache.recurrent import RecurrentState
from soloist.engine.request import Request
from soloist.models.state import Caches


class Memory:
    """Owner of the caches. `reserve` tokens beyond the prompt must be free before a request is admitted.

    Pages that only the prefix cache owns count as free: they are evicted when a request wants them.
    """

    def __init__(self, kv: KVStore, state: RecurrentState, pages: PageAllocator, reserve: int) -> None:
        self.kv, self.state, self.pages, self.reserve = kv, state, pages, reserve
        self.prefix: PrefixCache | None = None
        self.caches = Caches(kv, state)
        self._free_slots = list(range(state.slots - 1, -1, -1))

    @property
    def slots_used(self) -> int:
        return self.state.slots - len(self._free_slots)

    def fits_ever(self, tokens: int) -> bool:
        """Could a request of this many tokens run on an empty pool?"""
        return pages_for(tokens, self.pages.group) <= self.pages.total

    def demand(self, request: Request) -> int:
        """Pages that must be free (or evictable, or a cached part of the prompt) before a request is admitted."""
        wanted = min(max(request.remaining, 1), self.reserve)
        return min(pages_for(request.length + wanted, self.pages.group), self.pages.total)

    def could_admit(self, request: Request) -> bool:
        """Is there a slot, and are there pages for the prompt and the reserve? Takes nothing."""
        if not self._free_slots:
            return False
        need = self.demand(request)
        if self.pages.free >= need:
            return True
        return self.prefix is not None and self.prefix.available(request.trail or ()) >= need

    def admit(self, request: Request, hit: Match) -> bool:
        """Give a waiting request a slot and its prompt's pages, the hit's first; False, and the hit given back, when
        there is no room now. The slot's content is the caller's to set."""
        missing = self.demand(request) - len(hit.pages)
        if not self._free_slots or not self._clear(missing):
            self.pages.release(hit.pages)
            return False
        # One position more than the prompt: the MTP row of the first answer token is written by the prefill.
        fresh = self.pages.allocate(pages_for(len(request.prompt) + 1, self.pages.group) - len(hit.pages))
        assert fresh is not None
        request.pages = hit.pages + fresh
        request.slot = self._free_slots.pop()
        request.settled = hit.length
        return True

    def take_slot(self) -> int:
        """A free slot, -1 if there is none."""
        return self._free_slots.pop() if self._free_slots else -1

    def grow(self, request: Request, tokens: int) -> bool:
        """Make sure the request's pages cover its first `tokens` positions; False when the pool is dry."""
        missing = pages_for(tokens, self.pages.group) - len(request.pages)
        if missing <= 0:
            return True
        if not self._clear(missing):
            return False
        pages = self.pages.allocate(missing)
        assert pages is not None
        request.pages += pages
        return True

    def _clear(self, pages: int) -> bool:
        """Have `pages` free pages, evicting cached ones if need be."""
        if self.pages.free < pages and self.prefix is not None:
            self.prefix.evict(pages - self.pages.free)
        return self.pages.free >= pages

    def release(self, request: Request) -> None:
        """Take back slot and pages. Idempotent."""
        if request.pages:
            self.pages.release(request.pages)
            request.pages = []
        if request.slot >= 0:
            self._free_slots.append(request.slot)
            request.slot = -1

    def check(self, running: Iterable[Request]) -> None:
        """Integrity at idle and in tests: every page and slot has exactly the owners it says."""
        running = list(running)
        cached = self.prefix.owned_pages() if self.prefix is not None else []
        self.pages.check([*(r.pages for r in running), *cached])
        if self.prefix is not None:
            self.prefix.check()
        slots = [r.slot for r in running if r.slot >= 0]
        assert len(set(slots)) == len(slots), f"a slot is owned twice: {slots}"
        assert sorted(slots + self._free_slots) == list(range(self.state.slots)), "a slot is lost"
