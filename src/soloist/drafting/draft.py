"""What a drafter hands over for one request, before other sources are merged in.

A chain is the drafter's best path (or its drawn one, with the laws it was drawn from). A `CandidateGraph` holds the
alternatives at every point of the block, for trees; it is always deterministic given the history and the request's
draft noise, so a tree chosen from it is exact under every sampler.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from soloist.drafting.proposal import Law


@dataclass(frozen=True)
class CandidateGraph:
    """States of the drafter and the tokens that lead on from each.

    State 0 is the anchor. From state `s` token `tokens[s][j]` has probability `probs[s][j]` (descending in j) and leads
    to state `nexts[s][j]`, -1 where the drafter has nothing beyond. Probabilities are the drafter's, uncalibrated.
    """

    tokens: list[list[int]]
    probs: list[list[float]]
    nexts: list[list[int]]


@dataclass(frozen=True)
class Draft:
    """One request's draft.

    tokens  [n] the chain
    laws    [n] the law each token was drawn from; None = chosen deterministically (a point mass)
    scores  [n] the drafter's probability of each token, 1.0 where drawn (unused there)
    graph   alternatives, or None where the drafter was not asked for any
    """

    source: str
    tokens: list[int] = field(default_factory=list)
    laws: list[Law | None] = field(default_factory=list)
    scores: list[float] = field(default_factory=list)
    graph: CandidateGraph | None = None

    def __len__(self) -> int:
        return len(self.tokens)
