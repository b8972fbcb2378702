"""A real `soloist serve` in a process of its own, watched from outside."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx


class Watched:
    """`url` of the server, its memory and what it says about itself."""

    def __init__(self, process: subprocess.Popen[bytes], url: str, log: Path) -> None:
        self.process, self.url, self.log = process, url, log

    @property
    def rss_mib(self) -> float:
        """Resident memory now."""
        lines = Path(f"/proc/{self.process.pid}/status").read_text().splitlines()
        return round(int(next(x for x in lines if x.startswith("VmRSS")).split()[1]) / 1024, 1)

    @property
    def files(self) -> int:
        """Open file descriptors."""
        return len(os.listdir(f"/proc/{self.process.pid}/fd"))

    def status(self) -> dict[str, Any]:
        found: dict[str, Any] = httpx.get(self.url + "/status", timeout=60).json()
        return found

    def idle(self, within_s: float = 60.0) -> dict[str, Any]:
        """The status once nothing runs or waits. Raises TimeoutError."""
        end = time.monotonic() + within_s
        while time.monotonic() < end:
            now = self.status()
            if now["running"] + now["waiting"] + now["parked"] == 0:
                return now
            time.sleep(0.05)
        raise TimeoutError(f"still busy after {within_s} s: {now}")

    def tracebacks(self) -> int:
        return self.log.read_text(errors="replace").count("Traceback")


@contextlib.contextmanager
def watched(log: Path, model: str = "demo", **knobs: str) -> Iterator[Watched]:
    """Serve a model with these knobs until the block ends."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    flags = [x for name, value in knobs.items() for x in (f"--{name.replace('_', '-')}", value)]
    command = [sys.executable, "-m", "soloist", "serve", model, "--port", str(port), *flags]
    with log.open("wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out)
        server = Watched(process, f"http://127.0.0.1:{port}", log)
        try:
            while True:
                with contextlib.suppress(httpx.HTTPError):
                    httpx.get(server.url + "/ready", timeout=60)
                    break
                if process.poll() is not None:
                    raise RuntimeError(log.read_text(errors="replace"))
                time.sleep(0.2)
            yield server
        finally:
            process.terminate()
            process.wait(60)
