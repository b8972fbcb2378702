"""Where thinking ends and the answer begins.

Generation starts inside the think block when the prompt left one open. The block ends at `</think>`, or at a
tool call (models of this family sometimes call without closing it). Line breaks next to the closing tag belong to
neither side, so that the history renders to the same prompt whether or not it went through a client.
"""

from __future__ import annotations

from dataclasses import dataclass

from soloist.server.text import Piece


@dataclass(frozen=True)
class Thought:
    """A run of reasoning text."""

    text: str


class ReasoningSplitter:
    """Pieces in, `Thought`s and content Pieces out; any cut of the input into pieces gives the same text.

    opened      the prompt left a think block open
    call_ends   a `<tool_call>` inside the block ends it (when calls are parsed at all)
    reopen      a `<think>` at the start of the answer opens a block; with thinking switched off it does not,
                everything is content then
    """

    def __init__(self, opened: bool, call_ends: bool = True, reopen: bool = True) -> None:
        self.inside = opened
        self._call_ends = call_ends
        self._reopen = reopen
        self._held = ""  # line breaks at the end of the reasoning so far
        self._after_tag = False  # dropping the line breaks that follow `<think>` or `</think>`
        self._content_seen = False

    def push(self, piece: Piece) -> list[Thought | Piece]:
        if self.inside:
            return self._reasoning(piece)
        if piece.marker == "think" and self._reopen and not self._content_seen:
            self.inside, self._after_tag = True, True
            return []
        text = piece.text
        if self._after_tag and piece.marker is None:
            text = text.lstrip("\n")
            if not text:
                return []
        self._after_tag = False
        self._content_seen = self._content_seen or piece.marker is not None or not text.isspace()
        return [Piece(text, piece.marker)]

    def finish(self) -> list[Thought | Piece]:
        """The generation ended: held line breaks of an unfinished thought come out."""
        held, self._held = self._held, ""
        return [Thought(held)] if held and self.inside else []

    def _reasoning(self, piece: Piece) -> list[Thought | Piece]:
        if piece.marker == "/think":
            self.inside, self._held, self._after_tag = False, "", True
            return []
        if piece.marker == "tool" and self._call_ends:
            self.inside, self._held, self._content_seen = False, "", True
            return [piece]
        if piece.marker == "think":  # the model repeats the tag that the prompt already opened
            self._after_tag = True
            return []
        fresh = piece.text.lstrip("\n") if self._after_tag else piece.text
        self._after_tag = self._after_tag and not fresh
        text = self._held + fresh
        body = text.rstrip("\n")
        self._held = text[len(body) :]
        return [Thought(body)] if body else []
