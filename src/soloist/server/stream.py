"""Replies that end when the client does: server-sent events, and plain JSON that is dropped on disconnect."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import suppress
from typing import Any, TypeVar

from pydantic_core import to_json
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

PING = b": ping\n\n"
DONE = b"data: [DONE]\n\n"

T = TypeVar("T")


class ClientGone(Exception):
    """The client closed the connection before the reply was complete."""


def data_event(payload: Any) -> bytes:
    """One unnamed event."""
    return b"data: " + to_json(payload, inf_nan_mode="null") + b"\n\n"


def named_event(name: str, payload: Any) -> bytes:
    """One event with a name, as Anthropic and Responses clients read them."""
    return b"event: " + name.encode() + b"\ndata: " + to_json(payload, inf_nan_mode="null") + b"\n\n"


async def with_pings(chunks: AsyncIterator[bytes], silence_s: float, ping: bytes = PING) -> AsyncIterator[bytes]:
    """The same chunks, with `ping` in between whenever nothing came for `silence_s` seconds by the clock."""
    step: asyncio.Task[bytes] | None = None
    try:
        while True:
            step = asyncio.ensure_future(anext(chunks))
            while not (await asyncio.wait({step}, timeout=silence_s))[0]:
                yield ping
            try:
                chunk = step.result()
            except StopAsyncIteration:
                return
            yield chunk
    finally:
        if step is not None and not step.done():
            step.cancel()
            with suppress(asyncio.CancelledError, StopAsyncIteration):
                await step


class EventStream(Response):
    """Server-sent events from an async iterator of encoded events.

    Headers go out at once. The iterator is closed, and `on_end` called, as soon as the client is gone, also while
    the iterator waits (a long prefill).
    """

    def __init__(
        self, chunks: AsyncIterator[bytes], on_end: Callable[[], None], headers: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(
            content=b"",
            media_type="text/event-stream",
            headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no", **(headers or {})},
        )
        del self.headers["content-length"]
        self._chunks = chunks
        self._on_end = on_end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def write() -> None:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            async for chunk in self._chunks:
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})

        try:
            await until_disconnect(write(), receive)
        except (ClientGone, OSError):
            pass
        finally:
            self._on_end()


async def until_disconnect(work: Awaitable[T], receive: Receive) -> T:
    """Await `work`; cancel it and raise ClientGone when the connection closes first."""

    async def watch() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    task = asyncio.ensure_future(work)
    watcher = asyncio.ensure_future(watch())
    try:
        await asyncio.wait({task, watcher}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientGone
    finally:
        for pending in (task, watcher):
            if not pending.done():
                pending.cancel()
                with suppress(asyncio.CancelledError):
                    await pending


async def unless_gone(request: Request, work: Awaitable[T]) -> T:
    """`until_disconnect` for a route that has already read its body."""
    return await until_disconnect(work, request.receive)
