"""The DFlash2 drafter of a card: context and blocks are graphs (`models/card_dflash2.py`), the walk is the
reference's."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from soloist.drafting.dflash2 import DFlash2Drafter
from soloist.drafting.draft import Draft
from soloist.drafting.drafter import Ask
from soloist.models.captured import Mode
from soloist.models.card_dflash2 import CONTEXT, CardDFlash2
from soloist.models.dflash2 import DFlash2


class CardDFlash2Drafter(DFlash2Drafter):
    """`DFlash2Drafter` over one slot more than are served: padding rows of a graph write there."""

    def __init__(self, model: DFlash2, slots: int, mode: Mode = "on") -> None:
        super().__init__(model, slots + 1)
        self.card = CardDFlash2(model, self.keys, self.values, mode)

    def _context_rows(self, taps: list[torch.Tensor], owner: list[int], positions: list[int]) -> None:
        if len(owner) > CONTEXT[-1]:
            super()._context_rows(taps, owner, positions)
            return
        torch.cat(taps, out=self.card.taps[: len(owner)])
        self.card.enter(owner, positions)

    def propose(self, batch: Sequence[Ask]) -> list[Draft]:
        drafts = super().propose(batch)
        # Parts that nobody asked about outlive this step's features.
        self._backlog.detach()
        return drafts

    def _blocks(self, asks: Sequence[Ask]) -> tuple[np.ndarray, np.ndarray]:
        firsts = [first for first, _ in self._spans(asks)]
        return self.card.block([a.anchor for a in asks], [a.position for a in asks], firsts, [a.slot for a in asks])
