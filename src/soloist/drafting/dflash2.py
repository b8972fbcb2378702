"""Drafting with the DFlash2 block network: a ring of context per slot, one block pass, a walk over candidate pairs.

Context keys and values live in a ring of `window` positions: position p at lane p % window. Only settled tokens enter;
the block's own rows never do.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from soloist.cache.kv import KVStore
from soloist.drafting.choice import pick, rank
from soloist.drafting.draft import CandidateGraph, Draft
from soloist.drafting.drafter import Ask, Backlog, SettledTokens
from soloist.drafting.proposal import Law
from soloist.models.dflash2 import DFlash2

# Alternatives kept per predecessor: a tree of 15 nodes hardly ever takes a seventh.
WIDTH = 6
EAGER = 64


class DFlash2Drafter:
    """The drafter over `slots` slots. `depth` = block size - 1."""

    name = "dflash2"

    def __init__(self, model: DFlash2, slots: int) -> None:
        c = model.config
        self.model = model
        self.taps = c.tap_layers
        self.depth = c.block_size - 1
        shape = (c.num_layers, slots, c.num_kv_heads, c.window, c.head_dim)
        self.keys = torch.zeros(shape, dtype=model.dtype, device=model.device)
        self.values = torch.zeros(shape, dtype=model.dtype, device=model.device)
        # Positions first .. end - 1 of a slot were absorbed.
        self._span: dict[int, tuple[int, int]] = {}
        self._backlog = Backlog(EAGER)
        self._next = self._successors()

    @property
    def stores(self) -> Mapping[str, KVStore]:
        return {}

    @property
    def nbytes(self) -> int:
        return self.keys.nbytes + self.values.nbytes

    def _successors(self) -> np.ndarray:
        """State reached by candidate b of slot s: [S, K]. State 0 is the anchor, 1 + s * K + b that candidate."""
        slots, width = self.depth, self.model.config.selector_top_k
        states = 1 + np.arange(slots * width).reshape(slots, width)
        states[-1] = -1
        return states

    # -- what is kept ----------------------------------------------------------------------------------------------

    def absorb(self, batch: Sequence[SettledTokens]) -> None:
        full = [part.slot for part in batch if self._backlog.add(part)]
        self._compute(full)

    def _compute(self, slots: Sequence[int]) -> None:
        """Turn the backlog of these slots into context."""
        parts = self._backlog.take(slots)
        if not parts:
            return
        window = self.model.config.window
        taps: list[torch.Tensor] = []
        owner: list[int] = []
        positions: list[int] = []
        for part in parts:
            assert part.taps is not None
            first, end = self._span.get(part.slot, (part.start, part.start))
            # A gap starts afresh; going back keeps what later positions have not yet pushed out of the ring.
            first = part.start if part.start > end else min(max(first, end - window), part.start)
            self._span[part.slot] = (first, part.end)
            start = max(part.start, part.end - window)
            taps.append(part.taps[start - part.start :])
            owner += [part.slot] * (part.end - start)
            positions += range(start, part.end)
        self._context_rows(taps, owner, positions)

    def _context_rows(self, taps: list[torch.Tensor], owner: list[int], positions: list[int]) -> None:
        """Turn rows of taps, in order, into context of their slots at their positions."""
        at = torch.tensor(positions, device=self.model.device)
        k, v = self.model.context(torch.cat(taps), at)
        rows, lanes = torch.tensor(owner, device=at.device), at % self.model.config.window
        self.keys[:, rows, :, lanes] = k
        self.values[:, rows, :, lanes] = v

    def drop(self, slot: int) -> None:
        self._backlog.drop(slot)
        self._span.pop(slot, None)

    def export(self, slot: int, cut: int) -> dict[str, torch.Tensor]:
        self._compute([slot])
        first, end = self._span.get(slot, (0, 0))
        if end != cut:
            raise ValueError(f"slot {slot} has absorbed {end} tokens, not {cut}")
        lanes = torch.arange(max(first, cut - self.model.config.window), cut) % self.model.config.window
        lanes = lanes.to(self.keys.device)
        return {"dflash2.keys": self.keys[:, slot, :, lanes], "dflash2.values": self.values[:, slot, :, lanes]}

    def load(self, slot: int, cut: int, tensors: dict[str, torch.Tensor]) -> None:
        self.drop(slot)
        keys, values = tensors["dflash2.keys"], tensors["dflash2.values"]
        first = cut - keys.shape[2]
        lanes = torch.arange(first, cut, device=self.keys.device) % self.model.config.window
        self.keys[:, slot, :, lanes] = keys.to(self.keys.device)
        self.values[:, slot, :, lanes] = values.to(self.values.device)
        self._span[slot] = (first, cut)

    # -- drafting --------------------------------------------------------------------------------------------------

    def propose(self, batch: Sequence[Ask]) -> list[Draft]:
        asked = [i for i, ask in enumerate(batch) if ask.count > 0]
        drafts = [Draft(self.name) for _ in batch]
        if not asked:
            return drafts
        asks = [batch[i] for i in asked]
        self._compute([ask.slot for ask in asks])
        for i, ask, row, pairs in zip(asked, asks, *self._blocks(asks), strict=True):
            drafts[i] = self._walk(ask, row, pairs)
        return drafts

    def _blocks(self, asks: Sequence[Ask]) -> tuple[np.ndarray, np.ndarray]:
        """One block per request: candidates int64 [R, S, K] and pair scores fp32 [R, S, K, K]."""
        anchors = torch.tensor([ask.anchor for ask in asks], device=self.model.device)
        positions = torch.tensor([ask.position for ask in asks], device=self.model.device)
        y = self.model.block(anchors, positions, *self._context(asks, positions))
        ids, scores = self.model.candidates(y)
        edges = self.model.edges(anchors, y, ids, scores)
        return ids.cpu().numpy(), edges.cpu().numpy()

    def _spans(self, asks: Sequence[Ask]) -> list[tuple[int, int]]:
        """(first, end) of what each slot holds. Raises ValueError where an anchor does not follow."""
        spans = [self._span.get(ask.slot, (ask.position, ask.position)) for ask in asks]
        for ask, (_, end) in zip(asks, spans, strict=True):
            if end != ask.position:
                raise ValueError(f"slot {ask.slot} has absorbed {end} tokens; its anchor is at {ask.position}")
        return spans

    def _context(self, asks: Sequence[Ask], positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Keys, values [layers, R, kv, L, D] of these slots and what each block row sees, bool [R, block, L]."""
        c, spans = self.model.config, self._spans(asks)
        # Until a slot is as long as the window its positions are its lanes, and the rest of the ring is empty.
        used = min(c.window, max(1, max(end for _, end in spans)))
        device = self.model.device
        lanes = torch.arange(used, device=device)
        first = torch.tensor([[f] for f, _ in spans], device=device)
        # The newest position that lies at each lane.
        held = positions[:, None] - 1 - (positions[:, None] - 1 - lanes) % c.window
        rows = positions[:, None] + torch.arange(c.block_size, device=device)
        near = rows[:, :, None] - held[:, None] < c.window
        visible = near & (held >= first)[:, None]
        slots = torch.tensor([ask.slot for ask in asks], device=device)
        keys = self.keys[:, :, :, :used].index_select(1, slots)
        values = self.values[:, :, :, :used].index_select(1, slots)
        return keys, values, visible

    def _walk(self, ask: Ask, ids: np.ndarray, edges: np.ndarray) -> Draft:
        """A path through the candidates ids [S, K] by their pair scores edges [S, K, K], and the graph if wanted."""
        tokens: list[int] = []
        laws: list[Law | None] = []
        probs: list[float] = []
        edges = np.nan_to_num(edges, nan=-1e30, neginf=-1e30)
        before = 0
        for s in range(min(ask.count, self.depth)):
            before, law, prob = pick(ids[s], edges[s, before], ask, ask.position + 1 + s)
            tokens.append(int(ids[s, before]))
            laws.append(law)
            probs.append(prob)
        graph = self._graph(ask, ids, edges) if ask.tree else None
        return Draft(self.name, tokens, laws, probs, graph)

    def _graph(self, ask: Ask, ids: np.ndarray, edges: np.ndarray) -> CandidateGraph:
        """All candidates after every candidate, `WIDTH` best each."""
        slots, width = ids.shape
        order, probs = rank(ids, edges, ask, range(ask.position + 1, ask.position + 1 + slots), WIDTH)
        tokens = np.take_along_axis(np.broadcast_to(ids[:, None], edges.shape), order, -1)
        nexts = np.take_along_axis(np.broadcast_to(self._next[:, None], edges.shape), order, -1)

        def flat(x: np.ndarray) -> list[list]:
            return [x[0, 0].tolist(), *x[1:].reshape((slots - 1) * width, -1).tolist()]

        return CandidateGraph(flat(tokens), flat(probs), flat(nexts))
