"""Loading for a card: fused projections keep their 4-bit form where all parts have it."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from soloist.models.layers import Loader, Source
from soloist.ops.card_products import CardLinear, card_linear, fused_card_linear


class CardLoader(Loader):
    """Like Loader, with the card's products (ops/card_products.py) and vectors on the card."""

    def __init__(self, source: Source, device: torch.device, dtype: torch.dtype) -> None:
        self.source, self.device, self.dtype = source, device, dtype
        self.product, self.make = CardLinear.name, card_linear
        self.mixes_forms = False

    def linear(self, modules: Sequence[str], pad: int = 1) -> CardLinear:
        return fused_card_linear([self.source.weight(m) for m in modules], self.device, self.dtype, pad)

    def pair(self, modules: Sequence[str]) -> CardLinear:
        return fused_card_linear([self.source.weight(m) for m in modules], self.device, self.dtype, paired=True)
