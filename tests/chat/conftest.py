"""A small chat-completions server whose answers a test scripts event by event."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

Emit = Callable[[dict[str, Any] | str], None]


def delta(**fields: Any) -> dict[str, Any]:
    """A chunk with one choice; `finish_reason` goes beside the delta."""
    finish = fields.pop("finish_reason", None)
    return {"choices": [{"index": 0, "delta": fields, "finish_reason": finish}]}


USAGE = {
    "choices": [],
    "usage": {"prompt_tokens": 40, "completion_tokens": 12, "prompt_tokens_details": {"cached_tokens": 32}},
    "metrics": {
        "mean_itl_ms": 5.0,
        "speculative_decoding": {"mean_acceptance_length": 3.25, "draft_acceptance_rate": 0.5},
    },
}


@dataclass
class FakeServer:
    """`script(body, emit)` writes the events of one answer; a dict becomes JSON, a string goes out as it is."""

    url: str = ""
    requests: list[dict[str, Any]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    refusal: tuple[int, bytes] | None = None
    models: bytes = json.dumps({"data": [{"id": "fake", "max_model_len": 4096}]}).encode()
    disconnected: threading.Event = field(default_factory=threading.Event)

    def script(self, body: dict[str, Any], emit: Emit) -> None:
        emit(delta(role="assistant", content=""))
        emit(delta(content=f"You said {body['messages'][-1]['content']}"))
        emit(delta(content=".", finish_reason="stop"))
        emit(USAGE)
        emit("data: [DONE]\n\n")


@pytest.fixture
def server() -> Iterator[FakeServer]:
    fake = FakeServer()

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *arguments: Any) -> None:
            """Quiet."""

        def reply(self, status: int, body: bytes, kind: str = "application/json") -> None:
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def do_GET(self) -> None:
            fake.headers.append(dict(self.headers))
            self.reply(200, fake.models)

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            fake.requests.append(body)
            fake.headers.append(dict(self.headers))
            if fake.refusal:
                self.reply(*fake.refusal)
                return
            self.send_response(200)
            self.send_header("Content-Type", "text/event-stream")
            self.end_headers()

            def emit(event: dict[str, Any] | str) -> None:
                text = event if isinstance(event, str) else f"data: {json.dumps(event)}\n\n"
                self.wfile.write(text.encode())
                self.wfile.flush()

            try:
                fake.script(body, emit)
            except (BrokenPipeError, ConnectionResetError):
                fake.disconnected.set()

    http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    http.daemon_threads = True
    fake.url = f"http://127.0.0.1:{http.server_port}"
    thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    yield fake
    http.shutdown()
    http.server_close()
    thread.join()


@pytest.fixture
def endless() -> Callable[[dict[str, Any], Emit], None]:
    """A script that talks until the client goes away."""

    def script(body: dict[str, Any], emit: Emit) -> None:
        emit(delta(content="It begins"))
        for _ in range(500):
            emit(delta(content=" and goes on"))
            time.sleep(0.02)

    return script
