"""One log row and one set of meter readings per request."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence

from soloist.engine.request import Event, Request
from soloist.server.live import LiveRequests
from soloist.server.metrics import Meters

log = logging.getLogger("soloist.requests")


class Observer:
    """Follows one HTTP request's sequences; `endpoint` and `reply_id` name it in the log."""

    def __init__(self, meters: Meters, live: LiveRequests, endpoint: str, reply_id: str) -> None:
        self._meters = meters
        self._live = live
        self._endpoint = endpoint
        self._reply_id = reply_id

    @property
    def stopping(self) -> bool:
        """True once the drain is over: no sequence may begin."""
        return self._live.stopping

    def started(self, requests: Sequence[Request]) -> None:
        """The sequences were submitted."""
        self._live.begin(self._reply_id, self._endpoint, requests)

    def gap(self, seconds: float, tokens: int) -> None:
        """A step's tokens came `seconds` after the step before."""
        self._meters.record_gap(seconds, tokens)

    def ended(self, finals: Sequence[Event]) -> None:
        """All sequences have ended: book each, write the row."""
        self._live.end(self._reply_id)
        stats = [event.stats for event in finals if event.stats is not None]
        for event in finals:
            if event.stats is not None and event.finish_reason is not None:
                self._meters.record(event.stats, event.finish_reason)
        reasons = ",".join(sorted({str(event.finish_reason) for event in finals}))
        if not stats:
            log.info("%s %s finish=%s", self._endpoint, self._reply_id, reasons)
            return
        first = stats[0]
        output = sum(s.output_tokens for s in stats)
        steps = sum(s.steps for s in stats)
        decode = max((s.last_token for s in stats), default=0.0) - first.first_token
        log.info(
            "%s %s finish=%s prompt=%d cached=%d output=%d"
            " queue=%.0fms ttft=%.0fms tok/s=%.1f tokens/step=%.2f total=%.2fs",
            self._endpoint,
            self._reply_id,
            reasons,
            first.prompt_tokens,
            first.cached_tokens,
            output,
            1000 * (first.scheduled - first.arrived) if first.scheduled else 0.0,
            1000 * (first.first_token - first.arrived) if first.first_token else 0.0,
            (output - len(stats)) / decode if first.first_token and decode > 0 else 0.0,
            output / steps if steps else 0.0,
            (first.finished or time.perf_counter()) - first.arrived,
        )
