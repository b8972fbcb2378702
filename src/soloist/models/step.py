"""What one forward is asked to do: a list of flat rows that know their parent, and tables per request.

There is no uniform query length. Each running request contributes its own rows; a chain is a tree with
one branch. A prompt on the grid is the other kind of step: consecutive rows of one request.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch

from soloist.models.pictures import Seen, Sight
from soloist.ops.attention import AttentionRows
from soloist.ops.gated_delta import Level

GRID = 64


@dataclass(frozen=True)
class RequestRows:
    """One request's part of a verify step: the anchor, then its proposal's nodes.

    parents[i] indexes this list, -1 for the settled state (only the anchor, row 0, has it). `settled` tokens
    are in `pages` and in the state slot; the anchor's position is `settled`. RoPE turns a row by its position plus
    `rope_offset`, which is not zero behind pictures only.
    """

    tokens: Sequence[int]
    parents: Sequence[int]
    settled: int
    slot: int
    pages: Sequence[int]
    rope_offset: int = 0


@dataclass
class VerifyStep:
    """Rows of all running requests.

    tokens, positions, request, parent: int64 [T]; parent is a row of the step or -1. slots [R] state slots.
    taps int64 [T, K]: conv taps into [R * (K-1) stored columns | T rows]. depths [T]: a row's depth in its request's
    tree. attention: which rows are whose. rotary int64 [T]: what RoPE turns a row by, where that is not its position.

    What only the reference needs (`levels`, `level_of`, `page_rows`) is laid out when it is asked for.
    """

    tokens: torch.Tensor
    positions: torch.Tensor
    request: torch.Tensor
    parent: torch.Tensor
    slots: torch.Tensor
    taps: torch.Tensor
    depths: list[int]
    attention: list[AttentionRows]
    pages: list[Sequence[int]]
    rotary: torch.Tensor | None = None

    @property
    def rows(self) -> int:
        return self.tokens.numel()

    @cached_property
    def page_rows(self) -> list[torch.Tensor]:
        """Row numbers in the KV store of each request's settled tokens."""
        return [token_rows(pages, part.settled) for pages, part in zip(self.pages, self.attention, strict=True)]

    @property
    def levels(self) -> list[Level]:
        """The rows by depth, as the reference walks them."""
        return self._walk[0]

    @property
    def level_of(self) -> list[tuple[int, int]]:
        """(depth, place among the rows of that depth) of every row."""
        return self._walk[1]

    @cached_property
    def _walk(self) -> tuple[list[Level], list[tuple[int, int]]]:
        request, parent = self.request.tolist(), self.parent.tolist()
        levels: list[Level] = []
        level_of: list[tuple[int, int]] = [(0, 0)] * len(parent)
        for depth in range(max(self.depths) + 1):
            rows = [t for t, d in enumerate(self.depths) if d == depth]
            above = [request[t] if depth == 0 else level_of[parent[t]][1] for t in rows]
            for i, t in enumerate(rows):
                level_of[t] = (depth, i)
            levels.append(Level(torch.tensor(rows), torch.tensor(above), len(rows) == len(parent)))
        return levels, level_of


@dataclass
class PrefillStep:
    """Rows start .. start + T of one prompt, T a multiple of 64, the last `T - valid` of them padding.

    tokens int64 [T]; slot: the request's state slot; page_rows int64 [start + T]: where its tokens lie in the KV
    store, own rows included (padding lies in the last page too and is overwritten by whoever settles there).
    Prompts with pictures also have rotary int64 [3, T], and `seen` where a picture's rows are among these.
    """

    tokens: torch.Tensor
    positions: torch.Tensor
    start: int
    valid: int
    slot: int
    page_rows: torch.Tensor
    rotary: torch.Tensor | None = None
    seen: Seen | None = None

    def to(self, device: torch.device) -> PrefillStep:
        """The same step with its tables on a device."""
        moved = {name: getattr(self, name).to(device) for name in ("tokens", "positions", "page_rows")}
        if self.rotary is not None:
            moved["rotary"] = self.rotary.to(device)
        return replace(self, **moved)


