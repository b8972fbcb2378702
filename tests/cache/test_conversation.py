"""Turn 12 is as warm as turn 2: a chat with side requests, thinking and tools, and a document after a hard kill."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from cache.arms import Arm
from soloist import demo
from soloist.bench.document_text import make_document
from soloist.server.messages import normalise
from soloist.server.template import ChatTemplate
from soloist.server.tokenizer import Tokenizer

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "The weather of a place.",
            "parameters": {"type": "object", "properties": {"place": {"type": "string"}}},
        },
    }
]


class Chat:
    """Renders as the server does and keeps the ids of the turn before."""

    def __init__(self, arm: Arm) -> None:
        self.arm = arm
        self.tokenizer = Tokenizer.load(demo.path())
        self.template = ChatTemplate.load(demo.path())
        self.known: list[int] = []

    def ids(self, messages: list[dict[str, Any]], thinking: bool, tools: list[Any] | None = None) -> list[int]:
        switches = {"enable_thinking": thinking, "add_generation_prompt": True, "tools": tools}
        return self.tokenizer.encode(self.template.render(normalise(messages), switches))

    def ask(self, prompt: list[int], tokens: int = 40) -> tuple[str, int]:
        """(answer's text, uncached tokens)."""
        answer = self.arm.ask(prompt, tokens, params={"stop_ids": self.arm.engine.eos_ids})
        self.known = [*prompt, *answer.tokens]
        return self.tokenizer.decode(answer.tokens, skip_special=True), len(prompt) - answer.cached


def _shared(a: list[int], b: list[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


@pytest.fixture(
    scope="module", params=[{}, pytest.param({"kv_format": "kvarn"}, marks=pytest.mark.slow)], ids=["", "kvarn"]
)
def arm(request: pytest.FixtureRequest) -> Iterator[Arm]:
    with Arm("demo", **request.param) as arm:
        yield arm


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("thinking", "tools"),
    [
        pytest.param(True, TOOLS, id="thinking-tools"),
        pytest.param(True, None, id="thinking", marks=pytest.mark.slow),
        pytest.param(False, TOOLS, id="tools", marks=pytest.mark.slow),
        pytest.param(False, None, id="plain", marks=pytest.mark.slow),
    ],
)
def test_twelve_turns_with_side_requests(arm: Arm, thinking: bool, tools: list[Any] | None) -> None:
    chat, side = Chat(arm), Chat(arm)
    messages: list[dict[str, Any]] = [{"role": "system", "content": "You are brief. " * 20}]
    for turn in range(12):
        if tools and turn % 3 == 2:
            function = {"name": "weather", "arguments": json.dumps({"place": f"Place {turn}"})}
            call = {"id": f"c{turn}", "type": "function", "function": function}
            messages.append({"role": "assistant", "content": "", "tool_calls": [call]})
            messages.append({"role": "tool", "tool_call_id": f"c{turn}", "content": f"{turn} degrees, rain"})
        else:
            messages.append({"role": "user", "content": f"Question {turn}: tell me about number {turn * 17}."})
        before, prompt = chat.known, chat.ids(messages, thinking, tools)
        text, uncached = chat.ask(prompt)
        new = len(prompt) - _shared(prompt, before)
        if turn:
            assert uncached <= new + 127 + (128 if arm.engine.reuse.prefix.grid == 128 else 0), (turn, uncached, new)
        reasoning, _, content = text.rpartition("</think>")
        said = {"role": "assistant", "content": content.strip() or "Yes."}
        messages.append(said | ({"reasoning_content": reasoning.replace("<think>", "")} if reasoning else {}))
        arm.quiet()
        for task in ("Give this chat a title.", "Suggest three follow-up questions."):
            side.ask(side.ids([*messages, {"role": "user", "content": task}], False, tools), tokens=16)
        arm.quiet()


DOCUMENT = make_document(23_000, seed=3).text


def _port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


class Server:
    """`soloist serve demo` in its own process."""

    def __init__(self, sessions: Path) -> None:
        self.port = _port()
        knobs = {"PORT": str(self.port), "SESSION_DIR": str(sessions), "THREADS": "2", "LOG_LEVEL": "warning"}
        keep = {name: os.environ[name] for name in ("PATH", "HOME", "LANG") if name in os.environ}
        self.process = subprocess.Popen([sys.executable, "-m", "soloist", "serve", "demo"], env=keep | knobs)
        deadline = time.monotonic() + 180
        while True:
            try:
                if httpx.get(f"{self.url}/health", timeout=2).status_code == 200:
                    return
            except httpx.TransportError:
                assert self.process.poll() is None and time.monotonic() < deadline
            time.sleep(0.2)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def first_token(self, messages: list[dict[str, str]]) -> tuple[float, int, int]:
        """(seconds to the first token, prompt tokens, cached tokens)."""
        body = {"model": "demo", "messages": messages, "max_tokens": 4, "temperature": 0, "stream": True}
        body |= {"stream_options": {"include_usage": True}, "chat_template_kwargs": {"enable_thinking": False}}
        began, first, usage = time.perf_counter(), 0.0, {}
        with httpx.stream("POST", f"{self.url}/v1/chat/completions", json=body, timeout=300) as reply:
            assert reply.status_code == 200
            for line in reply.iter_lines():
                if not line.startswith("data: {"):
                    continue
                chunk = json.loads(line[6:])
                if chunk["choices"] and chunk["choices"][0]["delta"].get("content") and not first:
                    first = time.perf_counter() - began
                usage = chunk.get("usage") or usage
        return first, usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"]

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()


def at_rest(sessions: Path, seconds: float = 120.0) -> None:
    """Wait until what is on disk has not grown for longer than SESSION_FLUSH_S: the turn is settled and durable."""
    deadline, seen, since = time.monotonic() + seconds, -1, time.monotonic()
    while time.monotonic() - since < 2.5 or not seen:
        assert time.monotonic() < deadline, "the session is still being written"
        size = sum(path.stat().st_size for path in sessions.rglob("*") if path.is_file())
        if size != seen:
            seen, since = size, time.monotonic()
        time.sleep(0.1)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_document_is_warm_also_after_a_hard_kill(tmp_path: Path) -> None:
    """A follow-up on the longest document the demo takes: at least 15 times sooner, also after kill -9 and restart."""
    server = Server(tmp_path)
    try:
        asked = [{"role": "user", "content": DOCUMENT + "\n\nWho wrote this?"}]
        cold, tokens, cached = server.first_token(asked)
        assert cached == 0 and tokens > 6500
        follow = [*asked, {"role": "assistant", "content": "Nobody."}, {"role": "user", "content": "And when?"}]
        at_rest(tmp_path)
        warm, _, cached = server.first_token(follow)
        assert cached >= tokens - 127
        at_rest(tmp_path)
    finally:
        server.kill()
    server = Server(tmp_path)
    try:
        again, _, cached = server.first_token(follow)
        assert cached >= tokens - 127
    finally:
        server.kill()
    print(f"\nfirst token: cold {cold:.2f} s, warm {warm:.3f} s, after a restart {again:.3f} s ({tokens} tokens)")
    assert warm * 15 <= cold and again * 15 <= cold
