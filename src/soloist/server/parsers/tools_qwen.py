"""Tool calls in the XML form of the Qwen family, read as they grow.

    <tool_call>
    <function=NAME>
    <parameter=KEY>
    VALUE
    </parameter>
    </function>
    </tool_call>

`<tool_call>` and `</tool_call>` are tokens and come as markers; the rest is text and may be cut anywhere. A
`<function=` without the outer tag also starts a call. A value ends at `</parameter>` or, where that is missing, at the
next `<parameter=`, `</function>` or `</tool_call>`; one line break on either side is not part of it. What turns out
not to be a call before its name is complete is content, tags included. White space before, between and after calls is
nobody's.

String values are sent as they grow, others when they are complete, since the schema may change them. Whatever happens,
the fragments of a call join to valid JSON.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import Enum, auto
from typing import Any

from soloist.server.parsers.parts import THINK_MARKERS, CallArguments, CallEnd, CallStart, Content, Part
from soloist.server.parsers.schema_types import Types, dumps
from soloist.server.text import Piece

_FUNCTION, _PARAMETER = "<function=", "<parameter="
_END_PARAMETER, _END_FUNCTION = "</parameter>", "</function>"
_VALUE_ENDS = (_END_PARAMETER, _PARAMETER, _END_FUNCTION)
_BETWEEN = (_PARAMETER, _END_FUNCTION, _FUNCTION)
MAX_NAME = 256


class _State(Enum):
    CONTENT = auto()  # text, watching for a call
    OPENED = auto()  # after <tool_call>, before <function=
    NAME = auto()  # after <function=, before >
    BETWEEN = auto()  # inside the function, outside parameters
    KEY = auto()  # after <parameter=, before >
    VALUE = auto()  # inside a parameter


class ToolParser:
    """Pieces in, parts out; any cut of the input gives the same fold. `tools` are in OpenAI's nested form."""

    def __init__(self, tools: Sequence[Mapping[str, Any]]) -> None:
        self._schemas = {t["function"]["name"]: t["function"].get("parameters") for t in tools}
        self._state = _State.CONTENT
        self._buffer = ""  # text not yet understood
        self._raw = ""  # what to give back as content if the call turns out to be none
        self._blank = ""  # white space that is content only if more content follows
        self._calls = 0
        self._types = Types(None)
        self._schema: Any = {}
        self._arguments = 0  # parameters written so far
        self._head = ""  # what goes before the open parameter's value
        self._streaming = False  # the open value is a string that is being sent
        self._value_started = False
        self._fresh = False  # right after a call: white space is nobody's
        self._owed = False  # the last call's `</tool_call>` is still to come

    def push(self, piece: Piece) -> list[Part]:
        out: list[Part] = []
        if piece.marker is None or (piece.marker != "/tool" and self._state in (_State.VALUE, _State.KEY)):
            self._buffer += piece.text
            self._run(out)
        else:
            self._settle(out)
            self._marker(piece, out)
        return out

    def finish(self) -> list[Part]:
        """The generation ended: give back what is no call, close what is one."""
        out: list[Part] = []
        self._settle(out)
        if self._state in (_State.OPENED, _State.NAME):
            self._give_back(out)
        elif self._state is not _State.CONTENT:
            self._close_call(out, cut=True)
        if self._blank and not self._fresh:
            out.append(Content(self._blank))
        return out

    # -- markers ---------------------------------------------------------------------------------------------------

    def _marker(self, piece: Piece, out: list[Part]) -> None:
        if self._state in (_State.OPENED, _State.NAME):
            self._give_back(out)
        if piece.marker in THINK_MARKERS:
            return
        if piece.marker == "tool":
            if self._state is _State.BETWEEN:
                self._close_call(out)
            self._raw, self._state = piece.text, _State.OPENED
        elif self._state is not _State.CONTENT:
            self._close_call(out)
        elif not self._owed:
            self._content(piece.text, out)
        self._owed = False

    # -- text ------------------------------------------------------------------------------------------------------

    def _run(self, out: list[Part]) -> None:
        while self._advance(out):
            pass

    def _advance(self, out: list[Part]) -> bool:
        """Understand one element of the buffer; False when more text is needed."""
        match self._state:
            case _State.CONTENT:
                return self._in_content(out)
            case _State.OPENED:
                return self._in_opened(out)
            case _State.NAME:
                return self._in_name(out)
            case _State.BETWEEN:
                return self._in_between(out)
            case _State.KEY:
                return self._in_key(out)
            case _State.VALUE:
                return self._in_value(out)

    def _in_content(self, out: list[Part]) -> bool:
        at = self._buffer.find(_FUNCTION)
        if at >= 0:
            self._content(self._buffer[:at], out)
            self._buffer = self._buffer[at + len(_FUNCTION) :]
            self._raw, self._state = _FUNCTION, _State.NAME
            return True
        keep = _partial(self._buffer, (_FUNCTION,))
        text, self._buffer = _split(self._buffer, keep)
        self._content(text, out)
        return False

    def _in_opened(self, out: list[Part]) -> bool:
        text = self._buffer.lstrip()
        if text.startswith(_FUNCTION):
            self._raw += self._buffer[: len(self._buffer) - len(text)] + _FUNCTION
            self._buffer = text[len(_FUNCTION) :]
            self._state = _State.NAME
            return True
        if _FUNCTION.startswith(text):
            return False
        self._give_back(out)
        return True

    def _in_name(self, out: list[Part]) -> bool:
        name, closed, rest = self._buffer.partition(">")
        if "\n" in name or "<" in name or len(name) > MAX_NAME or (closed and not name.strip()):
            self._give_back(out)
            return True
        if not closed:
            return False
        self._buffer, self._state = rest, _State.BETWEEN
        self._types, self._arguments = Types(self._schemas.get(name.strip())), 0
        self._blank = ""
        out.append(CallStart(self._calls, name.strip()))
        self._calls += 1
        return True

    def _in_between(self, out: list[Part]) -> bool:
        at, tag = _first(self._buffer, _BETWEEN)
        if not tag:
            self._buffer = _split(self._buffer, _partial(self._buffer, _BETWEEN))[1]
            return False
        self._buffer = self._buffer[at + len(tag) :]
        if tag == _PARAMETER:
            self._state = _State.KEY
            return True
        self._close_call(out)
        self._owed = True
        if tag == _FUNCTION:
            self._raw, self._state = _FUNCTION, _State.NAME
        return True

    def _in_key(self, out: list[Part]) -> bool:
        key, closed, rest = self._buffer.partition(">")
        if not closed:
            return False
        self._buffer, self._state = rest, _State.VALUE
        key = key.strip()
        self._schema = self._types.of_parameter(key)
        self._streaming = self._types.streams(self._schema)
        self._value_started = False
        head = ("{" if not self._arguments else ", ") + dumps(key) + ": "
        self._arguments += 1
        self._head = head + ('"' if self._streaming else "")
        if self._streaming:
            self._send(self._head, out)
        return True

    def _in_value(self, out: list[Part]) -> bool:
        if not self._value_started:
            if not self._buffer:
                return False
            self._buffer = self._buffer.removeprefix("\n")
            self._value_started = True
        at, tag = _first(self._buffer, _VALUE_ENDS)
        if tag:
            value, self._buffer = self._buffer[:at], self._buffer[at:]
            if tag == _END_PARAMETER:
                self._buffer = self._buffer[len(tag) :]
            self._end_value(value.removesuffix("\n"), out)
            self._state = _State.BETWEEN
            return True
        if self._streaming:
            # A line break may turn out to be the one before the closing tag: it waits with what follows it.
            keep = _partial(self._buffer, tuple("\n" + end for end in _VALUE_ENDS) + _VALUE_ENDS)
            text, self._buffer = _split(self._buffer, keep)
            if text:
                self._send(dumps(text)[1:-1], out)
        return False

    # -- endings ---------------------------------------------------------------------------------------------------

    def _settle(self, out: list[Part]) -> None:
        """The text run is over: what was held for a tag that did not come is what it looks like."""
        rest, self._buffer = self._buffer, ""
        match self._state:
            case _State.CONTENT:
                self._content(rest, out)
            case _State.OPENED | _State.NAME:
                self._raw += rest
            case _State.VALUE:
                if not self._value_started:
                    rest = rest.removeprefix("\n")
                self._end_value(rest.removesuffix("\n"), out)
                self._state = _State.BETWEEN
            case _State.KEY:
                self._state = _State.BETWEEN

    def _end_value(self, text: str, out: list[Part]) -> None:
        if self._streaming:
            self._send(dumps(text)[1:-1] + '"', out)
        else:
            self._send(self._head + dumps(self._types.coerce(text, self._schema)), out)

    def _close_call(self, out: list[Part], cut: bool = False) -> None:
        self._send("}" if self._arguments else "{}", out)
        out.append(CallEnd(self._calls - 1, cut))
        self._state, self._fresh = _State.CONTENT, True

    def _give_back(self, out: list[Part]) -> None:
        raw, self._raw, self._state = self._raw, "", _State.CONTENT
        self._content(raw, out)

    def _send(self, text: str, out: list[Part]) -> None:
        if text:
            out.append(CallArguments(self._calls - 1, text))

    def _content(self, text: str, out: list[Part]) -> None:
        """Content, but for white space at its end, which waits for more; after a call also at its beginning."""
        text = self._blank + text
        body = text.rstrip()
        self._blank = text[len(body) :]
        if body:
            out.append(Content(body.lstrip() if self._fresh else body))
            self._fresh = False


def _split(text: str, keep: int) -> tuple[str, str]:
    return text[: len(text) - keep], text[len(text) - keep :]


def _first(text: str, tags: Sequence[str]) -> tuple[int, str]:
    """Position and tag of the earliest of `tags` in the text; (-1, "") when there is none."""
    found = [(at, tag) for tag in tags if (at := text.find(tag)) >= 0]
    return min(found) if found else (-1, "")


def _partial(text: str, tags: Sequence[str]) -> int:
    """Length of the longest end of the text that is a proper beginning of a tag."""
    longest = min(len(text), max(map(len, tags)) - 1)
    return next((n for n in range(longest, 0, -1) if any(tag.startswith(text[-n:]) for tag in tags)), 0)
