"""The MTP drafter of a card: passes and drafts are graphs (`models/card_mtp.py`), the choice is the reference's.

The card grows a draft by itself and hands over every level's candidates with the rows it ran. Here the same candidates
go through the reference's choice; as long as that asks for the rows the card ran, the draft goes on. Rounding may part
the two where candidates are all but equal: then the draft ends there, and what is proposed is exact either way.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from soloist.cache.kv import KVStore
from soloist.drafting.draft import Draft
from soloist.drafting.drafter import Ask
from soloist.drafting.mtp import MTPDrafter, _Path, _Request, _Step
from soloist.models.card_mtp import CardMTP, Levels, Settled, Wanted
from soloist.models.pictures import Sight
from soloist.sampling.rng import Stream, key_before_position


class CardMTPDrafter(MTPDrafter):
    """`MTPDrafter` whose decode steps run on the graphs of `card`; prompts, pictures and rows that do not fit a pass
    take the reference's road."""

    def __init__(self, card: CardMTP, kv: KVStore) -> None:
        super().__init__(card.module, kv, card.depth, beam=2)
        self.card = card
        module = card.module
        shape = (card.slots, module.config.hidden_size)
        self._kept = torch.zeros(shape, dtype=module.dtype, device=module.device)

    @property
    def nbytes(self) -> int:
        return self._kept.nbytes + self.card.outputs.nbytes

    def _remember(self, slot: int, hidden: torch.Tensor) -> None:
        # Features of a step are good until the next one only.
        self._before[slot] = self._kept[slot].copy_(hidden)

    def load(self, slot: int, cut: int, tensors: dict[str, torch.Tensor]) -> None:
        super().load(slot, cut, tensors)
        self._remember(slot, self._before[slot])

    def _pass(
        self,
        tokens: list[int],
        hidden: torch.Tensor,
        positions: list[int],
        sights: Sequence[tuple[Sight | None, int, int]],
        spans: dict[int, tuple[int, int]],
        pages: dict[int, Sequence[int]],
    ) -> dict[int, tuple[torch.Tensor, torch.Tensor]]:
        turns = dict.fromkeys(spans, 0)
        behind = True
        at = 0
        for sight, first, count in sights:
            slot = next(s for s, (a, b) in spans.items() if a <= at < b)
            at += count
            if sight is not None:
                behind = behind and first >= sight.pictures[-1].end
                turns[slot] = sight.offset
        if not behind or not self.card.fits([(positions[a], b - a) for a, b in spans.values()]):
            found = super()._pass(tokens, hidden, positions, sights, spans, pages)
            for slot in spans:
                self._output[slot] = self.card.outputs[slot].copy_(self._output[slot])
            return found
        self.card.hidden[: len(tokens)].copy_(hidden)
        self.card.settle(
            [Settled(slot, tokens[a:b], positions[a], turns[slot], pages[slot]) for slot, (a, b) in spans.items()]
        )
        for slot in spans:
            self._output[slot] = self.card.outputs[slot]
        return {}

    def propose(self, batch: Sequence[Ask]) -> list[Draft]:
        drafts = super().propose(batch)
        # Parts that nobody asked about, all of them where no draft pays, outlive this step's features.
        self._backlog.detach()
        return drafts

    def _catch_up(self, asks: Sequence[Ask]) -> None:
        """Every request's rows up to its anchor, in its pages."""
        for ask in asks:
            self._owe(ask)
        self._compute([ask.slot for ask in asks], anchors=True)

    def _grow(self, asks: Sequence[Ask]) -> list[_Request]:
        self._catch_up(asks)
        requests = [_Request(ask) for ask in asks]
        for tree in {ask.tree for ask in asks}:
            self._follow([r for r in requests if r.ask.tree is tree], self.beam if tree else 1)
        return requests

    def _follow(self, requests: Sequence[_Request], beam: int) -> None:
        """Let the card draft, then walk its candidates level by level."""
        levels = self.card.draft([_wanted(r.ask) for r in requests], beam)
        lines: list[list[int]] = [[0] for _ in requests]  # the card's line of every path of a request's frontier
        for level in range(self.depth):
            at = [(i, line) for i, mine in enumerate(lines) for line in mine]
            if not at:
                return
            rows, places = (list(x) for x in zip(*at, strict=True))
            ids, scores = levels.ids[level][rows, places], levels.values[level][rows, places]
            real = int((ids >= 0).sum(1).min())  # a head of fewer rows than candidates
            first = [len(r.graph.tokens) for r in requests]
            steps = self._extend(requests, ids[:, :real], scores[:, :real], level)
            for i, (r, chosen) in enumerate(zip(requests, steps, strict=True)):
                lines[i] = _enter(r, chosen, lines[i], levels, level, i, first[i])


def _enter(
    r: _Request, chosen: list[_Step], lines: list[int], levels: Levels, level: int, index: int, first: int
) -> list[int]:
    """The card's lines of the rows `chosen`, which become the frontier; none if the card ran others."""
    found: list[int] = []
    if chosen:
        ran = levels.chosen[level][index].tolist()
        wanted = [[step.token, lines[step.path]] for step in chosen]
        found = [ran.index(row) for row in wanted if row in ran]
    if len(found) < len(chosen):
        for nexts in r.graph.nexts[first:]:
            nexts[:] = [-1] * len(nexts)
        chosen, found = [], []
    state = len(r.graph.tokens)
    r.frontier = [_Path(state + n, (), step.alive) for n, step in enumerate(chosen)]
    return found


def _wanted(ask: Ask) -> Wanted:
    """What the card needs to forecast this request's choices."""
    noise: tuple[int, int] | None = None
    p = ask.params
    if ask.mode == "coupled" and (ask.tree or ask.sample):
        noise = key_before_position(ask.seed, Stream.TARGET)
    elif ask.mode == "rejection" and ask.sample and not ask.tree:
        noise = key_before_position(ask.seed, Stream.DRAFT)
    turn = ask.sight.offset if ask.sight else 0
    temperature = 1.0 if p.greedy or ask.mode == "greedy" else p.temperature
    return Wanted(ask.slot, ask.position, ask.pages, turn, noise, temperature, p.top_k, p.top_p, p.min_p)
