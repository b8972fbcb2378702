"""Talks to a chat-completions server: what it serves, and one streamed answer at a time."""

from __future__ import annotations

import json
import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import httpx

from soloist.chat.sse import payloads
from soloist.errors import SoloistError, UserError


@dataclass(frozen=True)
class Piece:
    """A stretch of streamed text."""

    kind: Literal["reasoning", "content"]
    text: str


@dataclass
class Answer:
    """What is known of an answer: complete once `finish_reason` is set. Times are `time.perf_counter()` seconds."""

    content: str = ""
    reasoning: str = ""
    finish_reason: str | None = None
    usage: Mapping[str, Any] = field(default_factory=dict)
    metrics: Mapping[str, Any] = field(default_factory=dict)
    asked: float = 0.0
    first: float | None = None
    ended: float = 0.0


@dataclass(frozen=True)
class Served:
    """A model the server offers; `max_len` in tokens, when it says so."""

    name: str
    max_len: int | None


class Client:
    """One server at `url` (without /v1). Raises UserError for refusals, SoloistError for a server's own failures."""

    def __init__(self, url: str, api_key: str | None = None) -> None:
        self.url = url.rstrip("/").removesuffix("/v1")
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        # The server sends a comment at least every 15 s, so a minute of silence means it is gone.
        timeout = httpx.Timeout(60, connect=5)
        self._http = httpx.Client(base_url=self.url, headers=headers, timeout=timeout, trust_env=_leaves_host(self.url))

    def close(self) -> None:
        self._http.close()

    def served(self) -> Served:
        """The first model the server lists."""
        try:
            reply = self._http.get("/v1/models")
        except httpx.HTTPError as error:
            raise UserError(f"No server answers at {self.url} ({error}).", "Start one with `soloist serve`.") from None
        foreign = UserError(
            f"{self.url} answers, but not as an OpenAI-compatible server.",
            "Another program may hold this port: choose one with PORT or --port.",
        )
        if reply.status_code != 200:
            raise _refusal(reply.status_code, reply.content) if _is_json(reply) else foreign
        try:
            model = reply.json()["data"][0]
            return Served(model["id"], model.get("max_model_len"))
        except (ValueError, KeyError, IndexError, TypeError):
            raise foreign from None

    def stream(
        self, model: str, messages: Sequence[Mapping[str, Any]], options: Mapping[str, Any], answer: Answer
    ) -> Generator[Piece, None, None]:
        """Yield an answer's text as it comes, filling `answer` on the way.

        Closing the iterator early closes the connection, which cancels the request on the server.
        """
        body = {"model": model, "messages": list(messages), "stream": True, **options}
        body["stream_options"] = {"include_usage": True}
        answer.asked = time.perf_counter()
        try:
            with self._http.stream("POST", "/v1/chat/completions", json=body) as reply:
                if reply.status_code != 200:
                    raise _refusal(reply.status_code, reply.read())
                for payload in payloads(reply.iter_bytes()):
                    if payload == "[DONE]":
                        break
                    for piece in _take(json.loads(payload), answer):
                        answer.first = answer.first or time.perf_counter()
                        yield piece
        except (httpx.HTTPError, ValueError) as error:
            reason = str(error) or type(error).__name__
            raise SoloistError(f"The connection to {self.url} broke off ({reason}).") from None
        finally:
            answer.ended = time.perf_counter()
        if answer.finish_reason is None:
            raise SoloistError("The server closed the stream before the answer was complete.")


def _take(chunk: Mapping[str, Any], answer: Answer) -> Iterator[Piece]:
    """Fold one chunk into `answer`; yield the text it adds."""
    if "error" in chunk:
        raise SoloistError(f"The server ended the answer: {chunk['error'].get('message', chunk['error'])}")
    answer.usage = chunk.get("usage") or answer.usage
    answer.metrics = chunk.get("metrics") or answer.metrics
    for choice in chunk.get("choices", []):
        delta = choice.get("delta") or {}
        # Servers name reasoning one way, the other, or both with the same text.
        reasoning = delta.get("reasoning") or delta.get("reasoning_content")
        if reasoning:
            answer.reasoning += reasoning
            yield Piece("reasoning", reasoning)
        if delta.get("content"):
            answer.content += delta["content"]
            yield Piece("content", delta["content"])
        answer.finish_reason = choice.get("finish_reason") or answer.finish_reason


def _refusal(status: int, body: bytes) -> SoloistError:
    """The error a non-200 reply stands for; its message is the server's own."""
    try:
        error = json.loads(body)["error"]
        message = error if isinstance(error, str) else error["message"]
    except (ValueError, KeyError, TypeError):
        message = body.decode(errors="replace").strip()[:300] or "no message"
    if status == 401:
        return UserError(f"The server refused the key: {message}", "Set API_KEY to a key the server accepts.")
    if status >= 500:
        return SoloistError(f"The server failed ({status}): {message}")
    return UserError(f"The server refused the request ({status}): {message}")


def _is_json(reply: httpx.Response) -> bool:
    """False for the web pages with which other programs answer."""
    return "json" in reply.headers.get("content-type", "")


def _leaves_host(url: str) -> bool:
    """False for loopback addresses, which a proxy from the environment could not reach."""
    return httpx.URL(url).host not in ("127.0.0.1", "localhost", "::1")
