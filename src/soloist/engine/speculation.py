"""The engine's side of drafting: who proposes, who is told what was settled.

The engine asks once per decode step and reports back once; whether the proposal came from the MTP chain, a
block, a lookup or a grammar is the business of `drafting/`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from soloist.cache.kv import KVStore
from soloist.drafting.proposal import Proposal
from soloist.engine.request import Request
from soloist.sampling.verify import Verdict


@dataclass(frozen=True)
class SettledRows:
    """Tokens of one request that the target has just settled, with what a drafter needs of them.

    start       absolute position of the first row
    hidden      [n, H] after the final norm; taps [n, t * H] or None
    following   the tokens at start + 1 .. start + n (the last one is the new anchor after a decode step or the end
                of a prompt; in the middle of a prompt it is the next prompt token)
    pages       the request's pages, which cover these positions
    """

    request: Request
    start: int
    hidden: torch.Tensor
    taps: torch.Tensor | None
    following: Sequence[int]


class Speculation(Protocol):
    """All draft sources of a running engine behind one face. Called on the engine thread only."""

    taps: tuple[int, ...]
    name: str

    def absorb(self, rows: Sequence[SettledRows]) -> None:
        """Take in settled rows: prompt slices as they are prefilled, accepted paths after a step."""

    def propose(self, requests: Sequence[Request], limits: Sequence[int]) -> list[Proposal]:
        """One proposal per request, of at most limits[i] nodes and at most that depth. May be empty."""

    def observe(self, request: Request, proposal: Proposal, verdict: Verdict) -> None:
        """What became of a proposal (after stops were applied)."""

    def drop(self, request: Request) -> None:
        """The request has ended or leaves its slot."""

    def export(self, request: Request, cut: int) -> dict[str, torch.Tensor]:
        """What resuming after the first `cut` tokens needs beside pages; also brings the drafter's pages up to date.
        `cut` is the number of tokens absorbed."""

    def load(self, request: Request, cut: int, tensors: dict[str, torch.Tensor]) -> None:
        """Take over what `export` gave, into the request's slot."""

    def vacate(self, request: Request) -> None:
        """The request leaves its slot but lives on: what is known of its text and acceptance stays."""

    @property
    def stores(self) -> dict[str, KVStore]:
        """KV of the drafter that lives on the request's pages, by name."""

    @property
    def complaints(self) -> tuple[str, ...]:
        """What makes drafting slower than it should be, one sentence each. Any thread."""


class NoSpeculation:
    """SPEC=none, LOOKUP=0: every step is one row per request."""

    taps: tuple[int, ...] = ()
    name = "none"

    def absorb(self, rows: Sequence[SettledRows]) -> None:
        pass

    def propose(self, requests: Sequence[Request], limits: Sequence[int]) -> list[Proposal]:
        return [Proposal() for _ in requests]

    def observe(self, request: Request, proposal: Proposal, verdict: Verdict) -> None:
        pass

    def drop(self, request: Request) -> None:
        pass

    def export(self, request: Request, cut: int) -> dict[str, torch.Tensor]:
        return {}

    def load(self, request: Request, cut: int, tensors: dict[str, torch.Tensor]) -> None:
        pass

    def vacate(self, request: Request) -> None:
        pass

    @property
    def stores(self) -> dict[str, KVStore]:
        return {}

    @property
    def complaints(self) -> tuple[str, ...]:
        return ()
