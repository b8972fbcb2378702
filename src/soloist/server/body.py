"""Request bodies: bounded in size and depth, strict JSON, text that can be encoded."""

from __future__ import annotations

import json
import re
from typing import Any

from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from soloist.errors import RequestError
from soloist.server.errors import failure_of
from soloist.server.reply import json_response

MAX_DEPTH = 128
_SURROGATE_ESCAPE = re.compile(rb"\\u[dD][89abAB]|\\u[dD][c-fC-F]")
_SURROGATE = re.compile("[\ud800-\udfff]")


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def parse_json(raw: bytes) -> dict[str, Any]:
    """A JSON object of at most MAX_DEPTH levels. Unpaired surrogate escapes become U+FFFD. Raises RequestError."""
    try:
        data = json.loads(raw, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"The body is not valid JSON: {error}", kind="Bad Request", param="body") from None
    if not isinstance(data, dict):
        raise RequestError("The body must be a JSON object.", kind="Bad Request", param="body")
    _check_depth(data)
    return _mend(data) if _SURROGATE_ESCAPE.search(raw) else data


def _check_depth(data: Any) -> None:
    level: list[Any] = [data]
    for _ in range(MAX_DEPTH):
        level = [
            child
            for node in level
            for child in (node.values() if isinstance(node, dict) else node)
            if isinstance(child, dict | list)
        ]
        if not level:
            return
    raise RequestError(f"The body is nested deeper than {MAX_DEPTH} levels.", kind="Bad Request", param="body")


def _mend(value: Any) -> Any:
    if isinstance(value, str):
        return _SURROGATE.sub("\ufffd", value)
    if isinstance(value, dict):
        return {_mend(k): _mend(v) for k, v in value.items()}
    return [_mend(v) for v in value] if isinstance(value, list) else value


async def read_json(request: Request) -> dict[str, Any]:
    """The parsed body of a request, whatever its content type says."""
    return parse_json(await request.body())


class BodyLimit:
    """ASGI middleware: 413 for bodies over `limit` bytes, declared or counted."""

    def __init__(self, app: ASGIApp, limit: int) -> None:
        self.app = app
        self.limit = limit

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        declared = dict(scope["headers"]).get(b"content-length", b"")
        if declared.isdigit() and int(declared) > self.limit:
            await self._refuse(scope, receive, send)
            return
        seen = 0
        refused = False

        async def counted() -> Message:
            nonlocal seen, refused
            message = await receive()
            seen += len(message.get("body", b""))
            if seen > self.limit and not refused:
                refused = True
                raise _TooLarge
            return message

        try:
            await self.app(scope, counted, send)
        except _TooLarge:
            await self._refuse(scope, receive, send)

    async def _refuse(self, scope: Scope, receive: Receive, send: Send) -> None:
        error = RequestError(
            f"The body is larger than {self.limit >> 20} MiB.", "Raise MAX_BODY_MB.", status=413, param="body"
        )
        await json_response(failure_of(error), scope["path"])(scope, receive, send)


class _TooLarge(BaseException):
    """Passes the application's own exception handlers on its way to the middleware."""
