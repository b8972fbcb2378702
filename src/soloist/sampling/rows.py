"""Raw logits of one verify step, read row by row, on whichever device they are.

On the host a row is a view. On an accelerator every look costs a transfer and a wait, so the argmaxes, or the
best few entries, of all rows come over together the first time one is asked for; a whole row is fetched only
when an option needs it. Values are the same either way.
"""

from __future__ import annotations

from functools import cached_property

import numpy as np
import torch


class LogitRows:
    """Logits [T, V] of any float dtype and device; what is handed out is fp32 on the host and must not be written."""

    def __init__(self, logits: torch.Tensor) -> None:
        self._logits = logits.detach()
        self.remote = logits.device.type != "cpu"
        self._heads: tuple[int, np.ndarray, np.ndarray] | None = None

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

    def head(self, index: int, count: int) -> tuple[np.ndarray, np.ndarray]:
        """The `count` largest entries of the row as (ids int64 ascending, logits fp32); which of several equal ones
        at the edge are among them is not defined."""
        if self._heads is None or self._heads[0] != count:
            top = self._logits.topk(count, dim=-1, sorted=False)
            self._heads = (count, top.indices.cpu().numpy(), top.values.float().cpu().numpy())
        _, ids, values = self._heads
        order = ids[index].argsort()
        return ids[index][order], values[index][order]
