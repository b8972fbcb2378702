"""Drafting from the request's own text: what followed the last time its newest tokens occurred?

The history is prompt + output of one request, ending with the anchor. A candidate end `e` matches with the length
of the common suffix of `s[0..e]` and `s[0..t]`, capped at `nmax`; at least `nmin` is needed. The longest capped match
wins, the most recent among equals, and what followed it is proposed.

The index is a trie of n-grams stored flat: one dict from the bytes of an n-gram to the position of its latest end.
A depth beyond `nmin` is entered only where the shallower n-gram has repeated (a unique n-gram has only unique
extensions), so text that never repeats costs one entry per token and a push is O(nmax - nmin) at worst, without a scan
and without hash collisions to verify.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from dataclasses import dataclass

from soloist.errors import SettingError

WIDTH = 4  # bytes of a stored token id


@dataclass(frozen=True)
class LookupConfig:
    """The knobs of lookup drafting; lengths are tokens.

    nmin       shortest match
    nmax       cap of the match length: among matches at least this long the most recent wins
    nstrong    match length trusted on its own to replace the drafter's head tokens
    agree      below `nstrong`: leading positions where drafter and match must agree first (0 = none needed)
    nmin_tail  match length needed for positions beyond the drafter's block
    longmin    match length that counts as "fills the long block" for the block-length controller
    search     only matches ending in the last `search` tokens; 0 = the whole history
    extend     copy on through the end of the history from the proposals themselves (periodic text)
    """

    nmin: int = 6
    nmax: int = 12
    nstrong: int = 6
    agree: int = 0
    nmin_tail: int = 4
    longmin: int = 6
    search: int = 0
    extend: bool = True

    def __post_init__(self) -> None:
        if self.nmin < 1 or self.nmax < self.nmin:
            raise SettingError(
                f"Lookup matches of {self.nmin} to {self.nmax} tokens are impossible.", "Set 1 <= NMIN <= NMAX."
            )
        for name in ("nstrong", "agree", "nmin_tail", "longmin", "search"):
            if getattr(self, name) < 0:
                raise SettingError(f"Lookup {name.upper()} is {getattr(self, name)}.", "Set it to 0 or more.")


@dataclass(frozen=True)
class Match:
    """What followed an earlier occurrence of the newest tokens: it ended at `end` and agrees over `length`, capped."""

    tokens: tuple[int, ...]
    length: int
    end: int


class LookupIndex:
    """History and n-gram index of one request. Push every committed token, then ask for a `match`."""

    def __init__(self, config: LookupConfig, tokens: Iterable[int] = ()) -> None:
        self.config = config
        self._tokens = array("i")
        self._ends: dict[bytes, int] = {}
        # _found[i]: latest earlier end that shares the newest nmin + i tokens
        self._found: list[int] = []
        self.extend(tokens)

    def __len__(self) -> int:
        return len(self._tokens)

    def extend(self, tokens: Iterable[int]) -> None:
        """Append committed tokens, oldest first."""
        for token in tokens:
            self.push(token)

    def push(self, token: int) -> None:
        """Append one committed token and find its matches."""
        s, ends, found = self._tokens, self._ends, []
        s.append(token)
        size = len(s)
        newest = size - 1
        n = self.config.nmin
        last = min(self.config.nmax, size)
        while n <= last:
            key = s[size - n :].tobytes()
            before = ends.get(key)
            ends[key] = newest
            if before is None:
                break
            found.append(before)
            n += 1
            # The earlier occurrence was entered to depth n - 1 only: give it depth n before looking there.
            start = before - n + 1
            if n <= last and start >= 0:
                ends[s[start : before + 1].tobytes()] = before
        self._found = found

    def matches(self) -> list[tuple[int, int]]:
        """(capped length, end) of every distinct match end at hand, best first."""
        size = len(self._tokens)
        if size < self.config.nmin + 2:
            return []
        oldest = size - self.config.search if self.config.search else 0
        out: list[tuple[int, int]] = []
        for depth in range(len(self._found) - 1, -1, -1):
            end = self._found[depth]
            if end >= oldest and (not out or out[-1][1] != end):
                out.append((self.config.nmin + depth, end))
        return out

    def match(self, count: int) -> Match | None:
        """The best match and up to `count` tokens that follow it, or None."""
        found = self.matches()
        return self.follow(*found[0], count) if found else None

    def follow(self, length: int, end: int, count: int) -> Match:
        """What follows the match `(length, end)`: at most `count` tokens, fewer without `extend`."""
        s = self._tokens
        tokens = s[end + 1 : end + 1 + count].tolist()
        if self.config.extend:
            period = len(s) - 1 - end
            while len(tokens) < count:
                tokens += tokens[-period:][: count - len(tokens)]
        return Match(tuple(tokens), length, end)
