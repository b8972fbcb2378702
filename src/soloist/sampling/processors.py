"""From one row of raw logits to the law its token is drawn from.

The order is fixed (numbers as in `target_law`): grammar mask; allowed ids, min_tokens, logit_bias;
penalties; bad words; the thinking budget's forced token; then greedy stops, sampling goes on with
temperature, min-p, top-k, top-p, softmax. Steps 1-4 depend on the row's own ancestors, which the
caller has pushed on the History.

A row is processed alone, in a buffer of its own, so its law cannot depend on the rows beside it. Work
is proportional to what is asked: greedy with nothing else on is one argmax; with a top-k the vocabulary is
passed over twice and everything after happens on the few survivors.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch

from soloist.errors import EngineError
from soloist.ops.top import Heads
from soloist.sampling.history import History
from soloist.sampling.params import SamplingParams
from soloist.sampling.rng import GUMBEL_MAX, GUMBEL_MIN, Noise, perturbed_argmax
from soloist.sampling.rows import LogitRows

# Top-p without top-k looks at this many best tokens before it sorts the whole row.
_SORT_FIRST = 512

# How far a sum over a row in fp32 may be from the exact one, with room to spare; closer calls look at the row.
_SLACK = 1e-4


@dataclass(frozen=True)
class TargetLaw:
    """A sparse law over token ids.

    ids     int64 [n], ascending
    scores  fp32 [n], log-probabilities up to a constant: the largest is 0
    """

    ids: np.ndarray
    scores: np.ndarray

    @cached_property
    def probs(self) -> np.ndarray:
        """Probabilities fp64 [n], summing to 1."""
        weights = np.exp(self.scores.astype(np.float64))
        return weights / weights.sum()

    @classmethod
    def point(cls, token: int) -> TargetLaw:
        return cls(np.array([token], dtype=np.int64), np.zeros(1, dtype=np.float32))

    @classmethod
    def of(cls, ids: np.ndarray, logits: np.ndarray) -> TargetLaw:
        """The law softmax(logits) on ascending ids; -inf entries are dropped."""
        best = logits.max()
        scores = (logits - best).astype(np.float32)
        if scores.min() == -np.inf:
            keep = (scores > -np.inf).nonzero()[0]
            ids, scores = ids[keep], scores[keep]
        return cls(ids, scores)

    def prob(self, token: int) -> float:
        """The probability of one token, 0 outside the support."""
        i = int(self.ids.searchsorted(token))
        return float(self.probs[i]) if i < len(self.ids) and self.ids[i] == token else 0.0

    def sample(self, noise: Noise) -> int:
        """The Gumbel-max draw: argmax of score + noise, ties to the lowest id."""
        ids, scores = self.ids, self.scores
        if len(ids) == 1:
            return int(ids[0])
        if len(ids) > 128:
            # The best token scores at least GUMBEL_MIN; what cannot reach that with the largest noise cannot win.
            keep = (scores > GUMBEL_MIN - GUMBEL_MAX - 1e-3).nonzero()[0]
            ids, scores = ids[keep], scores[keep]
        return int(ids[perturbed_argmax(ids, scores, noise)])


def _kth_largest(x: np.ndarray, k: int) -> np.float32:
    return np.float32(torch.from_numpy(x).topk(k, sorted=True).values[-1].item())


def best_places(x: np.ndarray, n: int) -> list[int]:
    """The indices of the n largest entries of fp32 [V], best first, lowest index first among equals."""
    if n <= 1:
        return [int(x.argmax())][:n]
    ids = (x >= _kth_largest(x, n)).nonzero()[0] if n < len(x) else np.arange(len(x))
    return ids[np.argsort(-x[ids], kind="stable")][:n].tolist()


def check_finite(best: float, index: int, what: str = "") -> None:
    """Raise EngineError unless the maximum of row `index` is finite; `what` names constraints that may empty it."""
    if not math.isfinite(best):
        if best == -math.inf and what:
            raise EngineError(f"Row {index}: {what} leave no token to emit.")
        raise EngineError(f"The logits of row {index} are not finite (maximum {best}).")


def _constrain(raw: np.ndarray, history: History) -> np.ndarray:
    """Steps 1-4 without the forced token, on a private copy of the row."""
    p = history.params
    x = raw.copy()
    grammar = history.grammar
    if grammar is not None and grammar.active:
        grammar.mask(torch.from_numpy(x))
    if p.allowed_ids is not None:
        allowed = np.asarray(p.allowed_ids, dtype=np.int64)
        kept = x[allowed]
        x.fill(-np.inf)
        x[allowed] = kept
    # A finished grammar allows nothing but a stop: it outranks min_tokens, or no token would be left.
    if p.min_tokens > len(history.output) and p.stop_ids and not (grammar and grammar.active and grammar.finished):
        x[list(p.stop_ids)] = -np.inf
    if p.logit_bias:
        x[list(p.logit_bias)] += np.fromiter(p.logit_bias.values(), dtype=np.float32)
    if history.counting:
        _penalise(x, history)
    if p.bad_words:
        x[history.banned_words()] = -np.inf
    return x


def _penalise(x: np.ndarray, history: History) -> None:
    """Step 3 in place: repetition over prompt and output, frequency and presence over the output."""
    p = history.params
    if p.repetition_penalty != 1.0:
        ids = history.seen.nonzero()[0]
        r = np.float32(p.repetition_penalty)
        values = x[ids]
        x[ids] = np.where(values > 0, values / r, values * r)
    if p.frequency_penalty or p.presence_penalty:
        ids = history.counts.nonzero()[0]
        x[ids] -= np.float32(p.frequency_penalty) * history.counts[ids].astype(np.float32)
        x[ids] -= np.float32(p.presence_penalty)


def processed(rows: LogitRows, index: int, history: History) -> np.ndarray | int:
    """Steps 0-4 of row `index`: fp32 logits [V] (to be read, not written), or the token that is forced.

    Raises EngineError if the raw row holds NaN or +inf, or if no token is allowed.
    """
    raw = rows.row(index)
    check_finite(float(raw.max()), index)
    forced = history.forced_token()
    if forced is not None:
        return forced
    if history.plain:
        return raw
    x = _constrain(raw, history)
    check_finite(float(x.max()), index, "the grammar, allowed_token_ids, min_tokens and bad_words together")
    return x


def greedy_token(rows: LogitRows, index: int, history: History) -> int:
    """Step 5: the argmax of the processed row, lowest id on ties."""
    if history.plain:
        token, best = rows.argmax(index)
        check_finite(best, index)
        return token
    x = processed(rows, index, history)
    return x if isinstance(x, int) else int(x.argmax())


def target_law(rows: LogitRows, index: int, history: History) -> TargetLaw:
    """Steps 0-10: the law p of row `index`, whose ancestors are pushed on `history`.

    At temperature 0 the point mass on the argmax. Raises EngineError as `processed` does.
    """
    p = history.params
    if p.greedy:
        return TargetLaw.point(greedy_token(rows, index, history))
    if rows.heads is not None and history.plain:
        law = _law_of_head(rows.heads, index, p)
        if law is not None:
            return law
    x = processed(rows, index, history)
    if isinstance(x, int):
        return TargetLaw.point(x)
    return truncated(None, x, p.temperature, p.top_k, p.top_p, p.min_p)


def _law_of_head(heads: Heads, index: int, p: SamplingParams) -> TargetLaw | None:
    """`target_law` of a plain row from its best entries, the same bits; None where they do not settle it."""
    check_finite(float(heads.best[index]), index)
    ids, logits = heads.ids[index], heads.values[index]
    if ids[-1] < 0:  # a vocabulary smaller than the head
        ids, logits = ids[ids >= 0], logits[ids >= 0]
    with np.errstate(over="ignore", divide="ignore", invalid="ignore"):
        scaled = logits / np.float32(p.temperature)
    least, best = scaled.min(), scaled.max()
    if not math.isfinite(best):
        return None
    floor = np.float32(-np.inf)
    if p.min_p > 0:
        floor = np.float32(best + math.log(p.min_p))
    if 0 < p.top_k < len(ids):
        floor = max(floor, _kth_largest(scaled, p.top_k))
    # Nothing outside the head is better than its least entry. Written so that a NaN goes the long way.
    if floor > least:
        return truncated(ids, logits, p.temperature, p.top_k, p.top_p, p.min_p)
    if p.min_p > 0 or p.top_k > 0 or p.top_p >= 1.0 or p.temperature > 1.0:
        return None
    return _nucleus_of_head(TargetLaw(ids, (scaled - best).astype(np.float32)), logits, float(heads.total[index]), p)


def _nucleus_of_head(law: TargetLaw, logits: np.ndarray, total: float, p: SamplingParams) -> TargetLaw | None:
    """Step 9 where only the row's best entries are at hand: `law` before normalising, `total` the sum of
    exp(logit - best) over the whole row. None unless the nucleus ends inside, whatever the rest of the row is."""
    weights = np.exp(law.scores.astype(np.float64))
    raw = (logits - logits.max()).astype(np.float64)
    outside = max(0.0, total * (1 + _SLACK) - float(np.exp(raw).sum()))
    # A temperature below 1 shrinks what lies outside at least as much as it shrinks the least entry inside.
    most = float(weights.sum()) + outside * math.exp(float(raw.min()) * (1.0 / p.temperature - 1.0))
    order = (-law.scores).argsort(kind="stable")
    mass = weights[order].cumsum()
    end = int(mass.searchsorted(p.top_p * most * (1 + _SLACK)))
    least = float(weights.sum()) if p.temperature < 1.0 else max(float(weights.sum()), total * (1 - _SLACK))
    if end >= len(mass) or (end > 0 and mass[end - 1] >= p.top_p * least * (1 - _SLACK)):
        return None
    kept = np.sort(order[: 1 + end])
    if not law.scores[kept].min() > law.scores.min():
        return None  # equal entries outside might come before the last of these
    return TargetLaw(law.ids[kept], law.scores[kept])


def truncated(
    ids: np.ndarray | None, logits: np.ndarray, temperature: float, top_k: int, top_p: float, min_p: float
) -> TargetLaw:
    """Steps 6-10 on logits fp32 [n] of ascending ids int64 [n] (None: 0..n-1).

    Ties at the k-th value are all kept; among equal logits at the top-p edge the lowest ids stay.
    """
    with np.errstate(over="ignore", divide="ignore", invalid="ignore"):
        x = logits if temperature == 1.0 else logits / np.float32(temperature)
    best = x.max()
    if not math.isfinite(best):  # a tiny temperature overflowed: only the argmax is left
        place = int(logits.argmax())
        return TargetLaw.point(place if ids is None else int(ids[place]))
    floor = np.float32(-np.inf)
    if min_p > 0:
        floor = np.float32(best + math.log(min_p))
    if 0 < top_k < len(x):
        floor = max(floor, _kth_largest(x, top_k))
    if floor > -np.inf:
        keep = (x >= floor).nonzero()[0]
        x = x[keep]
        ids = keep if ids is None else ids[keep]
    elif ids is None:
        ids = np.arange(len(x), dtype=np.int64)
    law = TargetLaw.of(ids, x)
    return law if top_p >= 1.0 else _nucleus(law, top_p)


def _nucleus(law: TargetLaw, top_p: float) -> TargetLaw:
    """Step 9: the smallest prefix, in order of falling probability, whose mass reaches `top_p`."""
    head = np.arange(len(law.ids))
    if len(head) > 2 * _SORT_FIRST:
        first = (law.scores >= _kth_largest(law.scores, _SORT_FIRST)).nonzero()[0]
        if law.probs[first].sum() > top_p:
            head = first
    order = head[(-law.scores[head]).argsort(kind="stable")]
    mass = law.probs[order].cumsum()
    kept = np.sort(order[: 1 + int(mass.searchsorted(top_p))])
    return TargetLaw(law.ids[kept], law.scores[kept])