@dataclass(frozen=True)
class Where:
    """Slot and absolute position of every row of a write, int64 [n] each; only formats with tiles look at it."""

    slots: torch.Tensor
    positions: torch.Tensor


def token_rows(pages: Sequence[int], tokens: int) -> torch.Tensor:
    """Row numbers in the KV store of the first `tokens` tokens of a request: page * 64 + lane, int64."""
    used = torch.tensor(pages[: -(-tokens // GRID)], dtype=torch.int64)
    return (used.unsqueeze(-1) * GRID + torch.arange(GRID)).flatten()[:tokens]


def _lanes(parents: Sequence[int], depth: Sequence[int]) -> torch.Tensor | None:
    """None for a chain, else [n, max depth + 1]: the row at each depth of every row's path, -1 past its end."""
    if all(p == i - 1 for i, p in enumerate(parents)):
        return None
    lanes: list[list[int]] = []
    for i, p in enumerate(parents):
        lanes.append([*lanes[p], i] if p >= 0 else [i])
    longest = max(depth) + 1
    return torch.tensor([path + [-1] * (longest - len(path)) for path in lanes])


def verify_step(batch: Sequence[RequestRows], conv_kernel: int) -> VerifyStep:
    """Lay out one verify step. `conv_kernel` K is the width of the short convolution."""
    history = conv_kernel - 1
    base = len(batch) * history
    tokens: list[int] = []
    positions: list[int] = []
    request: list[int] = []
    parent: list[int] = []
    taps: list[list[int]] = []
    depths: list[int] = []
    attention: list[AttentionRows] = []
    for r, part in enumerate(batch):
        start = len(tokens)
        local: list[int] = []
        for i, (token, p) in enumerate(zip(part.tokens, part.parents, strict=True)):
            depth = 0 if p < 0 else local[p] + 1
            local.append(depth)
            before = taps[start + p][1:] if p >= 0 else list(range(r * history, (r + 1) * history))
            taps.append([*before, base + start + i])
            tokens.append(token)
            positions.append(part.settled + depth)
            request.append(r)
            parent.append(start + p if p >= 0 else -1)
        depths += local
        attention.append(
            AttentionRows(start, len(tokens), part.settled, torch.tensor(local), _lanes(part.parents, local))
        )
    at = torch.tensor(positions)
    turned = any(part.rope_offset for part in batch)
    return VerifyStep(
        tokens=torch.tensor(tokens),
        positions=at,
        request=torch.tensor(request),
        parent=torch.tensor(parent),
        slots=torch.tensor([part.slot for part in batch]),
        taps=torch.tensor(taps),
        depths=depths,
        attention=attention,
        pages=[part.pages for part in batch],
        rotary=at + torch.tensor([batch[r].rope_offset for r in request]) if turned else None,
    )


def prefill_step(
    tokens: Sequence[int], start: int, slot: int, pages: Sequence[int], sight: Sight | None = None
) -> PrefillStep:
    """Lay out prompt rows from grid point `start`; pads the tail to the grid with token 0. `sight`: the prompt's
    pictures, if it has any."""
    if start % GRID:
        raise ValueError(f"prefill starts on the grid of {GRID}, not at {start}")
    valid = len(tokens)
    padded = -(-valid // GRID) * GRID
    ids = torch.zeros(padded, dtype=torch.int64)
    ids[:valid] = torch.tensor(tokens, dtype=torch.int64)
    return PrefillStep(
        tokens=ids,
        positions=torch.arange(start, start + padded),
        start=start,
        valid=valid,
        slot=slot,
        page_rows=token_rows(pages, start + padded),
        rotary=None if sight is None else sight.rotary(start, padded),
        seen=None if sight is None else sight.seen(start, valid),
    )
