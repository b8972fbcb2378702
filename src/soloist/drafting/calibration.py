"""How often did proposals like this one survive? Decayed counts per request, source and evidence.

A node's raw score (a drafter's probability, the length of a copied run) says little until it is set against what
happened to such nodes in this request. `Rates` keeps decayed accept and trial counts per bucket of evidence, over a
prior that trusts the raw score: a fresh request starts sensibly, and a few dozen tokens correct it.

What can go wrong: under rejection sampling an estimate may steer the proposal only if it was known before the draw.
`Rates` learns from finished steps alone, and a node that was drawn from its law is described by `drawn`, which looks
at its depth and never at its token.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, field
from typing import NamedTuple

SCORE_EDGES = (0.05, 0.12, 0.25, 0.4, 0.55, 0.7, 0.8, 0.9, 0.96, 0.99)
RUN_EDGES = (8, 12, 16, 24, 48)
RUN_PRIOR = (0.55, 0.65, 0.75, 0.85, 0.92, 0.97)
DEPTH_PRIOR = (0.7, 0.65, 0.6, 0.6, 0.55, 0.5, 0.5, 0.5)


class Evidence(NamedTuple):
    """What is known about a node before it is verified: the bucket it is counted in, and the prior of that bucket."""

    kind: str
    bucket: int
    prior: float


FORCED = Evidence("grammar", 0, 0.98)


def scored(source: str, score: float) -> Evidence:
    """A deterministic node that its drafter gives probability `score`."""
    return Evidence(source, bisect_right(SCORE_EDGES, score), score)


def drawn(source: str, depth: int) -> Evidence:
    """A node drawn from its law; `depth` 0 is the first draft."""
    depth = min(depth, len(DEPTH_PRIOR) - 1)
    return Evidence(f"{source} drawn", depth, DEPTH_PRIOR[depth])


def copied(run: int, agrees: bool | None = None) -> Evidence:
    """A lookup token after `run` tokens known to agree; `agrees`: whether the drafter's first choice is the same."""
    bucket = bisect_right(RUN_EDGES, run)
    prior = RUN_PRIOR[bucket]
    if agrees is None:
        return Evidence("lookup", bucket, prior)
    if agrees:
        return Evidence("lookup agreeing", bucket, 1 - 0.4 * (1 - prior))
    return Evidence("lookup differing", bucket, 0.6 * prior)


@dataclass
class Rates:
    """Acceptance of one request's proposals, given that the node before them was accepted.

    strength  weight of the prior, in trials
    decay     factor on old counts per new trial of the same bucket: 0.98 remembers about 50 trials
    """

    strength: float = 4.0
    decay: float = 0.98
    _counts: dict[tuple[str, int], tuple[float, float]] = field(default_factory=dict)

    def rate(self, evidence: Evidence) -> float:
        """Estimated probability that such a node is accepted."""
        hits, trials = self._counts.get(evidence[:2], (0.0, 0.0))
        return (hits + self.strength * evidence.prior) / (trials + self.strength)

    def observe(self, evidence: Evidence, accepted: bool) -> None:
        """Record the fate of a node whose parent was accepted."""
        hits, trials = self._counts.get(evidence[:2], (0.0, 0.0))
        self._counts[evidence[:2]] = (hits * self.decay + accepted, trials * self.decay + 1.0)
