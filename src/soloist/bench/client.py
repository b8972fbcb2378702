"""An OpenAI-compatible client that keeps time.

Every number of every scenario comes from an `Answer`: what one streamed request looked like from the
outside. What a server does not report stays None and is printed as absent, never guessed.
"""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import httpx

from soloist.bench.prometheus import Samples, parse_metrics
from soloist.errors import UserError

OPTIONAL_FIELDS = (
    "cache_salt",
    "chat_template_kwargs",
    "ignore_eos",
    "min_tokens",
    "prompt_logprobs",
    "seed",
    "stream_options",
    "top_k",
)
"""Fields a stricter server may refuse; a refused one is left out from then on and named in the result."""


@dataclass
class Answer:
    """One request as its client saw it.

    Times are milliseconds since the request was sent. `gaps_ms` are the times between chunks that carried
    tokens; a speculative step sends several tokens in one chunk. `metrics` is the server's own `metrics`
    object (docs/benchmarks.md), empty when it sends none.
    """

    text: str = ""
    reasoning: str = ""
    finish_reason: str | None = None
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    cached_tokens: int | None = None
    ttft_ms: float | None = None
    total_ms: float = 0.0
    gaps_ms: list[float] = field(default_factory=list)
    metrics: dict[str, Any] = field(default_factory=dict)
    tool_calls: list[dict[str, Any]] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    error: str | None = None

    @property
    def tpot_ms(self) -> float | None:
        """Time per output token after the first: (last - first) / (tokens - 1); None under two tokens."""
        if self.ttft_ms is None or self.completion_tokens is None or self.completion_tokens < 2:
            return None
        return (self.total_ms - self.ttft_ms) / (self.completion_tokens - 1)

    @property
    def speculation(self) -> dict[str, Any] | None:
        """The server's `metrics.speculative_decoding`, or None when it does not report it."""
        return self.metrics.get("speculative_decoding") or None


class Client:
    """Async client for one server. Use as a context manager; `model` None takes the first served one."""

    def __init__(self, url: str, *, model: str | None = None, key: str | None = None, timeout: float = 900.0) -> None:
        url = url.rstrip("/")
        self.url = url[: -len("/v1")] if url.endswith("/v1") else url
        self.model = model
        self.refused: list[str] = []
        self._http = httpx.AsyncClient(
            base_url=self.url,
            headers={"Authorization": f"Bearer {key}"} if key else {},
            timeout=httpx.Timeout(timeout, connect=10.0),
            limits=httpx.Limits(max_connections=256, max_keepalive_connections=64),
        )

    async def __aenter__(self) -> Client:
        if self.model is None:
            self.model = await self._first_model()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._http.aclose()

    async def _first_model(self) -> str:
        try:
            reply = await self._http.get("/v1/models")
            reply.raise_for_status()
            return str(reply.json()["data"][0]["id"])
        except httpx.HTTPStatusError as error:
            refused = error.response.status_code == 401
            remedy = "Give --key or API_KEY." if refused else "Give --url of an OpenAI server."
            raise UserError(f"{self.url}/v1/models answered {error.response.status_code}.", remedy) from None
        except (httpx.HTTPError, KeyError, IndexError, ValueError) as error:
            raise UserError(
                f"No OpenAI-compatible server answers at {self.url} ({type(error).__name__}).",
                "Start one (`soloist serve demo`) or give --url.",
            ) from None

    async def get(self, path: str) -> Any:
        """Decoded JSON of a GET (text when it is not JSON), or None when the path is absent or fails."""
        try:
            reply = await self._http.get(path, timeout=10.0)
        except httpx.HTTPError:
            return None
        if reply.status_code != 200:
            return None
        try:
            return reply.json()
        except ValueError:
            return reply.text

    async def post(self, path: str, body: dict[str, Any]) -> tuple[int, Any]:
        """(status, decoded body) of a plain POST; status 0 with the reason when the connection failed."""
        try:
            reply = await self._http.post(path, json=body)
        except httpx.HTTPError as error:
            return 0, f"{type(error).__name__}: {error}"
        try:
            return reply.status_code, reply.json()
        except ValueError:
            return reply.status_code, reply.text

    async def metrics(self) -> Samples | None:
        """The Prometheus samples of `/metrics`, or None when the server has none."""
        text = await self.get("/metrics")
        return parse_metrics(text) if isinstance(text, str) else None

    async def count_tokens(self, text: str) -> int | None:
        """Tokens of a bare text by `/tokenize`; None when the server does not offer it."""
        status, body = await self.post("/tokenize", {"model": self.model, "prompt": text, "add_special_tokens": False})
        return int(body["count"]) if status == 200 and isinstance(body, dict) and "count" in body else None

    async def chat(self, messages: list[dict[str, Any]] | str, **fields: Any) -> Answer:
        """One streamed chat completion. A string is a single user message. Never raises for a server error."""
        if isinstance(messages, str):
            messages = [{"role": "user", "content": messages}]
        return await self._stream("/v1/chat/completions", {"messages": messages, **fields})

    async def complete(self, prompt: str | list[int], **fields: Any) -> Answer:
        """One streamed text completion."""
        return await self._stream("/v1/completions", {"prompt": prompt, **fields})

    def body(self, fields: dict[str, Any], *, stream: bool) -> dict[str, Any]:
        """The request body: model, the caller's set fields, and usage on, less what this server refused."""
        body = {"model": self.model, **{k: v for k, v in fields.items() if v is not None}}
        if stream:
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        return {k: v for k, v in body.items() if k not in self.refused}

    async def _stream(self, path: str, fields: dict[str, Any]) -> Answer:
        while True:
            body = self.body(fields, stream=True)
            answer, refused = await self._stream_once(path, body)
            if refused is None or refused not in body:
                return answer
            self.refused.append(refused)

    async def _stream_once(self, path: str, body: dict[str, Any]) -> tuple[Answer, str | None]:
        """The answer, and the optional field that a 400/422 reply blames (None when there is nothing to retry)."""
        answer = Answer()
        start = time.perf_counter()
        previous = start
        try:
            async with self._http.stream("POST", path, json=body) as reply:
                if reply.status_code != 200:
                    text = (await reply.aread()).decode("utf-8", "replace")
                    answer.error = f"HTTP {reply.status_code}: {text[:500]}"
                    return answer, _blamed(reply.status_code, text)
                async for event in _events(reply.aiter_lines()):
                    now = time.perf_counter()
                    if _take(answer, event):
                        if answer.ttft_ms is None:
                            answer.ttft_ms = (now - start) * 1e3
                        else:
                            answer.gaps_ms.append((now - previous) * 1e3)
                        answer.total_ms = (now - start) * 1e3
                        previous = now
        except httpx.HTTPError as error:
            answer.error = f"{type(error).__name__}: {error}"
        if answer.error is None and answer.finish_reason is None:
            answer.error = "the stream ended without a finish_reason"
        return answer, None


