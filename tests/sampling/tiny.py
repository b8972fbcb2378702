"""A target and a drafter on a handful of tokens, small enough to enumerate every path.

`Tiny.logits(prefix)` is a random conditional table: the same prefix always gives the same row. The enumeration below
restates laws with plain dense numpy, apart from the code under test.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterator, Sequence
from functools import cache, lru_cache

import numpy as np
import torch

from soloist.drafting.proposal import Law, Proposal
from soloist.sampling.history import History
from soloist.sampling.params import SamplingParams
from soloist.sampling.processors import target_law
from soloist.sampling.rows import LogitRows
from soloist.sampling.verify import branch_trials

Draft = tuple[Proposal, float]
Drafter = Callable[[tuple[int, ...]], Iterator[Draft]]


class Tiny:
    """Random conditional logits, fp32 [vocab], of standard deviation `spread` for every prefix."""

    def __init__(self, vocab: int, seed: int, spread: float = 1.2) -> None:
        self.vocab, self.seed, self.spread = vocab, seed, spread
        self.logits = cache(self._logits)
        self._rows = lru_cache(100_000)(self._path_rows)

    def _logits(self, prefix: tuple[int, ...]) -> np.ndarray:
        key = zlib.crc32(bytes([self.seed, *prefix]))
        return (np.random.default_rng(key).standard_normal(self.vocab) * self.spread).astype(np.float32)

    def rows(self, prefix: tuple[int, ...], proposal: Proposal) -> torch.Tensor:
        """Logits of the anchor and every node, each given its own ancestors only."""
        return self._rows(prefix, tuple(proposal.tokens), tuple(proposal.parents))

    def _path_rows(self, prefix: tuple[int, ...], tokens: tuple[int, ...], parents: tuple[int, ...]) -> torch.Tensor:
        paths = [prefix]
        for token, parent in zip(tokens, parents, strict=True):
            paths.append((*paths[parent + 1], token))
        return torch.from_numpy(np.stack([self.logits(p) for p in paths]))

    def probs(self, prefix: tuple[int, ...]) -> np.ndarray:
        return softmax(self.logits(prefix))


def softmax(x: np.ndarray) -> np.ndarray:
    e = np.exp(x.astype(np.float64) - x.max())
    return e / e.sum()


def dense_law(x: np.ndarray, params: SamplingParams, prompt: Sequence[int], output: Sequence[int]) -> np.ndarray:
    """Steps 3 and 6-10 in dense numpy with full sorts: the law of one row, probabilities [V]."""
    x = x.astype(np.float32).copy()
    for t in set(prompt) | set(output):
        x[t] = x[t] / params.repetition_penalty if x[t] > 0 else x[t] * params.repetition_penalty
    for t in set(output):
        x[t] -= params.frequency_penalty * list(output).count(t) + params.presence_penalty
    x = x / np.float32(params.temperature)
    if params.min_p > 0:
        x[x < x.max() + math.log(params.min_p)] = -np.inf
    if 0 < params.top_k < len(x):
        x[x < np.sort(x)[-params.top_k]] = -np.inf
    p = softmax(x)
    order = np.argsort(-p, kind="stable")
    before = np.concatenate([[0.0], np.cumsum(p[order])[:-1]])
    if params.top_p < 1:
        p[order[(before >= params.top_p) & (np.arange(len(p)) > 0)]] = 0.0
    return p / p.sum()


def sparse(q: np.ndarray) -> Law:
    ids = np.flatnonzero(q)
    return Law(tuple(ids.tolist()), tuple(q[ids].tolist()))


def keep_top(q: np.ndarray, k: int) -> np.ndarray:
    out = np.where(q >= np.sort(q)[-k], q, 0.0)
    return out / out.sum()


def verdict_law(target: Tiny, proposal: Proposal, prefix: tuple[int, ...], params: SamplingParams) -> dict:
    """Law of the emitted run for one fixed proposal, rejection mode, through the real trials."""
    rows, children = target.rows(prefix, proposal), proposal.children()
    history = History(params, [], target.vocab)
    for token in prefix:
        history.advance(token)
    out: dict[tuple[int, ...], float] = {}

    def walk(row: int, emitted: tuple[int, ...], mass: float) -> None:
        law = target_law(LogitRows(rows), row, history)
        for trial in branch_trials(law, proposal, children[row]):
            if trial.rest is not None:
                for t, p in zip(trial.rest.ids.tolist(), trial.rest.probs.tolist(), strict=True):
                    out[*emitted, t] = out.get((*emitted, t), 0.0) + mass * p
                return
            if trial.accept > 0:
                token = proposal.tokens[trial.node]
                history.push(token)
                walk(trial.node + 1, (*emitted, token), mass * trial.accept)
                history.pop()
            mass *= 1.0 - trial.accept

    walk(0, (), 1.0)
    return out


def emitted_law(target: Tiny, drafter: Drafter, params: SamplingParams, tokens: int) -> np.ndarray:
    """Joint law [V] * tokens of the first emitted tokens: every draft, every verdict, then drafting again."""

    @cache
    def following(prefix: tuple[int, ...]) -> np.ndarray:
        """Law of the tokens still missing after `prefix`."""
        missing = tokens - len(prefix)
        out = np.zeros((target.vocab,) * missing)
        if missing == 0:
            return np.ones(())
        for proposal, chance in drafter(prefix):
            for run, p in verdict_law(target, proposal, prefix, params).items():
                out[run[:missing]] += chance * p * following(prefix + run[:missing])
        return out

    return following(())


def true_law(target: Tiny, params: SamplingParams, tokens: int) -> np.ndarray:
    """The same joint law without speculation, from `dense_law`. The prompt is empty, so output = prefix."""
    out = np.zeros((target.vocab,) * tokens)

    def extend(prefix: tuple[int, ...], mass: float) -> None:
        if len(prefix) == tokens:
            out[prefix] += mass
            return
        for t, p in enumerate(dense_law(target.logits(prefix), params, (), prefix)):
            if p:
                extend((*prefix, t), mass * p)

    extend((), 1.0)
    return out
