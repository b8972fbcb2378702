"""Whole chats: through a pipe, at a pseudo-terminal with Ctrl-C, and with a server started for the occasion."""

from __future__ import annotations

import codecs
import os
import pty
import re
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from soloist.settings import KNOBS

CHAT = [sys.executable, "-m", "soloist", "chat"]


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """An environment without knobs, with its own state directory."""
    kept = {k: v for k, v in os.environ.items() if k not in {knob.env for knob in KNOBS.values()}}
    return kept | {"XDG_STATE_HOME": str(tmp_path / "state"), "TERM": "xterm", "OMP_NUM_THREADS": "1"}


def pipe(
    arguments: list[str], question: str, environment: dict[str, str], cwd: Path, seconds: float = 60
) -> subprocess.CompletedProcess[str]:
    command = [*CHAT, *arguments]
    return subprocess.run(
        command, input=question, env=environment, cwd=cwd, capture_output=True, text=True, timeout=seconds, check=False
    )


def test_a_question_in_a_pipe_gets_its_answer_alone_on_stdout(server, environment, tmp_path: Path) -> None:
    done = pipe(["--url", server.url, "--system", "Be kind."], "two\nlines\n", environment, tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "You said two\nlines.\n"
    assert "3.25 tokens/step" in done.stderr and "32/40 cached" in done.stderr
    assert server.requests[0]["messages"] == [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": "two\nlines"},
    ]


def test_a_refused_question_in_a_pipe_is_an_exit_code(server, environment, tmp_path: Path) -> None:
    server.refusal = (400, b'{"error": {"message": "too long"}}')
    done = pipe(["--url", server.url], "hello", environment, tmp_path)
    assert done.returncode == 2 and "too long" in done.stderr and done.stdout == ""
    done = pipe(["--url", server.url], "  \n", environment, tmp_path)
    assert done.returncode == 2 and "no question" in done.stderr


def test_without_a_server_and_told_not_to_start_one(environment, tmp_path: Path) -> None:
    done = pipe(["--port", str(free_port()), "--no-start"], "hello", environment, tmp_path)
    assert done.returncode == 2 and "soloist serve" in done.stderr


class Terminal:
    """A `soloist chat` at the far side of a pseudo-terminal."""

    def __init__(self, arguments: list[str], environment: dict[str, str], cwd: Path) -> None:
        self.master, slave = pty.openpty()
        self.process = subprocess.Popen(
            [*CHAT, *arguments], stdin=slave, stdout=slave, stderr=slave, env=environment, cwd=cwd, preexec_fn=os.setsid
        )
        os.close(slave)
        self.seen = ""
        self._decode = codecs.getincrementaldecoder("utf-8")().decode

    def type(self, text: str) -> None:
        os.write(self.master, text.encode())

    def expect(self, text: str, seconds: float = 20) -> None:
        """Read until `text` has appeared (without styling), and forget everything up to its end."""
        deadline = time.monotonic() + seconds
        while text not in self.seen:
            ready, _, _ = select.select([self.master], [], [], max(0.0, deadline - time.monotonic()))
            assert ready, f"{text!r} did not appear in {self.seen!r}"
            try:
                data = self._decode(os.read(self.master, 65536))
            except OSError:  # nobody has the other end open any more
                raise AssertionError(f"the chat ended before {text!r}, after {self.seen!r}") from None
            self.seen += re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]|[\x01\x02\r]", "", data)
        self.seen = self.seen.split(text, 1)[1]

    def submit(self, line: str) -> None:
        """Type a line at the next prompt."""
        self.expect("›")
        self.type(line + "\n")

    def interrupt(self) -> None:
        os.kill(self.process.pid, signal.SIGINT)

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        os.close(self.master)


@pytest.fixture
def terminal(server, environment, tmp_path: Path) -> Iterator[Terminal]:
    chat = Terminal(["--url", server.url], environment, tmp_path)
    yield chat
    chat.close()


def test_ctrl_c_stops_the_answer_and_keeps_the_session(server, terminal: Terminal, endless) -> None:
    plain = server.script
    server.script = endless
    terminal.expect("/help for commands")
    terminal.submit("first")
    terminal.expect("It begins and goes on")
    terminal.interrupt()
    terminal.expect("stopped after")
    assert server.disconnected.wait(5)

    server.script = plain
    terminal.submit("second")
    terminal.expect("You said second.")
    terminal.expect("3.25 tokens/step")
    roles = [(m["role"], m["content"][:9]) for m in server.requests[-1]["messages"]]
    assert roles == [("user", "first"), ("assistant", "It begins"), ("user", "second")]

    terminal.expect("›")
    # Python misses a signal that arrives between readline's prompt and its wait for keys, until the next key.
    time.sleep(0.3)
    terminal.interrupt()
    terminal.expect("again")
    terminal.submit("/retry")
    terminal.expect("You said second.")
    terminal.submit("/reset")
    terminal.expect("afresh")
    terminal.submit("third")
    terminal.expect("You said third.")
    assert len(server.requests[-1]["messages"]) == 1
    terminal.expect("›")
    terminal.type("\x04")
    assert terminal.process.wait(10) == 0


