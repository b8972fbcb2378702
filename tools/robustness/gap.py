"""The worst wait of a stream while others hand in long prompts: within PREFILL_SLICE_MS and one step."""

from __future__ import annotations

import tempfile
import threading
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
from tools.robustness.server import watched

WHAT = (
    "gaps between the events of one stream of `soloist serve demo` while prompts of 8k tokens are prefilled beside it"
)
COUNT = 3  # prompts
TOKENS = 8128
SLICE_MS = 150
KNOBS = {"max_len": "8192", "threads": "2", "prefill_slice_ms": str(SLICE_MS), "settle": "0"}


def run(count: int) -> dict[str, Any]:
    with watched(Path(tempfile.mkdtemp()) / "server.log", **KNOBS) as server:
        times: list[float] = []
        done = threading.Event()

        def listen() -> None:
            body = {"prompt": "Once upon a time", "max_tokens": 8000, "ignore_eos": True, "stream": True, "seed": 1}
            with httpx.stream("POST", server.url + "/v1/completions", json=body, timeout=600) as reply:
                for line in reply.iter_lines():
                    if line.startswith("data: {"):
                        times.append(time.perf_counter())
                    if done.is_set():
                        return

        listener = threading.Thread(target=listen)
        listener.start()
        while len(times) < 120:
            time.sleep(0.05)
        spans: list[tuple[float, float]] = []
        for i in range(count):
            ids = [1000 + (i * 7919 + j * 31) % 14_000 for j in range(TOKENS)]  # a prompt nobody has sent before
            began = time.perf_counter()
            reply = httpx.post(server.url + "/v1/completions", json={"prompt": ids, "max_tokens": 1}, timeout=600)
            spans.append((began, time.perf_counter()))
            assert reply.json()["usage"]["prompt_tokens"] == TOKENS, reply.text
        done.set()
        listener.join()
    gaps = [(b - a, b) for a, b in pairwise(times)]
    beside = sorted(1000 * gap for gap, at in gaps if any(began <= at <= ended for began, ended in spans))
    # The first events belong to a server that is still warming up.
    alone = sorted(1000 * gap for gap, at in gaps[20:] if at < spans[0][0])
    bound = SLICE_MS + alone[(len(alone) - 1) * 99 // 100]  # one slice and one slow step
    return {
        "knobs": KNOBS,
        "prompts": count,
        "prompt_tokens": TOKENS,
        "seconds_per_prompt": [round(ended - began, 2) for began, ended in spans],
        "alone_ms": quantiles(alone),
        "beside_prefill_ms": quantiles(beside),
        "bound_ms": round(bound, 1),
        "over_the_bound": sum(gap > bound for gap in beside),
    }


def quantiles(values: list[float]) -> dict[str, float]:
    """Of a sorted list."""
    last = len(values) - 1
    return {
        "events": len(values),
        **{f"p{q}": round(values[last * q // 100], 1) for q in (50, 90, 99)},
        "worst": round(values[-1], 1),
    }
