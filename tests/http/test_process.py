"""The server as a process: signals, a dying engine, a taken port."""

from __future__ import annotations

import contextlib
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

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

engine = FakeEngine(script, delay_s=0.02, max_len=100_000)
build.build_engine = lambda settings, progress, **_: engine
from soloist.server.main import run

run(resolve({{"port": {port!r}, "drain_s": {drain!r}}}, {{}}, {{}}), lines(sys.stdout))
"""


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


@contextlib.contextmanager
def process(length: int = 60, drain: str = "20", dies: bool = False) -> Iterator[tuple[subprocess.Popen[str], str]]:
    port = free_port()
    program = PROGRAM.format(
        src=str(TESTS.parent / "src"), tests=str(TESTS), length=length, drain=drain, dies=dies, port=str(port)
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


def test_the_drain_has_a_limit():
    with process(length=1_000_000, drain="1") as (child, url):
        with httpx.stream("POST", url + "/v1/completions", json=BODY, timeout=60) as reply:
            lines = reply.iter_lines()
            next(lines)
            began = time.monotonic()
            child.send_signal(signal.SIGTERM)
            with contextlib.suppress(httpx.HTTPError):
                list(lines)
        assert child.wait(20) == 0 and time.monotonic() - began < 15


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