def test_an_error_in_the_middle_keeps_the_session(server, terminal: Terminal) -> None:
    server.refusal = (400, b'{"error": {"message": "no such sampler"}}')
    terminal.submit("first")
    terminal.expect("no such sampler")
    server.refusal = None
    terminal.submit("/retry")
    terminal.expect("You said first.")
    terminal.submit("/nonsense")
    terminal.expect("/help lists the commands")
    terminal.submit("/quit")
    assert terminal.process.wait(10) == 0


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


# Stands in for the server room in the child process: sitecustomize runs before anything else there.
STAND_IN = """
import sys, types

def run(settings, progress):
    import http.server, json, os, signal
    if settings.model == "broken":
        from soloist.errors import CheckpointError
        raise CheckpointError("broken/config.json is missing.", "Download it again.")
    progress("layers", 1, 2)

    class Handler(http.server.BaseHTTPRequestHandler):
        def log_message(self, *a): pass
        def send(self, kind, body):
            self.send_response(200); self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body))); self.end_headers(); self.wfile.write(body)
        def do_GET(self):
            self.send("application/json", json.dumps({"data": [{"id": settings.model}]}).encode())
        def do_POST(self):
            text = f"pid {os.getpid()} keys {','.join(settings.api_key)} seqs {settings.max_seqs}"
            chunk = {"choices": [{"index": 0, "delta": {"content": text}, "finish_reason": "stop"}]}
            self.send("text/event-stream", f"data: {json.dumps(chunk)}\\n\\ndata: [DONE]\\n\\n".encode())

    def stop(*a): raise SystemExit(0)
    signal.signal(signal.SIGTERM, stop)
    server = http.server.ThreadingHTTPServer((settings.host, settings.port), Handler)
    progress("ready", 1, 1)
    server.serve_forever()

fake = types.ModuleType("soloist.server.main")
fake.run = run
sys.modules["soloist.server.main"] = fake
"""


@pytest.fixture
def with_stand_in(environment: dict[str, str], tmp_path: Path) -> dict[str, str]:
    """An environment whose `soloist serve` runs the stand-in."""
    site = tmp_path / "site"
    site.mkdir()
    (site / "sitecustomize.py").write_text(STAND_IN)
    return environment | {"PYTHONPATH": str(site), "TMPDIR": str(tmp_path)}


def gone(pid: int, seconds: float = 5) -> bool:
    """True once no such process runs (a zombie counts as gone)."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        status = Path(f"/proc/{pid}/stat")
        try:
            if status.read_text().rpartition(")")[2].split()[0] == "Z":
                return True
        except OSError:
            return True
        time.sleep(0.02)
    return False


needs_proc = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks processes up in /proc")


@needs_proc
def test_a_server_is_started_with_the_same_settings_and_stopped(with_stand_in, tmp_path: Path) -> None:
    port = free_port()
    arguments = ["other", "--port", str(port), "--api-key", "hush", "--max-seqs", "5"]
    done = pipe(arguments, "hello", with_stand_in, tmp_path)
    assert done.returncode == 0, done.stderr
    said = re.fullmatch(r"pid (\d+) keys hush seqs 5\n", done.stdout)
    assert said, done.stdout
    assert "Loading other: layers" in done.stderr
    assert gone(int(said[1]))
    assert not list(tmp_path.glob("soloist-*.log")), "the log of a healthy server is removed"


def test_the_bundled_demo_answers_a_pipe(environment, tmp_path: Path) -> None:
    arguments = ["demo", "--port", str(free_port()), "--max-len", "128"]
    done = pipe(arguments, "Tell me a story about a small boat.", environment, tmp_path, seconds=200)
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.split()) >= 5
    assert re.search(r"\d+ tokens · [\d.]+ tok/s · TTFT .* cached", done.stderr)


def test_a_server_that_refuses_to_start_says_why(with_stand_in, tmp_path: Path) -> None:
    done = pipe(["broken", "--port", str(free_port())], "hello", with_stand_in, tmp_path)
    assert done.returncode == 2
    assert "broken/config.json is missing." in done.stderr and "Download it again." in done.stderr


@needs_proc
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGHUP, signal.SIGTERM])
def test_the_server_ends_however_the_chat_ends(with_stand_in, tmp_path: Path, how: signal.Signals) -> None:
    chat = Terminal(["--port", str(free_port())], with_stand_in, tmp_path)
    try:
        chat.submit("who are you")
        chat.expect("pid ")
        chat.expect(" keys")
        (pid,) = children(chat.process.pid)
        os.kill(chat.process.pid, how)
        chat.process.wait(10)
        assert gone(pid)
    finally:
        chat.close()


def children(pid: int) -> list[int]:
    text = Path(f"/proc/{pid}/task/{pid}/children").read_text()
    return [int(p) for p in text.split()]
