"""Requests in flight, for the status page: read from the engine's own objects when somebody looks."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from soloist.engine.request import Request


@dataclass
class LiveRequests:
    """HTTP requests whose sequences have not all ended, and what the ended ones amounted to.

    `stopping` is set at the end of a drain: nothing new may begin, and what the engine ends was ended for that reason.
    """

    open: dict[str, tuple[str, Sequence[Request]]] = field(default_factory=dict)
    prompt: int = 0
    cached: int = 0
    generated: int = 0
    steps: int = 0
    stopping: bool = False

    def begin(self, reply_id: str, endpoint: str, requests: Sequence[Request]) -> None:
        self.open[reply_id] = (endpoint, requests)

    def end(self, reply_id: str) -> None:
        _, requests = self.open.pop(reply_id, ("", ()))
        for request in requests:
            self.prompt += request.stats.prompt_tokens
            self.cached += request.stats.cached_tokens
            self.generated += request.stats.output_tokens
            self.steps += request.stats.steps

    def snapshot(self) -> dict[str, Any]:
        """Totals since the start, the running requests included, and a row per running sequence."""
        now = time.perf_counter()
        running = [(reply_id, endpoint, r) for reply_id, (endpoint, rs) in self.open.items() for r in rs]
        return {
            "time": now,
            "prompt": self.prompt + sum(r.stats.prompt_tokens for _, _, r in running),
            "cached": self.cached + sum(r.stats.cached_tokens for _, _, r in running),
            "generated": self.generated + sum(r.stats.output_tokens for _, _, r in running),
            "steps": self.steps + sum(r.stats.steps for _, _, r in running),
            "streams": [_row(reply_id, endpoint, r, now) for reply_id, endpoint, r in running],
        }


def _row(reply_id: str, endpoint: str, request: Request, now: float) -> dict[str, Any]:
    stats = request.stats
    decoding = now - stats.first_token if stats.first_token else 0.0
    return {
        "id": reply_id,
        "endpoint": endpoint,
        "phase": request.phase.value,
        "prompt": stats.prompt_tokens,
        "cached": stats.cached_tokens,
        "generated": stats.output_tokens,
        "rate": stats.output_tokens / decoding if decoding > 0 else 0.0,
        "per_step": stats.output_tokens / stats.steps if stats.steps else 0.0,
        "age": now - stats.arrived,
    }
