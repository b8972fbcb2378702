"""Malformed requests on the real engine: no 5xx, no traceback, memory flat, nothing left running."""

from __future__ import annotations

import random
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
from tools.robustness.server import watched

from malformed import malformed
from script_model import build_script, pieces

WHAT = "random malformed requests, one after the other, to `soloist serve` on a script checkpoint of four small layers"
COUNT = 20_000
WARM = 1000  # requests before the first reading of memory: caches fill, tables are made
KNOBS = {"max_len": "256", "threads": "1", "host_cache_gb": "0.05"}


def run(count: int) -> dict[str, Any]:
    rng = random.Random(11)
    statuses: Counter[str] = Counter()
    faults: list[dict[str, Any]] = []
    memory: list[dict[str, float]] = []
    root = Path(tempfile.mkdtemp())
    model = build_script(root / "script", pieces("What is valid by accident gets this answer."))
    with (
        watched(root / "server.log", str(model), **KNOBS) as server,
        httpx.Client(base_url=server.url, timeout=300) as client,
    ):
        for i in range(WARM + count):
            method, path, headers, raw = malformed(rng)
            reply = client.request(method, path, content=raw, headers=headers)
            if i >= WARM:
                statuses[f"{path if reply.status_code != 404 else 'any'} {reply.status_code}"] += 1
            if reply.status_code >= 500 or 'data: {"error"' in reply.text:
                faults.append(
                    {"status": reply.status_code, "path": path, "body": repr(raw[:500]), "reply": reply.text[-500:]}
                )
            if i >= WARM and (i - WARM) % (count // 10 or 1) == 0:
                memory.append({"requests": i - WARM, "rss_mib": server.rss_mib, "open_files": server.files})
                print(memory[-1], len(faults), flush=True)
        end = server.idle()
        memory.append({"requests": count, "rss_mib": server.rss_mib, "open_files": server.files})
        tracebacks = server.tracebacks()
    return {
        "knobs": KNOBS,
        "warm_up": WARM,
        "requests": count,
        "statuses": dict(sorted(statuses.items())),
        "faults": faults,
        "tracebacks_in_the_log": tracebacks,
        "memory": memory,
        "left": {name: end[name] for name in ("running", "waiting", "parked", "slots_used")},
    }
