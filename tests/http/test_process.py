"""The server as a process: signals, a dying engine, a taken port."""

from __future__ import annotations

import contextlib
import json
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest

from soloist.errors import SettingError
from soloist.server.main import claim

TESTS = Path(__file__).resolve().parents[1]
PROGRAM = """
import sys
sys.path[:0] = [{src!r}, {tests!r}]
import threading
import soloist.engine.build as build
from fakes import FakeEngine
from soloist.progress import lines
from soloist.settings import resolve

def script(request):
    if {dies}:
        threading.Timer(0.5, engine.kill).start()
    return [100] * {length}

engine = FakeEngine(script, delay_s={delay}, max_len=100_000)
build.build_engine = lambda settings, progress, **_: engine
from soloist.server.main import run

run(resolve({{"port": {port!r}, "drain_s": {drain!r}}}, {{}}, {{}}), lines(sys.stdout))
"""


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


@contextlib.contextmanager
def process(
    length: int = 60, drain: str = "20", dies: bool = False, delay: float = 0.02
) -> Iterator[tuple[subprocess.Popen[str], str]]:
    port = free_port()
    program = PROGRAM.format(
        src=str(TESTS.parent / "src"),
        tests=str(TESTS),
        length=length,
        drain=drain,
        delay=delay,
        dies=dies,
        port=str(port),
    )
    child = subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, bufsize=1
    )
    try:
        assert child.stdout is not None
        for line in child.stdout:
            if re.match(r"@progress .* ready", line):
                break
        yield child, f"http://127.0.0.1:{port}"
    finally:
        child.kill()
        child.communicate()


LOADING = """
import sys, time
sys.path[:0] = [{src!r}]
import soloist.engine.build as build
from soloist.progress import lines
from soloist.settings import resolve
from soloist.server.main import run

def load(*_):
    print("loading", flush=True)
    time.sleep(60)

build._build = load
run(resolve({{"port": {port!r}}}, {{}}, {{}}), lines(sys.stdout))
"""


def test_ctrl_c_ends_a_start_at_once():
    program = LOADING.format(src=str(TESTS.parent / "src"), port=str(free_port()))
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as child:
        try:
            assert child.stdout is not None and any(line == "loading\n" for line in child.stdout)
            child.send_signal(signal.SIGINT)
            assert child.wait(20) == 130
        finally:
            child.kill()


BODY = {"prompt": "x", "stream": True, "max_tokens": 50_000, "ignore_eos": True}


def test_sigterm_drains():
    with process() as (child, url), httpx.stream("POST", url + "/v1/completions", json=BODY, timeout=60) as reply:
        lines = reply.iter_lines()
        next(lines)
        assert httpx.get(url + "/ready").status_code == 200
        child.send_signal(signal.SIGTERM)
        rest = list(lines)
        assert '"finish_reason":"length"' in "".join(rest) and [x for x in rest if x][-1] == "data: [DONE]"
        with pytest.raises(httpx.ConnectError):
            httpx.get(url + "/health")
        assert child.wait(20) == 0


def test_a_drain_that_takes_too_long_ends_in_the_protocols_words():
    """Streams end with an error event, plain requests with 503, an unread one is cut; nothing is logged as a fault."""
    chat = {"messages": [{"role": "user", "content": "x"}]}
    streams = {"/v1/completions": BODY, "/v1/chat/completions": {**chat, "stream": True}}
    streams |= {
        "/v1/messages": {**chat, "stream": True, "max_tokens": 90_000},
        "/v1/responses": {"input": "x", "stream": True},
    }
    with (
        process(length=1_000_000, drain="1") as (child, url),
        ThreadPoolExecutor() as pool,
        contextlib.ExitStack() as stack,
    ):
        replies = {}
        for path, body in streams.items():
            reply = stack.enter_context(httpx.stream("POST", url + path, json=body, timeout=60))
            lines = reply.iter_lines()
            next(lines)
            replies[path] = lines
        plain = pool.submit(httpx.post, url + "/v1/completions", json={**BODY, "stream": False}, timeout=60)
        while httpx.get(url + "/ready").json()["running"] < 5:
            time.sleep(0.01)
        child.send_signal(signal.SIGTERM)
        ends = {path: [line for line in lines if line][-3:] for path, lines in replies.items()}
        assert plain.result().status_code == 503 and plain.result().headers["retry-after"]
        for path in ("/v1/completions", "/v1/chat/completions"):
            assert ends[path][-1] == "data: [DONE]" and "ServiceUnavailableError" in ends[path][-2]
        assert ends["/v1/messages"][-2] == "event: error" and "overloaded_error" in ends["/v1/messages"][-1]
        assert ends["/v1/responses"][-2] == "event: response.failed" and "stopping" in ends["/v1/responses"][-1]
        assert child.wait(20) == 0
        assert child.stderr is not None and "Traceback" not in (said := child.stderr.read()) and "DRAIN_S" in said


def test_a_client_that_does_not_read_cannot_hold_the_end():
    with process(length=10_000_000, drain="0", delay=0.0) as (child, url):
        parts = urlsplit(url)
        with socket.create_connection((parts.hostname, parts.port)) as sock:
            body = json.dumps({**BODY, "max_tokens": 99_000}).encode()
            sock.sendall(
                b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body)
            )
            while httpx.get(url + "/status").json()["generated"] < 20_000:  # far more than the socket's buffers hold
                time.sleep(0.05)
            child.send_signal(signal.SIGTERM)
            assert child.wait(30) == 0
        assert child.stderr is not None and "Traceback" not in child.stderr.read()


def test_a_dead_engine_ends_the_process():
    with process(length=1_000_000, dies=True) as (child, url):
        with httpx.stream("POST", url + "/v1/completions", json=BODY, timeout=60) as reply:
            text = "".join(reply.iter_lines())
        ended = time.monotonic()
        assert "engine has stopped" in text and text.endswith("data: [DONE]")
        assert child.wait(20) == 1 and time.monotonic() - ended < 5


def test_a_taken_port_is_said_before_anything_loads():
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(SettingError, match=rf"Port {port} on 127.0.0.1 is taken"):
            claim("127.0.0.1", port)
    with pytest.raises(SettingError, match=r"Cannot listen on 203\.0\.113\.7"):
        claim("203.0.113.7", free_port())
    claim("::1", free_port()).close()
