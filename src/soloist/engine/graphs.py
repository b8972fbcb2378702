"""The card's verify step captured in CUDA graphs, one per row bucket.

Buckets are exact up to 16 rows, then coarser: padding rows belong to no request. All buffers exist before the first
capture and are never regrown; tables are data, so no host value is frozen into a graph.
"""

from __future__ import annotations

import bisect
import logging
import time
from collections.abc import Callable, Sequence

import torch

from soloist.models.captured import Mode, same_bits
from soloist.models.card import CardModel, CardShapes
from soloist.models.state import KV, AcceptedPath, Caches, Features, State
from soloist.models.step import PrefillStep, VerifyStep
from soloist.ops.top import Heads, width
from soloist.ops.triton.attention import Partials
from soloist.ops.triton.top import RowTop
from soloist.sampling.rows import BEST

log = logging.getLogger("soloist.engine")

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
        self._settling: torch.cuda.CUDAGraph | None = None
        self._results = _Results(self, shapes.rows)
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
        pool = None
        for bucket in reversed(self._buckets):
            self.sequence(bucket)  # first use of a bucket may still load a kernel, which a capture must not see
            torch.cuda.synchronize(self.device)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool):
                self.sequence(bucket)
            pool = pool or graph.pool()
            self._graphs[bucket] = graph
        self._path.write([])
        self.settle_rows()
        torch.cuda.synchronize(self.device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool):
            self.settle_rows()
        self._settling = graph
        torch.cuda.synchronize(self.device)
        log.info("%d graphs captured in %.1f s", len(self._graphs), time.perf_counter() - began)

    def sequence(self, count: int) -> None:
        super().sequence(count)
        self._results.bring(self._buffers.logits[:count])

    @torch.inference_mode()
    def forward(self, step: VerifyStep | PrefillStep, caches: Caches, taps: Sequence[int] = ()) -> Features:
        features = super().forward(step, caches, taps)
        if isinstance(step, VerifyStep):
            features.heads = self._results.later(step.rows)
            features.gather = self._results.gather
        return features

    def settle(self, paths: Sequence[AcceptedPath]) -> None:
        if self._settling is None:
            super().settle(paths)
        elif any(p.rows for p in paths):
            self._path.write(paths)
            self._settling.replay()
            self._path.sent()

    @property
    def partials(self) -> Partials:
        """Results of attention splits while a step runs; between steps they are anybody's."""
        return self._partials

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
            same_bits(f"step of {bucket} rows", captured, self.results(bucket))


class _Results:
    """What a verify step hands over: the best entries of its rows to the host, features of the kept rows to drafters.

    The copy to the host is part of the sequence; `later` marks its end, so that the host waits for that and nothing
    launched after it.
    """

    def __init__(self, model: GraphedModel, rows: int) -> None:
        device = model.device
        self._model = model
        self._top = RowTop(rows, model.config.vocab_size, BEST, device)
        self._packed = torch.zeros(rows, width(BEST), dtype=torch.int32, device=device)
        self._host = torch.zeros(self._packed.shape, dtype=torch.int32, pin_memory=device.type == "cuda")
        self._done = torch.cuda.Event()
        self._index_host = torch.zeros(rows, dtype=torch.int32, pin_memory=device.type == "cuda")
        self._index = torch.zeros_like(self._index_host, device=device)
        b = model._buffers
        self._hidden, self._taps = torch.zeros_like(b.h), torch.zeros_like(b.taps)

    def bring(self, logits: torch.Tensor) -> None:
        """Part of the sequence: find the best entries and copy them to the host."""
        count = logits.shape[0]
        self._top(logits, self._packed[:count])
        self._host[:count].copy_(self._packed[:count], non_blocking=True)

    def later(self, count: int) -> Callable[[], Heads]:
        """Called behind the launch; what it returns waits for the step and reads its first `count` rows."""
        self._done.record()

        def wait() -> Heads:
            self._done.synchronize()
            return Heads.unpack(self._host[:count].numpy(), BEST)

        return wait

    @torch.inference_mode()
    def gather(self, rows: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Hidden states and taps of these rows of the last step, good until the next call. Nothing waits."""
        count = len(rows)
        self._index_host.numpy()[:count] = rows
        index = self._index[:count]
        index.copy_(self._index_host[:count], non_blocking=True)
        b = self._model._buffers
        hidden = torch.index_select(b.h, 0, index, out=self._hidden[:count])
        tapped = self._model._tap_layers
        return hidden, torch.index_select(b.taps, 0, index, out=self._taps[:count]) if tapped else None
