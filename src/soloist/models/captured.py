"""What the drafters of a card share: work captured in CUDA graphs, and tables that one copy brings to the card."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Literal

import numpy as np
import torch

Mode = Literal["on", "off", "check"]
Key = tuple[int, ...]


def same_bits(what: str, captured: Mapping[str, torch.Tensor], eager: Mapping[str, torch.Tensor]) -> None:
    """Raise RuntimeError naming the first result in which a replayed graph and its eager twin differ by a bit."""
    for name, value in captured.items():
        # As bytes: NaN equals NaN.
        if not torch.equal(value.view(torch.uint8), eager[name].view(torch.uint8)):
            raise RuntimeError(f"the captured {what} differs from the eager one in {name}")


class Graphs:
    """Pieces of work by key, replayed where they were captured and run eagerly where not.

    what     names a piece of work in an error: "draft of 2 requests"
    work     launches it; it may touch static buffers only
    results  the buffers that hold what it left; `check` mode runs every piece a second time, eagerly, and compares
             them, so work must be repeatable
    """

    def __init__(
        self,
        device: torch.device,
        mode: Mode,
        what: Callable[[Key], str],
        work: Callable[[Key], None],
        results: Callable[[Key], Mapping[str, torch.Tensor]],
    ) -> None:
        self.device, self.mode = device, mode
        self._what, self._work, self._results = what, work, results
        self._captured: dict[Key, torch.cuda.CUDAGraph] = {}

    def __len__(self) -> int:
        return len(self._captured)

    @torch.inference_mode()
    def capture(self, keys: Iterable[Key]) -> None:
        """Compile and capture these, the largest first so that they share one pool; mode "off" captures nothing."""
        if self.mode == "off":
            return
        pool = None
        for key in keys:
            self._work(key)  # compiles what a capture must not see
            torch.cuda.synchronize(self.device)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool):
                self._work(key)
            pool = pool or graph.pool()
            self._captured[key] = graph

    def run(self, key: Key) -> None:
        graph = self._captured.get(key)
        if graph is None:
            self._work(key)
            return
        graph.replay()
        if self.mode == "check":
            captured = {name: tensor.clone() for name, tensor in self._results(key).items()}
            self._work(key)
            same_bits(self._what(key), captured, self._results(key))


class PinnedTables:
    """int32 tables in one pinned buffer and their copy on the card; `host` are numpy views, `card` tensors."""

    def __init__(self, layout: dict[str, tuple[int, ...]], device: torch.device) -> None:
        sizes = {name: int(np.prod(shape)) for name, shape in layout.items()}
        on_card = device.type == "cuda"
        self._host = torch.zeros(sum(sizes.values()), dtype=torch.int32, pin_memory=on_card)
        self._card = torch.zeros_like(self._host, device=device)
        self._sent = torch.cuda.Event() if on_card else None
        self.host: dict[str, np.ndarray] = {}
        self.card: dict[str, torch.Tensor] = {}
        at = 0
        for name, shape in layout.items():
            self.host[name] = self._host[at : at + sizes[name]].view(shape).numpy()
            self.card[name] = self._card[at : at + sizes[name]].view(shape)
            at += sizes[name]

    def open(self) -> dict[str, np.ndarray]:
        """The host side, once the card has read what was written last."""
        if self._sent is not None:
            self._sent.synchronize()
        return self.host

    def send(self) -> None:
        self._card.copy_(self._host, non_blocking=True)
        if self._sent is not None:
            self._sent.record()


class PageLines:
    """Lines of a page table on the host. A request's list of thousands mostly is what stood there one step ago, and a
    few more: only those are written."""

    def __init__(self, table: np.ndarray) -> None:
        self._table = table
        self._known: list[list[int]] = [[] for _ in range(len(table))]

    def write(self, line: int, pages: Sequence[int]) -> None:
        """The first len(pages) entries of a line; what is behind them is nobody's."""
        known = self._known[line]
        if pages[: len(known)] != known:
            known.clear()
        fresh = pages[len(known) :]
        if fresh:
            self._table[line, len(known) : len(pages)] = fresh
            known += fresh
