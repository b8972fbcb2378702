"""The seam for structured output: what the engine asks of a grammar, whoever implements it."""

from __future__ import annotations

from typing import Protocol

import torch


class Grammar(Protocol):
    """A matcher over token ids that can look ahead along drafts and roll back exactly.

    `active` is False while reasoning is open (the grammar has not started) - then nothing is masked.
    """

    @property
    def active(self) -> bool: ...

    @property
    def finished(self) -> bool:
        """True once only stop ids are allowed."""

    def advance(self, token: int) -> bool:
        """Consume an emitted or drafted token; False (and no change) if it is not allowed."""

    def rollback(self, tokens: int) -> None:
        """Undo the last `tokens` advances."""

    def mask(self, row: torch.Tensor) -> None:
        """Set the disallowed entries of one logits row [V] to -inf, in place."""

    def forced(self, limit: int) -> list[int]:
        """Up to `limit` tokens that the grammar dictates from here (free drafts)."""
