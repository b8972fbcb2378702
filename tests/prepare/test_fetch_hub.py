"""`soloist fetch` against a Hub of our own on 127.0.0.1, by the real client: killed in mid-file, it goes on there."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

COMMIT = "c" * 40
STALL, WRITTEN = 16 << 20, 10 << 20  # the client writes ten MiB at a time
FILES = {"config.json": b"{}", "model.safetensors": bytes(range(256)) * (96 << 10), "notes.bin": b"not wanted"}


def _hash(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


class Hub(BaseHTTPRequestHandler):
    """The three requests the client makes: the list of files, HEAD and GET of one. `stall_at` stops a body midway."""

    stall_at: int | None = None
    hash: str | None = None
    ranges: list[str] = []  # noqa: RUF012  one per test, set by the fixture

    def _answer(self, body: bool) -> None:
        path = self.path.split("?")[0]
        if path.startswith("/api/models/me/mine"):
            siblings = [
                {
                    "rfilename": name,
                    "size": len(data),
                    "lfs": {"sha256": self.hash or _hash(data), "size": len(data), "pointerSize": 1},
                }
                for name, data in FILES.items()
            ]
            data = json.dumps({"id": "me/mine", "sha": COMMIT, "siblings": siblings}).encode()
            self._send(200, data, {"Content-Type": "application/json"}, body)
            return
        name = path.rsplit("/", 1)[-1]
        if "/me/mine/resolve/" not in path or name not in FILES:
            self._send(404, b"{}", {"X-Error-Code": "RepoNotFound"}, body)
            return
        data, start = FILES[name], 0
        wanted = self.headers.get("Range")
        if body and name == "model.safetensors":
            self.ranges.append(wanted or "")
        if wanted and wanted.startswith("bytes="):
            start = int(wanted.removeprefix("bytes=").split("-")[0])
        headers = {"ETag": f'"{_hash(data)}"', "X-Repo-Commit": COMMIT, "Accept-Ranges": "bytes"}
        if start:
            headers["Content-Range"] = f"bytes {start}-{len(data) - 1}/{len(data)}"
        self._send(206 if start else 200, data[start:], headers, body)

    def _send(self, status: int, data: bytes, headers: dict[str, str], body: bool) -> None:
        self.send_response(status)
        for key, value in {**headers, "Content-Length": str(len(data))}.items():
            self.send_header(key, value)
        self.end_headers()
        if not body:
            return
        if self.stall_at is not None and len(data) > self.stall_at:
            self.wfile.write(data[: self.stall_at])
            self.wfile.flush()
            time.sleep(60)
        else:
            self.wfile.write(data)

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def do_GET(self) -> None:
        self._answer(body=True)

    def log_message(self, *args: object) -> None:
        """Nothing: the test's output is its own."""


@pytest.fixture
def hub() -> Iterator[tuple[type[Hub], dict[str, str]]]:
    kind = type("OneHub", (Hub,), {"stall_at": None, "ranges": []})
    server = ThreadingHTTPServer(("127.0.0.1", 0), kind)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    quiet = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    here = {"HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}", "HF_HUB_DISABLE_XET": "1", "NO_PROXY": "127.0.0.1"}
    yield kind, {**quiet, **here}
    server.shutdown()
    server.server_close()


def _command(into: Path, *more: str) -> list[str]:
    return [sys.executable, "-m", "soloist", "fetch", "me/mine", "--into", str(into), *more]


def test_a_killed_fetch_goes_on_where_it_stopped(hub: tuple[type[Hub], dict[str, str]], tmp_path: Path) -> None:
    kind, environment = hub
    environment["HF_HOME"] = str(tmp_path / "home")
    into = tmp_path / "models"
    dry = subprocess.run(_command(into, "--dry-run"), env=environment, capture_output=True, text=True, check=True)
    assert "25,165,824  model.safetensors" in dry.stdout and "notes.bin" not in dry.stdout and not into.exists()

    kind.stall_at = STALL
    first = subprocess.Popen(_command(into), env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    part: list[Path] = []
    for _ in range(1200):
        part = [path for path in into.rglob("*.part") if path.stat().st_size >= WRITTEN]
        if part or first.poll() is not None:
            break
        time.sleep(0.05)
    first.kill()
    first.wait()
    assert part and not (into / "me/mine").exists()

    kind.stall_at = None
    done = subprocess.run(_command(into), env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert sorted(path.name for path in (into / "me/mine").iterdir()) == ["config.json", "model.safetensors"]
    assert (into / "me/mine/model.safetensors").read_bytes() == FILES["model.safetensors"]
    assert kind.ranges == ["", f"bytes={WRITTEN}-"]
    assert not (into / "me/mine.partial").exists()
    again = subprocess.run(_command(into), env=environment, capture_output=True, text=True, check=True)
    assert "complete" in again.stdout and len(kind.ranges) == 2


def test_a_hash_that_does_not_fit_is_told(hub: tuple[type[Hub], dict[str, str]], tmp_path: Path) -> None:
    kind, environment = hub
    kind.hash = "0" * 64
    environment["HF_HOME"] = str(tmp_path / "home")
    done = subprocess.run(_command(tmp_path / "models"), env=environment, capture_output=True, text=True)
    assert done.returncode == 2 and "arrived with another hash" in done.stdout + done.stderr
    assert not list((tmp_path / "models").rglob("*.part")) and not (tmp_path / "models/me/mine").exists()


def test_an_unknown_repository_is_one_sentence(hub: tuple[type[Hub], dict[str, str]], tmp_path: Path) -> None:
    _, environment = hub
    environment["HF_HOME"] = str(tmp_path / "home")
    command = [*_command(tmp_path / "models")]
    command[command.index("me/mine")] = "no/such"
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 2 and "404 for no/such" in done.stderr + done.stdout
