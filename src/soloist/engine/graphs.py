"""The card's verify step captured in CUDA graphs, one per row bucket.

Buckets are exact up to 16 rows, then coarser: padding rows belong to no request. All buffers exist before the first
capture and are never regrown; tables are data, so no host value is frozen into a graph.
"""

from __future__ import annotations

import bisect
import logging
import time
from collections.abc import Sequence
from typing import Literal

import torch

from soloist.models.card import CardModel, CardShapes
from soloist.models.state import KV, State

log = logging.getLogger("soloist.engine")

Mode = Literal["on", "off", "check"]
EXACT = 16
COARSE = (20, 24, 28, 32, 40, 48, 56, 64, 80, 96, 112, 128)


def buckets(rows: int) -> tuple[int, ...]:
    """Row counts that get a graph when steps have at most `rows` rows."""
    return (*range(1, min(rows, EXACT) + 1), *(n for n in COARSE if n < rows), *((rows,) if rows > EXACT else ()))


class GraphedModel(CardModel):
    """A CardModel that replays its sequence. `check` runs every step eagerly as well and compares, for debugging."""

    mode: Mode = "on"
    _prepared: frozenset[str] = frozenset()  # names of the attributes that `prepare` made

    def prepare(self, shapes: CardShapes, kv: KV, state: State, taps: Sequence[int]) -> None:
        before = set(self.__dict__) - self._prepared
        super().prepare(shapes, kv, state, taps)
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}
        self._buckets = buckets(shapes.rows)
        self._prepared = frozenset(self.__dict__) - before

    def unprepare(self) -> None:
        """Let go of all that `prepare` made: only weights stay, and `prepare` makes the model whole again."""
        for name in self._prepared:
            self.__dict__.pop(name, None)

    @torch.inference_mode()
    def capture(self) -> None:
        """Compile every kernel and capture every bucket, the largest first so that they share one pool."""
        if self.mode == "off":
            return
        began = time.perf_counter()
        self.sequence(self._buckets[-1])
        self.sequence(1)
        torch.cuda.synchronize(self.device)
        pool = None
        for bucket in reversed(self._buckets):
            self.sequence(bucket)  # first use of a bucket may still load a kernel, which a capture must not see
            torch.cuda.synchronize(self.device)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool):
                self.sequence(bucket)
            pool = pool or graph.pool()
            self._graphs[bucket] = graph
        torch.cuda.synchronize(self.device)
        log.info("%d graphs captured in %.1f s", len(self._graphs), time.perf_counter() - began)

    def bucket(self, count: int) -> int:
        return self._buckets[bisect.bisect_left(self._buckets, count)] if self._graphs else count

    def launch(self, bucket: int) -> None:
        graph = self._graphs.get(bucket)
        if graph is None:
            self.sequence(bucket)
            return
        graph.replay()
        if self.mode == "check":
            captured = self.results(bucket)
            self.sequence(bucket)
            eager = self.results(bucket)
            for name, value in captured.items():
                if not torch.equal(value, eager[name]):
                    raise RuntimeError(f"the captured step of {bucket} rows differs from the eager one in {name}")
