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
    """The latest `limit` stored responses, and the ones still running."""

    limit: int = 256
    finished: OrderedDict[str, Stored] = field(default_factory=OrderedDict)
    running: dict[str, ChatRun] = field(default_factory=dict)

    def put(self, stored: Stored) -> None:
        self.finished[stored.response["id"]] = stored
        while len(self.finished) > self.limit:
            self.finished.popitem(last=False)

    def get(self, response_id: str) -> Stored | None:
        return self.finished.get(response_id)
