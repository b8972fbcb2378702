"""The DFlash2 drafter on a card: new context as one graph per row bucket, a block with its candidates as another.

The ring of context is shared with the drafter's host side (`drafting/card_dflash2.py`), which keeps the last slot of it
for padding. What comes back in one copy is every slot's candidates and the scores of all pairs.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Sequence

import numpy as np
import torch

from soloist.models.card_mtp import Captured, Mode, PinnedTables
from soloist.models.dflash2 import Attend, DFlash2
from soloist.ops.card_products import CardLinear
from soloist.ops.top import width
from soloist.ops.triton.ring import RingPartials, ring_attention
from soloist.ops.triton.top import RowTop

CONTEXT = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 24, 32, 48, 64)  # rows of new context that get a graph


class CardDFlash2:
    """`model` over a ring keys, values [layers, slots + 1, kv, window, D]."""

    def __init__(self, model: DFlash2, keys: torch.Tensor, values: torch.Tensor, mode: Mode = "on") -> None:
        self.model, self.keys, self.values, self.mode = model, keys, values, mode
        c, device, slots = model.config, model.device, keys.shape[1] - 1
        self.slots = slots
        self.requests = tuple(sorted({min(n, slots) for n in (1, 2, 4, 8, 16, 32, 64)}))
        self._context = PinnedTables({"slots": (CONTEXT[-1],), "positions": (CONTEXT[-1],)}, device)
        self._block = PinnedTables(dict.fromkeys(("anchors", "positions", "firsts", "slots"), (slots,)), device)
        self.taps = torch.zeros(CONTEXT[-1], len(c.tap_layers) * c.hidden_size, dtype=model.dtype, device=device)
        rows = slots * (c.block_size - 1)
        self._partials = RingPartials.allocate(slots * c.block_size, c.window, c.num_heads, c.head_dim, device)
        # The candidates are found among 16-bit values; off a card activations may have 32.
        kind = model.dtype if model.dtype.itemsize == 2 else torch.float16
        self._logits = torch.zeros(rows, model.head.out_features, dtype=kind, device=device)
        self._top = RowTop(rows, model.head.out_features, c.selector_top_k, device, stats=False)
        self._packed = torch.zeros(rows, width(c.selector_top_k), dtype=torch.int32, device=device)
        size = rows * (c.selector_top_k + c.selector_top_k**2)
        self._arrived = torch.zeros(size, dtype=torch.int32, pin_memory=device.type == "cuda")
        self._done = torch.cuda.Event() if device.type == "cuda" else None
        self._graphs: Captured = {}

    @torch.inference_mode()
    def capture(self) -> None:
        """Compile and capture every bucket; a debug mode runs eagerly instead."""
        if self.mode == "off":
            return
        pool = None
        works: list[tuple[tuple[int, ...], Callable[[], None]]] = []
        works += [((n, 0), lambda n=n: self._enter(n)) for n in reversed(CONTEXT)]  # type: ignore[misc]
        works += [((n, 1), lambda n=n: self._propose(n)) for n in reversed(self.requests)]  # type: ignore[misc]
        for key, work in works:
            work()  # compiles what a capture must not see
            torch.cuda.synchronize(self.model.device)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool):
                work()
            pool = pool or graph.pool()
            self._graphs[key] = graph

    def _run(self, key: tuple[int, int]) -> None:
        graph = self._graphs.get(key)
        if graph is not None:
            graph.replay()
        elif key[1] == 0:
            self._enter(key[0])
        else:
            self._propose(key[0])

    # -- the host's side -------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def enter(self, slots: Sequence[int], positions: Sequence[int]) -> None:
        """Put new context rows into the ring; `taps` holds their features. At most CONTEXT[-1] rows."""
        host, count = self._context.open(), len(slots)
        bucket = CONTEXT[bisect.bisect_left(CONTEXT, count)]
        host["slots"][:] = self.slots
        host["positions"][:] = 0
        host["slots"][:count], host["positions"][:count] = slots, positions
        self._context.send()
        self._run((bucket, 0))

    @torch.inference_mode()
    def block(
        self, anchors: Sequence[int], positions: Sequence[int], firsts: Sequence[int], slots: Sequence[int]
    ) -> tuple[np.ndarray, np.ndarray]:
        """One block per request. Returns ids int64 [R, S, K] and pair scores fp32 [R, S, K, K], and waits for them."""
        host, count = self._block.open(), len(anchors)
        requests = self.requests[bisect.bisect_left(self.requests, count)]
        for name, values in (("anchors", anchors), ("positions", positions), ("firsts", firsts), ("slots", slots)):
            host[name][:] = self.slots if name == "slots" else 0
            host[name][:count] = values
        self._block.send()
        self._run((requests, 1))
        if self._done is not None:
            self._done.record()
            self._done.synchronize()
        s, k = self.model.config.block_size - 1, self.model.config.selector_top_k
        flat, at = self._arrived.numpy(), requests * s * k
        ids = flat[:at].reshape(requests, s, k)[:count].astype(np.int64)
        edges = flat[at : at + at * k].copy().view(np.float32).reshape(requests, s, k, k)[:count]
        return ids, edges

    # -- the card's side -------------------------------------------------------------------------------------------

    def _enter(self, count: int) -> None:
        table = {name: t[:count].long() for name, t in self._context.card.items()}
        k, v = self.model.context(self.taps[:count], table["positions"])
        lanes = table["positions"] % self.model.config.window
        self.keys[:, table["slots"], :, lanes] = k
        self.values[:, table["slots"], :, lanes] = v

    def _propose(self, requests: int) -> None:
        m, c = self.model, self.model.config
        table = {name: t[:requests] for name, t in self._block.card.items()}
        anchors, positions = table["anchors"].long(), table["positions"].long()

        def attend(layer: int) -> Attend:
            def ring(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
                return ring_attention(
                    q, k, v, self.keys[layer], self.values[layer], table["slots"], table["positions"], table["firsts"],
                    self._partials, c.causal,
                )  # fmt: skip

            return ring

        y = m.rows(anchors, positions, attend)
        rows = y.shape[0] * y.shape[1]
        flat, logits, packed = y.flatten(0, 1).contiguous(), self._logits[:rows], self._packed[:rows]
        if isinstance(m.head, CardLinear):
            m.head.decode(flat, logits)
        else:
            logits.copy_(m.head(flat))
        self._top(logits, packed)
        k = c.selector_top_k
        places = packed[:, :k].clamp(min=0).long()  # a NaN row has no candidates
        ids, scores = m.scored(y.shape[:2], packed[:, k : 2 * k].contiguous().view(torch.float32), places)
        edges = m.edges(anchors, y, ids, scores).contiguous()
        sent = torch.cat([ids.int().flatten(), edges.view(torch.int32).flatten()])
        self._arrived[: sent.numel()].copy_(sent, non_blocking=True)
