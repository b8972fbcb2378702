"""The best entries of rows of 16-bit logits: what acceptance and drafting need of a row instead of the row.

Of every row the `count` largest entries, exactly (lowest ids win among equals), with its argmax, its maximum (NaN if
the row holds one anywhere) and the sum of exp(x - maximum). A card computes them without sorting (`ops/triton/top.py`),
behind the product that made the logits, and they travel to the host as one small block of integers.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

STATS = 4  # argmax, maximum, sum, spare


@dataclass(frozen=True)
class Heads:
    """Best entries of T rows on the host.

    ids int64 [T, n] ascending; values fp32 [T, n]; token int64 [T] and best fp32 [T]: argmax and maximum; total fp32
    [T]: sum over the whole row of exp(x - best). Rows shorter than n end in id -1 and value -inf.
    """

    ids: np.ndarray
    values: np.ndarray
    token: np.ndarray
    best: np.ndarray
    total: np.ndarray

    @classmethod
    def unpack(cls, packed: np.ndarray, count: int) -> Heads:
        """From int32 [T, 2 * count + STATS] as the kernels write it: ids, bits of the values, stats."""
        floats = packed.view(np.float32)
        return cls(
            packed[:, :count].astype(np.int64),
            floats[:, count : 2 * count].copy(),
            packed[:, 2 * count].astype(np.int64),
            floats[:, 2 * count + 1].copy(),
            floats[:, 2 * count + 2].copy(),
        )

    def part(self, start: int, stop: int) -> Heads:
        """Rows start .. stop - 1."""
        rows = slice(start, stop)
        return Heads(self.ids[rows], self.values[rows], self.token[rows], self.best[rows], self.total[rows])


def width(count: int) -> int:
    """int32 entries per row of the packed block."""
    return 2 * count + STATS


def row_heads(logits: torch.Tensor, count: int) -> Heads:
    """The reference: Heads of logits [T, V] by sorting."""
    x = logits.detach().cpu().float().numpy()
    rows, vocab = x.shape
    kept = min(count, vocab)
    ids = np.full((rows, count), -1, dtype=np.int64)
    values = np.full((rows, count), -np.inf, dtype=np.float32)
    ids[:, :kept] = np.sort(np.argsort(-x, axis=1, kind="stable")[:, :kept], axis=1)
    values[:, :kept] = np.take_along_axis(x, ids[:, :kept], 1)
    best = x.max(axis=1)
    with np.errstate(invalid="ignore"):
        total = np.exp((x - best[:, None]).astype(np.float64)).sum(axis=1)
    return Heads(ids, values, x.argmax(axis=1), best, total.astype(np.float32))
