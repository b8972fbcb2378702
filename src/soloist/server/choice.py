"""One sequence of a chat reply: events in, parts out."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

from soloist.engine.request import Event
from soloist.server.logprobs import TokenNames, chat_entry
from soloist.server.parsers.parts import (
    THINK_MARKERS,
    Answer,
    CallArguments,
    CallEnd,
    CallStart,
    Content,
    Part,
    Reasoning,
)
from soloist.server.parsers.reasoning import ReasoningSplitter, Thought
from soloist.server.text import Piece, TextStream


class ContentParser(Protocol):
    """What turns content pieces into content and calls."""

    def push(self, piece: Piece) -> list[Part]: ...

    def finish(self) -> list[Part]: ...


class PlainContent:
    """No calls are parsed: every piece is content, but for stray think tags, which are dropped."""

    def push(self, piece: Piece) -> list[Part]:
        return [Content(piece.text)] if piece.text and piece.marker not in THINK_MARKERS else []

    def finish(self) -> list[Part]:
        return []


@dataclass(frozen=True)
class Finish:
    """`reason` as the engine gave it; `stop` is the matched string or the stop id that is not an EOS."""

    reason: str
    stop: str | int | None = None


@dataclass
class Update:
    """What one event added to one choice."""

    index: int
    parts: list[Part] = field(default_factory=list)
    logprobs: list[dict[str, Any]] = field(default_factory=list)
    tokens: tuple[int, ...] = ()
    finish: Finish | None = None


@dataclass
class ChoiceRules:
    """How a choice is read: see the parsers for each."""

    thinking_open: bool
    reopen: bool = True
    parse_calls: bool = False
    parallel: bool = True
    include_reasoning: bool = True
    budget: int | None = None
    logprobs: bool = False
    show_stop_id: bool = False


class Choice:
    """Stateful reader of one sequence. `answer` is the fold of everything returned so far."""

    def __init__(
        self,
        index: int,
        rules: ChoiceRules,
        text: TextStream,
        content: ContentParser,
        markers: dict[int, str],
        names: TokenNames,
    ) -> None:
        self.index = index
        self.answer = Answer()
        self.tokens: list[int] = []
        self.logprobs: list[dict[str, Any]] = []
        self.reasoning_tokens = 0
        self.finish: Finish | None = None
        self._rules = rules
        self._text = text
        self._splitter = ReasoningSplitter(rules.thinking_open, rules.parse_calls, rules.reopen)
        self._content = content
        self._markers = markers
        self._names = names
        self._thinking = rules.thinking_open

    def take(self, event: Event) -> Update:
        """Read one event; its parts are in order."""
        update = Update(self.index, tokens=event.tokens)
        self.tokens.extend(event.tokens)
        shown = event.tokens
        if event.finish_reason == "stop" and not isinstance(event.stop_reason, str) and not self._rules.show_stop_id:
            shown = shown[:-1]  # the stop id ends the text, it is not part of it
        for token in shown:
            self._count(token)
            self._parse(self._text.push(token), update.parts)
        if event.logprobs is not None and self._rules.logprobs:
            update.logprobs = [chat_entry(item, self._names) for item in event.logprobs]
            self.logprobs.extend(update.logprobs)
        if event.finish_reason is not None:
            self._parse(self._text.finish(), update.parts)
            for item in self._splitter.finish():
                self._route(item, update.parts)
            update.parts.extend(self._content.finish())
            self.finish = update.finish = Finish(event.finish_reason, event.stop_reason)
        update.parts = [part for part in update.parts if self._wanted(part)]
        for part in update.parts:
            self.answer.add(part)
        return update

    @property
    def has_calls(self) -> bool:
        return bool(self.answer.calls)

    @property
    def call_cut(self) -> bool:
        return bool(self.answer.calls) and self.answer.calls[-1].cut

    def _parse(self, pieces: list[Piece], out: list[Part]) -> None:
        for piece in pieces:
            for item in self._splitter.push(piece):
                self._route(item, out)

    def _route(self, item: Thought | Piece, out: list[Part]) -> None:
        if isinstance(item, Thought):
            out.append(Reasoning(item.text))
        else:
            out.extend(self._content.push(item))

    def _wanted(self, part: Part) -> bool:
        if isinstance(part, Reasoning):
            return self._rules.include_reasoning
        if isinstance(part, CallStart | CallArguments | CallEnd):
            return self._rules.parallel or part.index == 0
        return True

    def _count(self, token: int) -> None:
        """Reasoning tokens are those inside the block; neither its tags nor what a spent budget forced."""
        if not self._thinking:
            return
        marker = self._markers.get(token)
        if marker == "/think" or (marker == "tool" and self._rules.parse_calls):
            self._thinking = False
        elif marker != "think" and self.reasoning_tokens != self._rules.budget:
            self.reasoning_tokens += 1
