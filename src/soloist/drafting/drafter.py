"""The one face of a network that drafts: what it is told, what it is asked, what it keeps.

A drafter is told of every settled token (prompt slices and accepted paths alike, in order) and asked for a block after
the anchor. It keeps something per slot: the MTP module a KV row per token in the request's pages, DFlash2 a window of
context. What it keeps depends on settled tokens only, so a rejected draft leaves no trace and there is nothing to
roll back.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import torch

from soloist.cache.kv import KVStore
from soloist.drafting.draft import Draft
from soloist.models.pictures import Sight
from soloist.sampling.params import SamplingParams
from soloist.sampling.verify import Mode


@dataclass(frozen=True)
class SettledTokens:
    """Consecutive settled tokens of one request, with the target's features of each.

    start   position of the first; tokens [n + 1]: they and the one after them
    hidden  [n, H] after the final norm; taps [n, t * H], None where the drafter wants none
    pages   the request's pages, which cover these positions
    sight   the request's pictures, if its prompt has any
    """

    slot: int
    start: int
    tokens: Sequence[int]
    hidden: torch.Tensor
    taps: torch.Tensor | None
    pages: Sequence[int]
    sight: Sight | None = None

    @property
    def end(self) -> int:
        """Position after the last settled token."""
        return self.start + len(self.tokens) - 1


@dataclass(frozen=True)
class Ask:
    """One request that wants drafts: its anchor and the anchor's position, and how its tokens are drawn.

    pages   the request's pages, which cover the anchor's position
    count   drafts wanted along a path; the drafter may give fewer
    tree    alternatives are wanted too (a CandidateGraph)
    sample  False: draft the likeliest tokens even where the request samples
    sight   the request's pictures, if its prompt has any
    """

    slot: int
    anchor: int
    position: int
    pages: Sequence[int]
    params: SamplingParams
    seed: int
    mode: Mode
    count: int
    tree: bool = False
    sample: bool = True
    sight: Sight | None = None


class Drafter(Protocol):
    """A loaded drafter with room for a fixed number of slots. Called on the engine thread only."""

    name: str
    taps: tuple[int, ...]
    depth: int

    @property
    def stores(self) -> Mapping[str, KVStore]:
        """KV kept on the requests' pages, by name: it travels with them through every tier."""

    @property
    def nbytes(self) -> int:
        """Bytes of what is kept per slot, all slots together."""

    def absorb(self, batch: Sequence[SettledTokens]) -> None:
        """Take in settled tokens. A part that starts before what is known replaces what follows its start."""

    def propose(self, batch: Sequence[Ask]) -> list[Draft]:
        """One draft per request, at most `depth` tokens deep. Asking twice gives the same answer."""

    def drop(self, slot: int) -> None:
        """Forget a slot."""

    def export(self, slot: int, cut: int) -> dict[str, torch.Tensor]:
        """What a resume after the first `cut` tokens needs besides pages; `cut` is the end of what was absorbed."""

    def load(self, slot: int, cut: int, tensors: dict[str, torch.Tensor]) -> None:
        """Take a slot over as `export` left it."""


@dataclass
class Backlog:
    """Settled tokens not yet computed, per slot: they wait for the next draft, so that idle drafting costs nothing."""

    limit: int
    _parts: dict[int, list[SettledTokens]] = field(default_factory=dict)
    _copied: dict[int, int] = field(default_factory=dict)  # of a slot's parts, the first so many are copies already

    def add(self, part: SettledTokens) -> bool:
        """Queue a part; True when the slot's backlog is long enough to be computed at once."""
        parts = self._parts.setdefault(part.slot, [])
        parts.append(part)
        return sum(len(p.tokens) - 1 for p in parts) >= self.limit

    def take(self, slots: Sequence[int]) -> list[SettledTokens]:
        """The queued parts of these slots, in order, slot by slot."""
        for slot in slots:
            self._copied.pop(slot, None)
        return [part for slot in slots for part in self._parts.pop(slot, [])]

    def has(self, slot: int) -> bool:
        return slot in self._parts

    def detach(self) -> None:
        """Copy the features of what is still queued: a card's are good until its next step only."""
        for slot, parts in self._parts.items():
            first = self._copied.get(slot, 0)
            parts[first:] = [
                replace(p, hidden=p.hidden.clone(), taps=None if p.taps is None else p.taps.clone())
                for p in parts[first:]
            ]
            self._copied[slot] = len(parts)

    def drop(self, slot: int) -> None:
        self._parts.pop(slot, None)
        self._copied.pop(slot, None)
