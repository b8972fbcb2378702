"""A snapshot of the engine for whoever watches it: metrics, readiness, the status page."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

Wakefulness = Literal["awake", "falling asleep", "asleep", "waking"]


@dataclass(frozen=True)
class EngineStatus:
    """Counts are of this instant; `counters` only grow.

    `settling` counts finished turns that idle time has yet to prefill into the cache: until it is 0, pages and slots
    still move although nothing is asked. `idle_s` is how long ago the engine loop last completed a pass while it had
    work (0 without work): a large value means a stuck step. `degraded` lists, one sentence each, what runs slower or
    less exact than it could. `fault` is why an engine that sleeps could not be woken the last time.
    """

    running: int = 0
    waiting: int = 0
    parked: int = 0
    settling: int = 0
    slots_used: int = 0
    slots_total: int = 0
    pages_used: int = 0
    pages_total: int = 0
    idle_s: float = 0.0
    counters: Mapping[str, float] = field(default_factory=dict)
    knobs: Mapping[str, str] = field(default_factory=dict)
    degraded: tuple[str, ...] = ()
    wakefulness: Wakefulness = "awake"
    fault: str = ""
