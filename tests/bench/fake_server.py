"""A tiny OpenAI-compatible server with scripted answers and plantable faults, for testing the benchmark itself.

One character is one token. An answer is sent three tokens a chunk, as a speculative step would.
"""

from __future__ import annotations

import asyncio
import json
import threading
from dataclasses import dataclass, field
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

MODEL = "fake-model"
COPY = "Repeat the following text exactly:\n\n"
PER_STEP = 3


@dataclass
class Faults:
    """What to break. Counters are of chat requests served so far."""

    flip_after: int | None = None
    leak_pages: bool = False
    leak_memory: bool = False
    no_metrics: bool = False
    no_usage: bool = False
    cut_after: int | None = None
    refuse_fields: tuple[str, ...] = ()
    never_idle: bool = False
    slow_settling: bool = False  # one turn is settled per scrape; its page is missing until then


@dataclass
class FakeServer:
    """Runs on a free port in a thread while used as a context manager; `url` is where."""

    step_s: float = 0.002
    prefill_s: float = 0.01
    faults: Faults = field(default_factory=Faults)
    served: int = 0
    running: int = 0
    peak: int = 0
    cancelled: int = 0
    settling: int = 0
    bodies: list[dict[str, Any]] = field(default_factory=list)
    seen_prompts: set[str] = field(default_factory=set)
    url: str = ""

    def __enter__(self) -> FakeServer:
        config = uvicorn.Config(self._app(), host="127.0.0.1", port=0, log_level="error")
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._server.run, daemon=True)
        self._thread.start()
        while not self._server.started:
            self._thread.join(0.01)
        port = self._server.servers[0].sockets[0].getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        return self

    def __exit__(self, *_: object) -> None:
        self._server.should_exit = True
        self._thread.join(10)

    def _app(self) -> Starlette:
        return Starlette(
            routes=[
                Route("/v1/models", self._models),
                Route("/version", lambda _: JSONResponse({"version": "9.9"})),
                Route("/health", lambda _: Response()),
                Route("/metrics", self._metrics),
                Route("/tokenize", self._tokenize, methods=["POST"]),
                Route("/v1/chat/completions", self._chat, methods=["POST"]),
                Route("/v1/completions", self._completions, methods=["POST"]),
            ]
        )

    async def _models(self, _: Request) -> Response:
        return JSONResponse(
            {"object": "list", "data": [{"id": MODEL, "object": "model", "owned_by": "fake", "max_model_len": 8192}]}
        )

    async def _metrics(self, _: Request) -> Response:
        if self.faults.no_metrics:
            return Response(status_code=404)
        pages = 7 + (self.served if self.faults.leak_pages else 0) - self.settling
        memory = 500e6 + (self.served * 40e6 if self.faults.leak_memory else 0)
        lines = [
            "# TYPE vllm:num_requests_running gauge",
            f'vllm:num_requests_running{{model_name="{MODEL}"}} {self.running + self.faults.never_idle}',
            f'vllm:kv_cache_usage_perc{{model_name="{MODEL}"}} 0.25',
            f"soloist:pages_used {pages}",
            f"soloist:turns_settling {self.settling}",
            f"process_resident_memory_bytes {memory:.0f}",
            f'vllm:generation_tokens_total{{model_name="{MODEL}"}} 12',
        ]
        self.settling = max(0, self.settling - 1)
        return PlainTextResponse("\n".join(lines) + "\n")

    async def _tokenize(self, request: Request) -> Response:
        body = await request.json()
        ids = [ord(c) for c in body["prompt"]]
        return JSONResponse({"count": len(ids), "max_model_len": 8192, "tokens": ids, "token_strs": None})

    async def _completions(self, request: Request) -> Response:
        body = await request.json()
        prompt = body["prompt"] if isinstance(body["prompt"], list) else [ord(c) for c in body["prompt"]]
        choice: dict[str, Any] = {"index": 0, "text": "!", "finish_reason": "length", "logprobs": None}
        if "prompt_logprobs" in body:
            if "prompt_logprobs" in self.faults.refuse_fields:
                return _error(400, "prompt_logprobs is not supported")
            choice["prompt_logprobs"] = [None, *({str(i): {"logprob": -0.5, "rank": 1}} for i in prompt[1:])]
        if body.get("echo"):
            choice["logprobs"] = {"token_logprobs": [None, *(-0.5 for _ in prompt[1:]), -9.0]}
        return JSONResponse({"choices": [choice], "usage": {"prompt_tokens": len(prompt), "completion_tokens": 1}})

    async def _chat(self, request: Request) -> Response:
        body = await request.json()
        self.bodies.append(body)
        for name in self.faults.refuse_fields:
            if name in body:
                return _error(400, f"unknown field {name}")
        self.served += 1
        self.settling += self.faults.slow_settling
        prompt = "".join(m["content"] for m in body["messages"])
        text = answer_to(body)[: int(body.get("max_tokens", 64))]
        if self.faults.flip_after is not None and self.served > self.faults.flip_after:
            text = text[:5] + "#" + text[6:]
        cached = 64 * (len(prompt) // 64) if prompt in self.seen_prompts else 0
        self.seen_prompts.add(prompt)
        return StreamingResponse(self._events(body, text, len(prompt), cached), media_type="text/event-stream")

    async def _events(self, body: dict[str, Any], text: str, prompt_tokens: int, cached: int):
        self.running += 1
        self.peak = max(self.peak, self.running)
        try:
            yield _event(choices=[{"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}])
            await asyncio.sleep(self.prefill_s)
            chunks = [text[:1], *(text[i : i + PER_STEP] for i in range(1, len(text), PER_STEP))]
            for number, chunk in enumerate(chunks):
                if self.faults.cut_after is not None and number == self.faults.cut_after:
                    return
                yield _event(choices=[{"index": 0, "delta": {"content": chunk}, "finish_reason": None}])
                await asyncio.sleep(self.step_s)
            yield _event(choices=[{"index": 0, "delta": {}, "finish_reason": "length"}])
            if not self.faults.no_usage:
                yield _event(
                    choices=[], usage=_usage(prompt_tokens, len(text), cached), metrics=_metrics(len(chunks) - 1)
                )
            yield "data: [DONE]\n\n"
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        finally:
            self.running -= 1


def _usage(prompt: int, completion: int, cached: int) -> dict[str, Any]:
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


def _metrics(steps: int) -> dict[str, Any]:
    """Every step drafted four tokens and accepted two."""
    return {
        "speculative_decoding": {
            "num_spec_steps": steps,
            "num_draft_tokens": 4 * steps,
            "num_accepted_draft_tokens": 2 * steps,
            "acceptance_histogram": [0, 0, steps, 0, 0],
        }
    }


def _event(**fields: Any) -> str:
    return f"data: {json.dumps({'id': 'x', 'object': 'chat.completion.chunk', 'model': MODEL, **fields})}\n\n"


def _error(status: int, message: str) -> Response:
    return JSONResponse({"error": {"message": message, "type": "BadRequestError", "code": status}}, status_code=status)


def answer_to(body: dict[str, Any]) -> str:
    """A copy when asked for one, else prose that depends on the prompt and the seed only."""
    prompt = body["messages"][-1]["content"]
    if COPY in prompt:
        return prompt.split(COPY, 1)[1]
    seed = body.get("seed") if body.get("temperature") else 0
    return f"About {len(prompt)} characters, told by teller {seed}: " + "and so it went on, " * 40
