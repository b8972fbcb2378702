"""What a forward reads and leaves behind: the caches it is handed, and the record that settles later.

A verify step changes no cache. Its record holds the rows' keys and values, the convolution inputs and the
recurrent states along the tree; its `settle` moves the accepted paths into the caches, and what was rejected
was never there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch

from soloist.models.step import VerifyStep, Where, token_rows
from soloist.ops.stored_rows import StoredRows
from soloist.ops.top import Heads

Planes = dict[str, torch.Tensor]


class KV(Protocol):
    """Paged keys and values (cache/kv.py; cache/tiles.py where `tile` is more than a page)."""

    tile: int
    planes: dict[str, torch.Tensor]

    def write(
        self, layer: int, index: torch.Tensor, k: torch.Tensor, v: torch.Tensor, where: Where | None = None
    ) -> None: ...

    def read_rows(self, layer: int, index: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]: ...

    def roundtrip(self, layer: int, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]: ...

    def stored(self, layer: int | None, planes: Planes | None = None) -> tuple[StoredRows, StoredRows]: ...

    def row_planes(self, rows: int) -> Planes: ...


class State(Protocol):
    """Recurrent slots (cache/recurrent.py): per layer, and all layers as one tensor."""

    states: list[torch.Tensor]
    conv: list[torch.Tensor]
    all_states: torch.Tensor
    all_conv: torch.Tensor
    state_dtype: torch.dtype


@dataclass
class Caches:
    kv: KV
    state: State


@dataclass(frozen=True)
class AcceptedPath:
    """Rows of the step (global indices, anchor first) that one request keeps, and where their KV goes."""

    request: int
    rows: Sequence[int]
    pages: Sequence[int]
    settled: int


class Settling(Protocol):
    """What a verify step leaves behind, good until the next step."""

    def settle(self, step: VerifyStep, caches: Caches, paths: Sequence[AcceptedPath]) -> None:
        """Move the accepted paths into the caches: KV compacted to consecutive positions, state and conv columns of
        the last accepted row into the request's slot. Requests not listed keep nothing of the step."""


@dataclass
class Record:
    """Per layer of each kind, in layer order. kv: (k, v) [T, kv, D] as projected; conv_rows [R*(K-1) + T, C];
    states[layer][level] [n, Hv, dk, dv]: the recurrent state after each row, level by level."""

    kv: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)
    conv_rows: list[torch.Tensor] = field(default_factory=list)
    states: list[list[torch.Tensor]] = field(default_factory=list)

    def settle(self, step: VerifyStep, caches: Caches, paths: Sequence[AcceptedPath]) -> None:
        """See `Settling`."""
        paths = [p for p in paths if p.rows]
        if not paths:
            return
        rows = torch.tensor([row for p in paths for row in p.rows])
        index = torch.cat([token_rows(p.pages, p.settled + len(p.rows))[p.settled :] for p in paths])
        where = Where(step.slots[step.request[rows]], step.positions[rows])
        for layer, (k, v) in enumerate(self.kv):
            caches.kv.write(layer, index, k.index_select(0, rows), v.index_select(0, rows), where)
        last = torch.tensor([p.rows[-1] for p in paths])
        slots = step.slots[torch.tensor([p.request for p in paths])]
        columns = step.taps.index_select(0, last)[:, 1:].flatten()
        for layer, conv in enumerate(self.conv_rows):
            kept = conv.index_select(0, columns).view(len(paths), -1, conv.shape[1])
            caches.state.conv[layer].index_copy_(0, slots, kept)
        by_level: dict[int, list[tuple[int, int]]] = {}
        for p in paths:
            level, i = step.level_of[p.rows[-1]]
            by_level.setdefault(level, []).append((i, int(step.slots[p.request])))
        for level, ends in by_level.items():
            inside = torch.tensor([i for i, _ in ends])
            into = torch.tensor([slot for _, slot in ends])
            for layer, after in enumerate(self.states):
                state = after[level]
                chosen = state if len(ends) == state.shape[0] == 1 else state.index_select(0, inside)
                caches.state.states[layer].index_copy_(0, into, chosen.to(caches.state.state_dtype))


@dataclass
class Features:
    """hidden [T, H]: after the final norm; taps [T, n * H]: residual streams after the tapped layers, or None.

    A card also gives: `logits` [T, V], computed along with the rest; `heads`, which waits for the step and returns the
    best entries of its rows; `gather`, which returns hidden and taps of some rows, good until the next step's.
    """

    hidden: torch.Tensor
    taps: torch.Tensor | None
    record: Settling | None
    logits: torch.Tensor | None = None
    heads: Callable[[], Heads] | None = None
    gather: Callable[[Sequence[int]], tuple[torch.Tensor, torch.Tensor | None]] | None = None

    def kept(self, rows: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Hidden and taps of these rows."""
        if self.gather is not None:
            return self.gather(rows)
        index = torch.tensor(rows, device=self.hidden.device)
        return self.hidden.index_select(0, index), None if self.taps is None else self.taps.index_select(0, index)
