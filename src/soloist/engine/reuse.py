"""The engine's side of the prefix cache: where a request resumes, what its prefill leaves behind, how it parks.

A snapshot is the recurrent slot and whatever the drafter needs beside its pages, as named host tensors. Taking
one first makes the drafter compute what it still owes, so that the pages shared with it are complete.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from soloist.cache.parking import park, unpark
from soloist.cache.persist import Persister
from soloist.cache.prefix import Match, PrefixCache
from soloist.cache.snapshot import Snapshot, grid_points
from soloist.cache.tiers import PagedStores
from soloist.engine.memory import Memory
from soloist.engine.request import Phase, Request
from soloist.engine.speculation import Speculation

STATE = "state."
FLUSH_S = 30.0  # a slow disk holds up a sleep for so long; what it has not written by then stays in host memory


def _may_skip(request: Request) -> bool:
    """Log-probabilities of the prompt need every row of it."""
    return request.params.prompt_logprobs is None


class Reuse:
    """Admission, snapshots and parking over one memory. `prefix` None (PREFIX_CACHE=0): every request is cold."""

    def __init__(
        self,
        memory: Memory,
        speculation: Speculation,
        storage: PagedStores,
        prefix: PrefixCache | None,
        persister: Persister | None = None,
        *,
        snapshot_every: int = 0,
        message_ends: tuple[int, ...] = (),
        numerics: str = "",
    ) -> None:
        self.memory, self.speculation, self.storage = memory, speculation, storage
        self.prefix, self.persister, self.numerics = prefix, persister, numerics
        self._every, self._message_ends = snapshot_every, frozenset(message_ends)
        memory.prefix = prefix

    def admit(self, request: Request) -> bool:
        """Slot, pages and state for a waiting request, warm where its prompt is known; False for not now."""
        self.idle()
        if self.prefix is not None and request.trail is None:
            request.trail = self.prefix.trail(request.keys, request.cache_salt)
        if not self.memory.could_admit(request):
            return False
        hit = self.prefix.match(request.trail or ()) if self.prefix is not None and _may_skip(request) else Match()
        if not self.memory.admit(request, hit):
            return False
        self.memory.state.reset(request.slot)
        if hit.snapshot is not None:
            self._restore(request, hit.snapshot.tensors, hit.length)
        request.stats.cached_tokens = hit.length
        request.snapshot_at = self._points(request)
        return True

    def catch_up(self, request: Request) -> bool:
        """Before a request's first slice: take what others have computed of its prompt since it was admitted (equal
        prompts that arrive together). True when that moved it on."""
        begun = request.settled > request.stats.cached_tokens
        if self.prefix is None or begun or request.trail is None or not _may_skip(request):
            return False
        if self.prefix.reach(request.trail) <= request.settled:
            return False
        hit = self.prefix.match(request.trail)
        if hit.snapshot is None or hit.length <= request.settled:
            self.memory.pages.release(hit.pages)
            return False
        self.memory.pages.release(request.pages[: len(hit.pages)])
        request.pages = hit.pages + request.pages[len(hit.pages) :]
        self._restore(request, hit.snapshot.tensors, hit.length)
        request.settled = request.stats.cached_tokens = hit.length
        request.snapshot_at = self._points(request)
        return True

    def _points(self, request: Request) -> tuple[int, ...]:
        if self.prefix is None:
            return ()
        ends = [i + 1 for i, token in enumerate(request.prompt) if token in self._message_ends]
        points = grid_points(len(request.prompt), ends, self._every, self.prefix.grid)
        return tuple(point for point in points if point > request.settled)

    def computed(self, request: Request) -> None:
        """After a prefill slice, before its last token is handed out: keep what belongs into the cache."""
        if request.settled in request.snapshot_at:
            self.keep(request)

    def keep(self, request: Request) -> None:
        """Share the prompt computed so far and hang a snapshot on its end, which must be a grid point."""
        cut = request.settled
        if self.prefix is None or request.trail is None or cut == 0 or cut % self.prefix.grid:
            return
        drafter = self.speculation.export(request, cut)
        request.pages = self.prefix.insert(request.trail, request.pages, cut)
        if not self.prefix.has_snapshot(request.trail, cut):
            self.prefix.attach_snapshot(request.trail, cut, Snapshot(cut, self._slot(request.slot, cut) | drafter))

    def persist(self, request: Request) -> None:
        """Send what the cache knows of this request's prompt to the session directory."""
        if self.persister is not None and request.trail is not None and self.prefix is not None:
            self.persister.save(request.trail, request.settled - request.settled % self.prefix.grid)

    def idle(self) -> None:
        """Take over what the session writer has finished."""
        if self.persister is not None:
            self.persister.poll()

    def close(self) -> None:
        """Finish what is being written."""
        if self.persister is not None:
            self.persister.close()

    def vacate(self) -> None:
        """Move what is known off the device, for another engine to go on with (`engine/sleep.py`)."""
        if self.persister is not None:
            self.persister.store.flush(FLUSH_S)
            self.persister.poll()
        if self.prefix is not None:
            self.prefix.vacate()

    def _slot(self, slot: int, cut: int) -> dict[str, torch.Tensor]:
        """What the target keeps in a slot after `cut` tokens: recurrent state, and unpacked KV where there is any."""
        state = {f"{STATE}{i}": tensor for i, tensor in enumerate(self.memory.state.export(slot))}
        return state | self.memory.kv.export_slot(slot, cut)

    def _restore(self, request: Request, tensors: Mapping[str, torch.Tensor], cut: int) -> None:
        state = [tensors[f"{STATE}{i}"] for i in range(sum(name.startswith(STATE) for name in tensors))]
        self.memory.state.load(request.slot, state)
        others = {name: t for name, t in tensors.items() if not name.startswith(STATE)}
        self.memory.kv.load_slot(request.slot, cut, others)
        self.speculation.load(request, cut, others)

    def park(self, request: Request) -> int:
        """Move a decoding request to host memory; returns the pages that became free."""
        slot = self._slot(request.slot, request.settled) | self.speculation.export(request, request.settled)
        # The page of the next position too: the drafter may have a row there already.
        covered = min(request.settled + 1, len(request.pages) * 64)
        request.parked_as, freed = park(request.pages, covered, slot, self.storage, self.memory.pages)
        request.pages = []
        self.speculation.vacate(request)
        self.memory.release(request)
        request.phase = Phase.PARKED
        request.stats.parked += 1
        return freed

    def resume(self, request: Request) -> bool:
        """Bring a parked request back, bit for bit; False while there is no room for it and its reserve."""
        parked = request.parked_as
        assert parked is not None
        if not self.memory.could_admit(request):
            return False
        evict = self.prefix.evict if self.prefix is not None else lambda pages: 0
        pages = unpark(parked, self.storage, self.memory.pages, evict)
        if pages is None:
            return False
        request.pages, request.slot, request.parked_as = pages, self.memory.take_slot(), None
        self._restore(request, parked.slot, request.settled)
        request.phase = Phase.DECODE
        return True
