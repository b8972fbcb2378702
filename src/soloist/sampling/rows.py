"""Raw logits of one verify step, read row by row, on whichever device they are.

On the host a row is a view. On an accelerator every look costs a transfer and a wait, so a verify step brings the
best entries of all its rows over in one small block (`ops/top.py`); a whole row is fetched only when an option needs
it. Values are the same either way.
"""

from __future__ import annotations

from functools import cached_property

import numpy as np
import torch

from soloist.ops.top import Heads

# Entries of a row that a card hands over with a step: twice the largest top-k that does without the row.
BEST = 128


class LogitRows:
    """Logits [T, V] of any float dtype and device; what is handed out is fp32 on the host and must not be written."""

    def __init__(self, logits: torch.Tensor, heads: Heads | None = None) -> None:
        self._logits, self.heads = logits.detach(), heads
        self.remote = logits.device.type != "cpu"

    @property
    def width(self) -> int:
        return self._logits.shape[1]

    def row(self, index: int) -> np.ndarray:
        """Row `index`, fp32 [V]."""
        if self._logits.dtype == torch.float32 and not self.remote:
            return self._logits.numpy()[index]
        return self._logits[index].to(device="cpu", dtype=torch.float32).numpy()

    def argmax(self, index: int) -> tuple[int, float]:
        """Token and logit of the row's maximum, lowest id on ties; a NaN anywhere makes the logit NaN."""
        if self.heads is not None:
            return int(self.heads.token[index]), float(self.heads.best[index])
        if self.remote:
            tokens, values = self._maxima
            return tokens[index], values[index]
        row = self.row(index)
        token = int(row.argmax())
        return token, float(row[token])

    @cached_property
    def _maxima(self) -> tuple[list[int], list[float]]:
        top = self._logits.max(dim=-1)
        return top.indices.tolist(), top.values.float().tolist()
