"""From token ids to text that may be shown: whole characters, stop strings cut, possible stops held back.

The same class runs twice per request: on the engine's thread as the `halt` that ends generation, and on the
event loop to produce the text. Both see tokens one by one, so they agree for any number of tokens a step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from soloist.server.tokenizer import StreamDecoder, Tokenizer


@dataclass(frozen=True)
class Piece:
    """A run of text. `marker` names the structural token it came from (`think`, `/think`, `tool`, `/tool`)."""

    text: str
    marker: str | None = None


class TextStream:
    """Decode tokens, drop control tokens, end at a stop string.

    stops         cut before the first of these (after it with `include_stop`); they match across tokens and on
                  the text of structural tokens too, since they apply to the text as generated
    markers       token id -> marker name; such tokens come out as a Piece of their own
    min_tokens    a match must end after this many tokens
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        stops: Sequence[str] = (),
        include_stop: bool = False,
        skip_special: bool = True,
        markers: Mapping[int, str] | None = None,
        min_tokens: int = 0,
    ) -> None:
        self._tokenizer = tokenizer
        self._decoder = StreamDecoder(tokenizer)
        self._stops = tuple(stops)
        self._include = include_stop
        self._skip = tokenizer.special_ids if skip_special else frozenset()
        self._markers = markers or {}
        self._min_tokens = min_tokens
        self._pending: list[Piece] = []
        self._tail = ""  # the text of `_pending`: generated, not yet released
        self._count = 0
        self.matched: str | None = None

    def push(self, token: int) -> list[Piece]:
        """Take one token; return what can be shown now. After a match nothing more comes out."""
        if self.matched is not None:
            return []
        self._count += 1
        marker = self._markers.get(token)
        if marker is not None:
            self._append(Piece(self._decoder.flush()))
            self._append(Piece(self._tokenizer.token_text(token), marker))
        elif token not in self._skip:
            self._append(Piece(self._decoder.push(token)))
        return self._release()

    def finish(self) -> list[Piece]:
        """No more tokens: a character cut in the middle shows as U+FFFD, everything held back comes out."""
        if self.matched is not None:
            return []
        self._append(Piece(self._decoder.flush()))
        return self._take(len(self._tail))

    def _append(self, piece: Piece) -> None:
        if piece.text or piece.marker:
            self._pending.append(piece)
            self._tail += piece.text

    def _release(self) -> list[Piece]:
        if not self._stops:
            return self._take(len(self._tail))
        if self._count > self._min_tokens:
            hits = [(at, stop) for stop in self._stops if (at := self._tail.find(stop)) >= 0]
            if hits:
                at, self.matched = min(hits, key=lambda hit: hit[0])
                return self._take(at + len(self.matched) if self._include else at)
        return self._take(len(self._tail) - self._held())

    def _held(self) -> int:
        """Length of the longest end of the tail that is a proper beginning of some stop string."""
        tail = self._tail
        for n in range(min(len(tail), max(map(len, self._stops)) - 1), 0, -1):
            end = tail[-n:]
            if any(len(stop) > n and stop.startswith(end) for stop in self._stops):
                return n
        return 0

    def _take(self, length: int) -> list[Piece]:
        """Release the first `length` characters; a marker comes out whole or not at all."""
        out: list[Piece] = []
        left = length
        while self._pending:
            piece = self._pending[0]
            if len(piece.text) <= left:
                out.append(self._pending.pop(0))
                left -= len(piece.text)
                continue
            if piece.marker is None and left:
                out.append(Piece(piece.text[:left]))
                self._pending[0] = Piece(piece.text[left:])
                left = 0
            break
        self._tail = "".join(piece.text for piece in self._pending)
        return out


class StopHalt:
    """`engine.request.Halt` by stop strings, over a TextStream of its own."""

    def __init__(self, stream: TextStream) -> None:
        self._stream = stream

    def push(self, token: int) -> str | None:
        self._stream.push(token)
        return self._stream.matched
