"""A speculation that knows the answer and proposes it with faults: every acceptance length, every tree shape."""

from __future__ import annotations

import random
from collections.abc import Sequence

from soloist.cache.kv import KVStore
from soloist.drafting.proposal import Proposal
from soloist.engine.request import Request
from soloist.engine.speculation import NoSpeculation


class Scripted(NoSpeculation):
    """Trees around the true continuation, broken off at a random depth and surrounded by wrong tokens.

    answers   prompt -> the tokens to come
    shape     "chain", "tree" (the true path is one branch among wrong ones), "wrong" (nothing is right), or a number:
              chains of so many tokens, all right
    """

    name = "scripted"

    def __init__(self, answers: dict[tuple[int, ...], Sequence[int]], shape: str, vocab: int, seed: int) -> None:
        self.answers, self.shape, self.vocab = answers, shape, vocab
        self.random = random.Random(seed)
        self.accepted: dict[int, int] = {}

    @property
    def stores(self) -> dict[str, KVStore]:
        return {}

    def propose(self, requests: Sequence[Request], limits: Sequence[int]) -> list[Proposal]:
        return [self._proposal(r, limit) for r, limit in zip(requests, limits, strict=True)]

    def observe(self, request: Request, proposal: Proposal, verdict) -> None:
        self.accepted[verdict.accepted] = self.accepted.get(verdict.accepted, 0) + 1

    def _proposal(self, request: Request, limit: int) -> Proposal:
        rng = self.random
        truth = list(self.answers.get(tuple(request.prompt), ()))[len(request.output) :]
        if self.shape.isdigit():
            return Proposal.chain(truth[: min(limit, int(self.shape))], "scripted")
        size = rng.randrange(0, limit + 1)
        right = 0 if self.shape == "wrong" else rng.randrange(0, min(size, len(truth)) + 1)
        tokens: list[int] = []
        parents: list[int] = []
        taken: set[tuple[int, int]] = set()
        true_end, placed = -1, 0
        while len(tokens) < size:
            if placed < right and (self.shape == "chain" or rng.random() < 0.5):
                parent, token = true_end, truth[placed]
                placed += 1
            elif self.shape == "chain":
                parent, token = len(tokens) - 1, self._wrong(truth, len(tokens))
            else:
                parent = rng.randrange(-1, len(tokens))
                token = self._wrong(truth, placed if parent == true_end else 0)
            if (parent, token) in taken:
                # The true token may already stand there by chance; then the true path goes through it.
                if placed and token == truth[placed - 1] and parent == true_end:
                    true_end = next(i for i in range(len(tokens)) if (parents[i], tokens[i]) == (parent, token))
                continue
            taken.add((parent, token))
            tokens.append(token)
            parents.append(parent)
            if placed and parent == true_end and token == truth[placed - 1]:
                true_end = len(tokens) - 1
        n = len(tokens)
        return Proposal(tokens, parents, [None] * n, ["scripted"] * n, [1.0] * n)

    def _wrong(self, truth: Sequence[int], at: int) -> int:
        token = self.random.randrange(self.vocab)
        if at < len(truth) and token == truth[at]:
            token = (token + 1) % self.vocab
        return token


def distinct_grams(tokens: Sequence[int], n: int = 8) -> float:
    """Share of distinct n-grams: below 0.6 a text loops, and loops hide faults."""
    grams = [tuple(tokens[i : i + n]) for i in range(len(tokens) - n + 1)]
    return len(set(grams)) / max(1, len(grams))
