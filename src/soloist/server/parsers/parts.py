"""What an answer is made of once it is parsed: reasoning, content and tool calls, as they grow."""

from __future__ import annotations

from dataclasses import dataclass, field

from soloist.server.tokenizer import Tokenizer

THINK_OPEN, THINK_CLOSE, CALL_OPEN, CALL_CLOSE = "<think>", "</think>", "<tool_call>", "</tool_call>"
MARKER_NAMES = {THINK_OPEN: "think", THINK_CLOSE: "/think", CALL_OPEN: "tool", CALL_CLOSE: "/tool"}
TURN_START, TURN_END = "<|im_start|>", "<|im_end|>"
THINK_MARKERS = ("think", "/think")


def marker_ids(tokenizer: Tokenizer) -> dict[int, str]:
    """Ids of the structural tokens a tokenizer has, with their marker names."""
    return {token: name for text, name in MARKER_NAMES.items() if (token := tokenizer.id_of(text)) is not None}


@dataclass(frozen=True)
class Reasoning:
    text: str


@dataclass(frozen=True)
class Content:
    text: str


@dataclass(frozen=True)
class CallStart:
    """A call whose name is known; `index` counts the calls of one answer from 0."""

    index: int
    name: str


@dataclass(frozen=True)
class CallArguments:
    """A fragment of the arguments' JSON text."""

    index: int
    text: str


@dataclass(frozen=True)
class CallEnd:
    """The call's arguments are complete JSON. `cut` when the generation ended before the call's closing tag."""

    index: int
    cut: bool = False


Part = Reasoning | Content | CallStart | CallArguments | CallEnd


@dataclass
class Call:
    name: str
    arguments: str = ""
    cut: bool = False


@dataclass
class Answer:
    """The fold of all parts: what a non-streaming reply shows."""

    reasoning: str = ""
    content: str = ""
    calls: list[Call] = field(default_factory=list)

    def add(self, part: Part) -> None:
        match part:
            case Reasoning(text):
                self.reasoning += text
            case Content(text):
                self.content += text
            case CallStart(_, name):
                self.calls.append(Call(name))
            case CallArguments(index, text):
                self.calls[index].arguments += text
            case CallEnd(index, cut):
                self.calls[index].cut = cut
