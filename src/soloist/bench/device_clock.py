"""Time by the card's own events: what lies between two launches on the stream, without the host."""

from __future__ import annotations

import statistics
from collections.abc import Callable

import torch


def median_seconds(work: Callable[[], object], repeats: int, warm_up: int = 1) -> float:
    """Median seconds of `work`, each call between two events and waited for, after `warm_up` calls."""
    for _ in range(warm_up):
        work()
    torch.cuda.synchronize()
    times = []
    for _ in range(repeats):
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        work()
        stop.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(stop) / 1e3)
    return statistics.median(times)
