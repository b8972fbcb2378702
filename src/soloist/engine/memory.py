"""Slots and pages of running requests: what is allocated, grown and given back.

Everything exists from the start; this room only moves ownership. A request holds one state slot and the
pages of its settled tokens, plus room for the rows of its next step.
"""

from __future__ import annotations

from collections.abc import Iterable

from soloist.cache.kv import KVStore
from soloist.cache.pages import PageAllocator, pages_for
from soloist.cache.recurrent import RecurrentState
from soloist.engine.request import Request
from soloist.models.state import Caches


class Memory:
    """Owner of the caches. `reserve` tokens beyond the prompt must be free before a request is admitted."""

    def __init__(self, kv: KVStore, state: RecurrentState, pages: PageAllocator, reserve: int) -> None:
        self.kv, self.state, self.pages, self.reserve = kv, state, pages, reserve
        self.caches = Caches(kv, state)
        self._free_slots = list(range(state.slots - 1, -1, -1))

    @property
    def slots_used(self) -> int:
        return self.state.slots - len(self._free_slots)

    def fits_ever(self, tokens: int) -> bool:
        """Could a request of this many tokens run on an empty pool?"""
        return pages_for(tokens, self.pages.group) <= self.pages.total

    def admit(self, request: Request) -> bool:
        """Give a waiting request a slot and its prompt's pages; False when there is no room now."""
        wanted = min(request.params.max_tokens, self.reserve)
        need = pages_for(len(request.prompt) + wanted, self.pages.group)
        need = min(need, self.pages.total)
        if not self._free_slots or self.pages.free < need:
            return False
        pages = self.pages.allocate(pages_for(len(request.prompt), self.pages.group))
        assert pages is not None
        request.pages = pages
        request.slot = self._free_slots.pop()
        request.settled = 0
        self.state.reset(request.slot)
        return True

    def grow(self, request: Request, tokens: int) -> bool:
        """Make sure the request's pages cover its first `tokens` positions; False when the pool is dry."""
        missing = pages_for(tokens, self.pages.group) - len(request.pages)
        if missing <= 0:
            return True
        pages = self.pages.allocate(missing)
        if pages is None:
            return False
        request.pages += pages
        return True

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
        self.pages.check([r.pages for r in running])
        slots = [r.slot for r in running if r.slot >= 0]
        assert len(set(slots)) == len(slots), f"a slot is owned twice: {slots}"
        assert sorted(slots + self._free_slots) == list(range(self.state.slots)), "a slot is lost"
