"""Pictures in a prompt: where their rows stand, how they turn, and what the vision tower puts there.

A picture takes `rows * columns` consecutive positions of the prompt, one per merged patch. Caches see these as
positions like any other; RoPE sees three axes (M-RoPE, spec/model.md section 4): rows of a picture share the
temporal axis and spread over height and width, and the text after it goes on behind the larger side. So past a
picture the rotary position is the position plus a constant that is zero or negative.

What can go wrong: a placeholder row computed with its token's embedding, or a decode row turned by its position.
Both give fluent text about nothing; tests/models/test_vision.py compares with transformers.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

# Rows of a step and what stands there instead of a token's embedding: int64 [n], [n, H].
Seen = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True, eq=False)
class Picture:
    """A picture resized for the tower.

    pixels   uint8 [height, width, 3], sides multiples of a merged patch
    rows     height and columns: width, in merged patches
    start    position of its first placeholder in the prompt
    digest   16 bytes that name the pixels and whatever turns them into rows
    """

    pixels: torch.Tensor
    rows: int
    columns: int
    start: int
    digest: bytes

    @property
    def tokens(self) -> int:
        return self.rows * self.columns

    @property
    def end(self) -> int:
        return self.start + self.tokens


def rope_offset(pictures: Sequence[Picture]) -> int:
    """Rotary position minus position of everything after these pictures."""
    return sum(max(p.rows, p.columns) - p.tokens for p in pictures)


def rotary_table(length: int, pictures: Sequence[Picture]) -> torch.Tensor:
    """Rotary positions (temporal, height, width) of positions 0 .. length - 1: int64 [3, length]."""
    parts: list[torch.Tensor] = []
    at = turn = 0
    for p in pictures:
        parts.append(torch.arange(turn, turn + p.start - at).expand(3, -1))
        turn += p.start - at
        height = torch.arange(p.rows).repeat_interleave(p.columns)
        width = torch.arange(p.columns).repeat(p.rows)
        parts.append(torch.stack([torch.zeros_like(height), height, width]) + turn)
        turn += max(p.rows, p.columns)
        at = p.end
    parts.append(torch.arange(turn, turn + max(0, length - at)).expand(3, -1))
    return torch.cat(parts, 1)[:, :length]


def cache_keys(tokens: Sequence[int], pictures: Sequence[Picture]) -> list[int]:
    """The prompt as the prefix cache compares it: placeholders carry words of their picture's digest.

    Words are negative, so none is a token id; two alternate, so that a picture counts with both.
    """
    keys = list(tokens)
    for p in pictures:
        words = [-1 - (word & (2**63 - 1)) for word in struct.unpack("<2q", p.digest)]
        keys[p.start : p.end] = (words * (p.tokens // 2 + 1))[: p.tokens]
    return keys


class Sight:
    """One request's pictures as its forwards need them. `encode` runs the tower: a picture -> [tokens, H].

    Rows of the tower are computed when first asked for and kept until `release`.
    """

    def __init__(self, pictures: Sequence[Picture], encode: Callable[[Picture], torch.Tensor]) -> None:
        self.pictures = tuple(pictures)
        self.offset = rope_offset(pictures)
        self._encode = encode
        self._end = self.pictures[-1].end
        self._table = rotary_table(self._end, self.pictures)
        self._rows: dict[int, torch.Tensor] = {}

    def rotary(self, first: int, count: int) -> torch.Tensor:
        """Rotary positions of `count` positions from `first`, int64 [3, count]."""
        known = self._table[:, first : first + count]
        after = torch.arange(max(first, self._end), max(first + count, self._end)) + self.offset
        return torch.cat([known, after.expand(3, -1)], 1)

    def look(self, first: int, count: int) -> None:
        """Run the tower for the pictures among these positions, so that `seen` costs nothing."""
        for i, p in enumerate(self.pictures):
            if p.start < first + count and p.end > first and i not in self._rows:
                self._rows[i] = self._encode(p)

    def seen(self, first: int, count: int) -> Seen | None:
        """Which of `count` rows from position `first` on are a picture's, and the tower's rows for them."""
        self.look(first, count)
        rows: list[torch.Tensor] = []
        values: list[torch.Tensor] = []
        for i, p in enumerate(self.pictures):
            begin, end = max(p.start, first), min(p.end, first + count)
            if begin < end:
                rows.append(torch.arange(begin - first, end - first))
                values.append(self._rows[i][begin - p.start : end - p.start])
        if not rows:
            return None
        return torch.cat(rows).to(values[0].device), torch.cat(values)

    def release(self) -> None:
        """Forget the tower's rows; they are computed again if they are asked for."""
        self._rows.clear()


def seen_by(spans: Sequence[tuple[Sight | None, int, int]]) -> tuple[torch.Tensor, Seen | None]:
    """Rows of several requests side by side, spans (sight, first position, count): rotary [3, T] and what they see."""
    turned: list[torch.Tensor] = []
    rows: list[torch.Tensor] = []
    values: list[torch.Tensor] = []
    at = 0
    for sight, first, count in spans:
        if sight is None:
            turned.append(torch.arange(first, first + count).expand(3, -1))
        else:
            turned.append(sight.rotary(first, count))
            found = sight.seen(first, count)
            if found is not None:
                rows.append(found[0] + at)
                values.append(found[1])
        at += count
    return torch.cat(turned, 1), (torch.cat(rows), torch.cat(values)) if rows else None
