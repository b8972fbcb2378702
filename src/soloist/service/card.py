"""Waiting until the card is really free: a process that ended may hold its memory for seconds longer."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable
from pathlib import Path

POLL_S = 0.5
STEADY_POLLS = 4
STEADY_MIB = 16.0

Reading = tuple[float, list[str]]


def read_card() -> Reading | None:
    """(free MiB of all cards, command lines of the processes that compute on them); None without a card."""
    free = _query("--query-gpu=memory.free")
    if free is None:
        return None
    pids = _query("--query-compute-apps=pid") or []
    return sum(float(v) for v in free if v.replace(".", "").isdecimal()), [_command_line(pid) for pid in pids]


def _command_line(pid: str) -> str:
    """What nvidia-smi calls `python` is `python .../soloist serve` in /proc; empty once it has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode("utf-8", "replace")
    except OSError:
        return ""


def _query(what: str) -> list[str] | None:
    try:
        done = subprocess.run(
            ["nvidia-smi", what, "--format=csv,noheader,nounits"],
            capture_output=True,
            text=True,
            timeout=10,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return [line.strip() for line in done.stdout.splitlines() if line.strip()]


def wait_until_free(
    limit_s: float,
    read: Callable[[], Reading | None] = read_card,
    sleep: Callable[[float], None] = time.sleep,
    clock: Callable[[], float] = time.monotonic,
) -> str:
    """Wait until no Soloist computes on the card and its free memory has stood still for two seconds.

    Returns one sentence. Other programs (a desktop, another model) are not waited for: the planner works with what is
    free then. After `limit_s` seconds it gives up waiting and says so.
    """
    start, steady, last = clock(), 0, -1.0
    while True:
        reading = read()
        if reading is None:
            return "no card to wait for"
        free, programs = reading
        ours = any("soloist" in p for p in programs)
        steady = 0 if ours or abs(free - last) > STEADY_MIB else steady + 1
        last = free
        if steady >= STEADY_POLLS:
            return f"the card is free: {free:.0f} MiB after {clock() - start:.1f} s"
        if clock() - start > limit_s:
            holder = "a Soloist still holds it" if ours else "its free memory keeps changing"
            return f"gave up waiting for the card after {limit_s:.0f} s: {holder}"
        sleep(POLL_S)
