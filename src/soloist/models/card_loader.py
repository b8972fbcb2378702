"""Loading for a card: fused projections keep their 4-bit form where all parts have it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from soloist.models.layers import Loader, Source
from soloist.ops.card_products import CardLinear, card_linear, fused_card_linear, runs_w4
from soloist.ops.linear import QuantizedWeight, Weight


class CardSource(Source, Protocol):
    """Where a card's weights come from."""

    def borrowed(self, module: str) -> QuantizedWeight | None:
        """A quantised `weight(module)` for who copies it at once: it may lie on the pages of a file. None: dense."""
        ...


class CardLoader(Loader):
    """Like Loader, with the card's products (ops/card_products.py) and vectors on the card."""

    source: CardSource

    def __init__(self, source: CardSource, device: torch.device, dtype: torch.dtype) -> None:
        self.source, self.device, self.dtype = source, device, dtype
        self.product, self.make = CardLinear.name, card_linear
        self.mixes_forms = False

    def linear(self, modules: Sequence[str], pad: int = 1) -> CardLinear:
        return fused_card_linear(self._weights(modules, pad), self.device, self.dtype, pad)

    def pair(self, modules: Sequence[str]) -> CardLinear:
        return fused_card_linear(self._weights(modules), self.device, self.dtype, paired=True)

    def table(self, module: str) -> Weight:
        borrowed = self.source.borrowed(module) if self.device.type == "cuda" else None
        return super().table(module) if borrowed is None else borrowed.to(self.device)

    def _weights(self, modules: Sequence[str], pad: int = 1) -> list[Weight]:
        """4-bit rows go from the file's pages to the card; others are copied and changed on the host first."""
        if pad == 1:
            borrowed = [self.source.borrowed(m) for m in modules]
            rows: list[Weight] = [w for w in borrowed if w is not None]
            if len(rows) == len(modules) and runs_w4(rows, self.device, self.dtype):
                return rows
        return [self.source.weight(m) for m in modules]
