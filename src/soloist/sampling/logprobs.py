"""Log-probabilities as reported to users: of the raw row, before any processor (mode "raw").

Each row is reduced alone, in fp64, and rounded once to fp32, so a value does not depend on the rows beside it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch

from soloist.sampling.processors import best_places, check_finite
from soloist.sampling.rows import LogitRows


@dataclass(frozen=True)
class TokenLogprobs:
    """Raw log-probability and rank (1 = best) of a token, and the n best alternatives as (id, log-probability)."""

    token: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...] = ()


def token_logprobs(rows: torch.Tensor, index: int, token: int, top: int = 0) -> TokenLogprobs:
    """Log-probabilities of row `index` of raw logits [T, V] for the token it produced.

    `top` best entries, best first, lowest id first among equals. The rank counts strictly larger logits.
    """
    x = LogitRows(rows).row(index)
    best = float(x.max())
    check_finite(best, index)
    # The normaliser in fp64: 16k fp32 terms lose digits that a user can see in the fifth decimal.
    norm = best + math.log(float(np.exp((x - np.float32(best)).astype(np.float64)).sum()))

    def logprob(i: int) -> float:
        return float(np.float32(float(x[i]) - norm))

    rank = 1 + int(np.count_nonzero(x > x[token]))
    return TokenLogprobs(token, logprob(token), rank, tuple((i, logprob(i)) for i in best_places(x, top)))


def prompt_logprobs(rows: torch.Tensor, following: list[int], top: int) -> list[TokenLogprobs]:
    """Prompt log-probabilities: row i of prefill logits [R, V] predicts following[i] (R entries)."""
    return [token_logprobs(rows, i, token, top) for i, token in enumerate(following)]
