"""A device pool and a session directory whose content can be checked: every page knows which prefix it holds."""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from soloist.cache.prefix import SessionError
from soloist.cache.segments import SegmentData
from soloist.cache.snapshot import Snapshot
from soloist.cache.tree import chain

PAGE_BYTES = 64 * 8


class Pool:
    """One int64 per token and page: the number of the prefix that ends at the token's block."""

    def __init__(self, pages: int) -> None:
        self.rows = torch.zeros(1, pages * 64, dtype=torch.int64)

    def _index(self, pages: Sequence[int]) -> torch.Tensor:
        return (torch.tensor(list(pages), dtype=torch.int64)[:, None] * 64 + torch.arange(64)).flatten()

    def write(self, page: int, value: int) -> None:
        self.rows[:, page * 64 : page * 64 + 64] = value

    def content(self, page: int) -> int:
        values = self.rows[0, page * 64 : page * 64 + 64].unique().tolist()
        assert len(values) == 1, f"page {page} mixes {values}"
        return values[0]

    def export(self, pages: Sequence[int]) -> dict[str, torch.Tensor]:
        return {"k.data": self.rows[:, self._index(pages)].clone()}

    def load(self, pages: Sequence[int], planes: dict[str, torch.Tensor]) -> None:
        self.rows[:, self._index(pages)] = planes["k.data"]

    def page_nbytes(self) -> int:
        return PAGE_BYTES


@dataclass(eq=False)
class FakeSegment:
    data: SegmentData
    broken: bool = False

    @property
    def root(self) -> bytes:
        return self.data.root

    @property
    def parent(self) -> bytes:
        return self.data.parent

    @property
    def start(self) -> int:
        return self.data.start

    @property
    def grid(self) -> int:
        return self.data.grid

    @property
    def tokens(self) -> array[int]:
        return self.data.tokens

    @property
    def states(self) -> tuple[int, ...]:
        return tuple(state.length for state in self.data.states)


@dataclass
class FakeStore:
    """Session directory in memory; writes finish when the test says so."""

    queue: list[SegmentData] = field(default_factory=list)
    files: list[FakeSegment] = field(default_factory=list)
    written: Callable = lambda data, segment: None
    removed: Callable = lambda segment: None

    def submit(self, data: SegmentData) -> None:
        self.queue.append(data)

    def finish(self, ok: bool) -> None:
        data = self.queue.pop(0)
        known = {d for s in self.files for d in chain(s.parent, s.tokens, s.grid)}
        if not ok or (data.parent != data.root and data.parent not in known):
            self.written(data, None)
            return
        segment = FakeSegment(data)
        self.files.append(segment)
        self.written(data, segment)

    def scan(self) -> list[FakeSegment]:
        return sorted((s for s in self.files if not s.broken), key=lambda s: (s.start, s.start + len(s.tokens)))

    def read_pages(self, segment: FakeSegment, start: int, end: int) -> dict[str, torch.Tensor]:
        if segment.broken:
            self.files = [s for s in self.files if s is not segment]
            raise SessionError("session file is damaged")
        planes = segment.data.planes
        return {k: p[:, start - segment.start : end - segment.start] for k, p in planes.items()}

    def read_state(self, segment: FakeSegment, length: int) -> Snapshot:
        if segment.broken:
            self.files = [s for s in self.files if s is not segment]
            raise SessionError("session file is damaged")
        return next(state for state in segment.data.states if state.length == length)


class Names:
    """Numbers for prefixes, the same prefix always the same number."""

    def __init__(self) -> None:
        self._numbers: dict[tuple[int, ...], int] = {}
        self._next = itertools.count(1)

    def __call__(self, tokens: Sequence[int]) -> int:
        key = tuple(tokens)
        if key not in self._numbers:
            self._numbers[key] = next(self._next)
        return self._numbers[key]

    def private(self) -> int:
        return -next(self._next)