def _blamed(status: int, text: str) -> str | None:
    if status not in (400, 422):
        return None
    return next((name for name in OPTIONAL_FIELDS if name in text), None)


async def _events(lines: AsyncIterator[str]) -> AsyncIterator[dict[str, Any]]:
    async for line in lines:
        if line.startswith("data:"):
            data = line[5:].strip()
            if data == "[DONE]":
                return
            yield json.loads(data)


def _take(answer: Answer, event: dict[str, Any]) -> bool:
    """Fold one stream event into the answer; True when it carried generated tokens."""
    if event.get("error"):
        problem = event["error"]
        answer.error = str(problem.get("message", problem) if isinstance(problem, dict) else problem)
        return False
    usage = event.get("usage")
    if usage:
        answer.prompt_tokens = usage.get("prompt_tokens")
        answer.completion_tokens = usage.get("completion_tokens")
        answer.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
    if event.get("metrics"):
        answer.metrics = event["metrics"]
    carried = False
    for choice in event.get("choices") or []:
        delta = choice.get("delta") or {}
        content = choice.get("text") or delta.get("content") or ""
        reasoning = delta.get("reasoning") or delta.get("reasoning_content") or ""
        calls = delta.get("tool_calls") or []
        answer.text += content
        answer.reasoning += reasoning
        _merge_calls(answer.tool_calls, calls)
        answer.logprobs += [float(e["logprob"]) for e in (choice.get("logprobs") or {}).get("content") or []]
        # White space at the very beginning of reasoning may be the template's, sent before anything was generated.
        thought = reasoning.strip() or (reasoning and answer.ttft_ms is not None)
        carried = carried or bool(content or thought or calls)
        if choice.get("finish_reason"):
            answer.finish_reason = choice["finish_reason"]
    return carried


def _merge_calls(calls: list[dict[str, Any]], deltas: list[dict[str, Any]]) -> None:
    for delta in deltas:
        index = int(delta.get("index", 0))
        while len(calls) <= index:
            calls.append({"id": None, "name": "", "arguments": ""})
        function = delta.get("function") or {}
        calls[index]["id"] = delta.get("id") or calls[index]["id"]
        calls[index]["name"] += function.get("name") or ""
        calls[index]["arguments"] += function.get("arguments") or ""
