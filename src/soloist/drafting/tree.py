"""The best tree of at most n draft nodes out of every source's candidates.

Nodes are taken best-first by the estimated probability that their whole path is accepted. Three kinds of paths meet in
one trie, so that siblings carry distinct tokens: the drafter's candidate graph, copied text, tokens a grammar forces.

Every node is a deterministic function of the history, of the drafter's scores and of draft noise, and nothing here
looks at the target's randomness: the tree is exact under greedy, coupled and rejection verification alike (each node
is a point mass; the target's draw either is one of the children or ends the step).
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

from soloist.drafting.calibration import FORCED, Evidence, Rates, copied, scored
from soloist.drafting.draft import CandidateGraph
from soloist.drafting.fusion import Fused
from soloist.drafting.lookup import Match
from soloist.drafting.proposal import Proposal

# After a token the drafter did not have among its candidates it goes on as if its first choice had been taken; what
# it then proposes was conditioned on another token, and is worth this much of its score.
DETOUR = 0.3


@dataclass(frozen=True)
class _Candidate:
    """A child that may still be taken: its token, the estimate given its parent, and where it leads."""

    rate: float
    token: int
    source: str
    evidence: tuple[Evidence, ...]
    state: int
    trust: float
    matches: tuple[Match, ...]
    forced: bool


@dataclass(frozen=True)
class _Sources:
    graph: CandidateGraph | None
    name: str
    forced: Sequence[int]
    rates: Rates

    def children(self, node: _Candidate, depth: int) -> list[_Candidate]:
        """Distinct tokens after `node`, best first. `depth` is the depth of the children (0 below the anchor)."""
        if node.forced and depth < len(self.forced):
            token = self.forced[depth]
            return [_Candidate(self.rates.rate(FORCED), token, "grammar", (FORCED,), -1, 0.0, (), True)]
        scores, nexts, fallback = self._drafted(node)
        first = max(scores, key=scores.__getitem__) if scores else None
        out: list[_Candidate] = []
        left = 1.0
        for token, following in self._looked(node, depth).items():
            agrees = None if first is None else token == first
            evidence: tuple[Evidence, ...] = (copied(following[0].length + depth, agrees),)
            rate = left * self.rates.rate(evidence[0])
            score = scores.pop(token, 0.0)
            if score:
                evidence += (scored(self.name, score),)
                rate = max(rate, left * self.rates.rate(evidence[1]))
            left -= rate
            trust = node.trust if token in nexts else node.trust * DETOUR
            state = nexts.get(token, fallback)
            out.append(_Candidate(rate, token, "lookup", evidence, state, trust, tuple(following), False))
        for token, score in scores.items():
            known = scored(self.name, score)
            rate = min(left, left * self.rates.rate(known))
            out.append(_Candidate(rate, token, self.name, (known,), nexts[token], node.trust, (), False))
        out.sort(key=lambda c: -c.rate)
        return out

    def _drafted(self, node: _Candidate) -> tuple[dict[int, float], dict[int, int], int]:
        """Drafter's candidates after `node`: token -> score, token -> next state, and where its first choice leads."""
        if self.graph is None or node.state < 0:
            return {}, {}, -1
        tokens = self.graph.tokens[node.state]
        nexts = self.graph.nexts[node.state]
        scores = {t: p * node.trust for t, p in zip(tokens, self.graph.probs[node.state], strict=True)}
        return scores, dict(zip(tokens, nexts, strict=True)), nexts[0] if nexts else -1

    @staticmethod
    def _looked(node: _Candidate, depth: int) -> dict[int, list[Match]]:
        """Copied continuations of `node`: next token -> the matches that propose it, longest first."""
        out: dict[int, list[Match]] = {}
        for match in node.matches:
            if depth < len(match.tokens):
                out.setdefault(match.tokens[depth], []).append(match)
        return out


def grow_tree(
    graph: CandidateGraph | None,
    name: str,
    matches: Sequence[Match],
    forced: Sequence[int],
    limit: int,
    rates: Rates,
) -> Fused:
    """The `limit` nodes most likely to be accepted, in descending order of survival (so parents before children).

    graph    the drafter's candidates, None without a drafter; `name` is its source name
    matches  lookup matches, best first; only their prefixes meet in the trie
    forced   tokens the grammar dictates from here
    """
    sources = _Sources(graph, name, forced, rates)
    root = _Candidate(1.0, -1, "", (), 0 if graph else -1, 1.0, tuple(matches), bool(forced))
    tokens: list[int] = []
    parents: list[int] = []
    names: list[str] = []
    survival: list[float] = []
    evidence: list[tuple[Evidence, ...]] = []
    # Heap entries: (-survival, order of entry, parent node, depth, siblings, index among them). Siblings enter one at
    # a time, each when the one before it is taken.
    heap: list[tuple[float, int, int, int, list[_Candidate], int]] = []
    entered = 0

    def enter(alive: float, parent: int, depth: int, siblings: list[_Candidate], index: int) -> None:
        nonlocal entered
        if index < len(siblings) and siblings[index].rate > 0.0:
            heapq.heappush(heap, (-alive * siblings[index].rate, entered, parent, depth, siblings, index))
            entered += 1

    enter(1.0, -1, 0, sources.children(root, 0), 0)
    while heap and len(tokens) < limit:
        negative, _, parent, depth, siblings, index = heapq.heappop(heap)
        chosen = siblings[index]
        node = len(tokens)
        tokens.append(chosen.token)
        parents.append(parent)
        names.append(chosen.source)
        survival.append(-negative)
        evidence.append(chosen.evidence)
        enter(1.0 if parent < 0 else survival[parent], parent, depth, siblings, index + 1)
        if len(tokens) < limit:
            enter(-negative, node, depth + 1, sources.children(chosen, depth + 1), 0)
    return Fused(Proposal(tokens, parents, [None] * len(tokens), names, survival), evidence)


def depth_first(fused: Fused) -> Fused:
    """The same tree in depth-first order, smaller subtrees first: a walk keeps at most log2(n) + 1 branch states."""
    p = fused.proposal
    if p.is_chain:
        return fused
    size = [1] * len(p)
    for i in range(len(p) - 1, -1, -1):
        if p.parents[i] >= 0:
            size[p.parents[i]] += size[i]
    children = p.children()
    order: list[int] = []
    stack = [-1]
    while stack:
        node = stack.pop()
        if node >= 0:
            order.append(node)
        # Popped last-in first-out: push the largest subtree first.
        stack.extend(sorted(children[node + 1], key=lambda c: -size[c]))
    place = {node: i for i, node in enumerate(order)}
    place[-1] = -1
    proposal = Proposal(
        [p.tokens[i] for i in order],
        [place[p.parents[i]] for i in order],
        [p.laws[i] for i in order],
        [p.sources[i] for i in order],
        [p.survival[i] for i in order],
    )
    return Fused(proposal, [fused.evidence[i] for i in order], fused.has_tail, fused.peeked)
