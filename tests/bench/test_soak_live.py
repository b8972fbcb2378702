"""Soak on the real engine: it passes on a sound server and fails on one with a fault planted in the cache."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest
from typer.testing import CliRunner

from soloist.bench.result import Result
from soloist.cli import app

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
FAULTY = Path(__file__).with_name("faulty_server.py")
SOUND = "-c 'from soloist.cli import main; main()'"


def soak(program: str, out: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[int, Result]:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2] / "src"))
    arguments = [
        "bench",
        "soak",
        "--rounds",
        "3",
        "--max-tokens",
        "60",
        "--warm-up",
        "0",
        "--no-plot",
        "--name",
        "soak",
    ]
    serve = f"{sys.executable} {program} serve demo --port {port}"
    where = ["--serve", serve, "--url", f"http://127.0.0.1:{port}", "--out", str(out)]
    done = CliRunner().invoke(app, [*arguments, *where], catch_exceptions=False)
    assert (out / "soak.json").exists(), done.output
    return done.exit_code, Result.read(out / "soak.json")


def test_a_sound_server_passes(tmp_path, monkeypatch):
    code, result = soak(SOUND, tmp_path, monkeypatch)
    assert code == 0 and not result.failures, result.failures
    assert [r["same"] for r in result.tables[0].rows] == [8, 8, 8]


def test_a_fault_in_the_cache_is_found(tmp_path, monkeypatch):
    code, result = soak(str(FAULTY), tmp_path, monkeypatch)
    assert code == 1 and any("answer differs at character" in f for f in result.failures), result.failures


@pytest.mark.parametrize("when", ["as it starts", "when it answers"])
def test_ending_the_benchmark_ends_its_server(when, tmp_path, monkeypatch):
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2] / "src"))
    url = f"http://127.0.0.1:{port}"
    serve = f"{sys.executable} {SOUND} serve demo --port {port} --drain-s 1"
    program = [sys.executable, "-c", "from soloist.cli import main; main()"]
    arguments = ["bench", "soak", "--minutes", "5", "--serve", serve, "--url", url, "--out", str(tmp_path), "--no-plot"]
    with subprocess.Popen([*program, *arguments], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as bench:
        deadline = time.monotonic() + 240
        log = tmp_path / "server.log"
        while not (log.exists() and log.read_text() if when == "as it starts" else answers(url)):
            assert bench.poll() is None and time.monotonic() < deadline
            time.sleep(0.1)
        assert processes(f"--port\0{port}\0")
        bench.terminate()
        assert bench.wait(240) == 2
    assert not processes(f"--port\0{port}\0")


def processes(words: str) -> list[str]:
    """Command lines of this machine that hold `words`."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            found.append(path.read_text(errors="replace"))
    return [line for line in found if words in line]


def answers(url: str) -> bool:
    try:
        return httpx.get(url + "/health", timeout=2).status_code == 200
    except httpx.HTTPError:
        return False
