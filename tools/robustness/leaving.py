"""Clients that leave: closed, half-closed and reset, while waiting, in prefill and in decode, on every protocol."""

from __future__ import annotations

import json
import random
import socket
import struct
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from tools.robustness.server import Watched, watched

WHAT = "clients of `soloist serve demo` that disconnect abruptly, up to six at a time on four slots"
COUNT = 1000
WARM = 50  # disconnects before the first reading of memory
KNOBS = {"max_len": "4096", "threads": "1", "max_seqs": "4", "prefix_cache": "0", "lookup": "0"}
LONG = "All work and no play makes Jack a dull boy. " * 200  # some 2,000 tokens: seconds of prefill on a small machine
WAYS = ("close", "half-close", "reset")


def bodies(text: str) -> dict[str, dict[str, Any]]:
    """A request per protocol that generates until somebody stops it."""
    ask = [{"role": "user", "content": text}]
    return {
        "/v1/chat/completions": {"messages": ask, "ignore_eos": True},
        "/v1/completions": {"prompt": text, "max_tokens": 2000, "ignore_eos": True},
        "/v1/messages": {"messages": ask, "max_tokens": 2000},
        "/v1/responses": {"input": text},
    }


def send(server: Watched, path: str, body: dict[str, Any]) -> socket.socket:
    """An open connection with the request on its way."""
    parts = urlsplit(server.url)
    data = json.dumps(body).encode()
    sock = socket.create_connection((parts.hostname or "", parts.port or 0), timeout=60)
    sock.sendall(f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(data)}\r\n\r\n".encode() + data)
    return sock


def leave(sock: socket.socket, how: str) -> None:
    """Go, in one of WAYS. A half-closed connection is still to be closed by the caller."""
    if how == "half-close":
        sock.shutdown(socket.SHUT_WR)
        return
    if how == "reset":
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    sock.close()


def run(count: int) -> dict[str, Any]:
    rng = random.Random(5)
    kinds: Counter[str] = Counter()
    held: list[socket.socket] = []
    log = Path(tempfile.mkdtemp()) / "server.log"
    with watched(log, **KNOBS) as server:
        for i in range(WARM + count):
            if i == WARM:
                kinds.clear()
                while held:
                    held.pop().close()
                before = {**server.idle(), "rss_mib": server.rss_mib, "open_files": server.files}
            phase, how, stream = rng.choice(["prefill", "decode"]), rng.choice(WAYS), rng.random() < 0.7
            path, body = rng.choice(list(bodies(LONG if phase == "prefill" else "Tell me a story.").items()))
            sock = send(server, path, {**body, "stream": stream})
            held.append(sock)
            if phase == "decode" and stream:
                sock.recv(4096)
            else:
                time.sleep(rng.random() * 0.1)
            leave(sock, how)
            kinds[f"{phase}, {how}, {'stream' if stream else 'whole'}"] += 1
            if len(held) >= 6:
                held.pop(0).close()
            if i % 100 == 0:
                print(i, server.rss_mib, flush=True)
        gone = time.monotonic()
        for sock in held:
            sock.close()
        after = {**server.idle(), "rss_mib": server.rss_mib, "open_files": server.files}
        seconds = time.monotonic() - gone
        tracebacks = server.tracebacks()
    names = ("running", "waiting", "parked", "slots_used", "pages_used", "rss_mib", "open_files")
    return {
        "knobs": KNOBS,
        "warm_up": WARM,
        "disconnects": count,
        "kinds": dict(sorted(kinds.items())),
        "before": {name: before[name] for name in names},
        "after": {name: after[name] for name in names},
        "seconds_until_idle": round(seconds, 2),
        "tracebacks_in_the_log": tracebacks,
        "finished": {k: v for k, v in after["counters"].items() if k.startswith("finished_")},
    }
