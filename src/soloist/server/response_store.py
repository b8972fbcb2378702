"""The bounded store behind `previous_response_id` and GET /v1/responses/{id}. It lives in memory only."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from soloist.server.chat_run import ChatRun


@dataclass
class Stored:
    """A finished response and the conversation it ended, instructions left out."""

    response: dict[str, Any]
    messages: list[dict[str, Any]]


@dataclass
class ResponseStore:
    """The latest `limit` stored responses whose texts and pictures stay within `characters`, and the ones still
    running."""

    limit: int = 256
    characters: int = 256 << 20
    held: int = 0
    finished: OrderedDict[str, Stored] = field(default_factory=OrderedDict)
    running: dict[str, ChatRun] = field(default_factory=dict)

    def put(self, stored: Stored) -> None:
        self.finished[stored.response["id"]] = stored
        self.held += _characters(stored.messages)
        while len(self.finished) > self.limit or (self.held > self.characters and self.finished):
            _, oldest = self.finished.popitem(last=False)
            self.held -= _characters(oldest.messages)

    def get(self, response_id: str) -> Stored | None:
        return self.finished.get(response_id)


def _characters(value: Any) -> int:
    """Length of all texts in a JSON value; a picture is one of them, as long as its base64."""
    if isinstance(value, str):
        return len(value)
    children = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return sum(_characters(child) for child in children)
