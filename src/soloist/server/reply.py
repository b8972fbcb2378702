"""JSON replies, and which error shape a path's clients expect."""

from __future__ import annotations

from typing import Any

from pydantic_core import to_json
from starlette.responses import Response

from soloist.server.errors import Failure


class JsonReply(Response):
    """Compact UTF-8 JSON with non-ASCII unescaped."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return to_json(content, inf_nan_mode="null")


def json_response(failure: Failure, path: str) -> Response:
    """An error reply in the shape of the protocol that owns `path`."""
    body = failure.anthropic() if path.startswith("/v1/messages") else failure.openai()
    return JsonReply(body, status_code=failure.status, headers=failure.headers)
