"""Which proposals survive, and the token the target adds: one verify step of one request.

The proposal is a tree whose node i sits on row i + 1; row 0 is the anchor. From the anchor the walk asks
the current row for its token; if a child of the row carries it, that child is accepted and the walk
goes on from its row, otherwise the token is emitted and the walk ends. Rows off the path are never
looked at, so nothing about them can leak into the text.

    greedy     the token is the argmax
    coupled    the token is argmax(ln p + Gumbel(seed, position, token)): a function of seed and prefix, so the text
               is the same whatever was proposed. Any proposal is legal.
    rejection  children are tried in order against what is left of p: accept c with probability min(1, r(c) / q(c)),
               else r = norm(max(r - q, 0)); if none survives the token is drawn from r (Leviathan et al. 2023;
               the multi-branch form repeats the same step). The law is exact if every q is the law its token was
               drawn from, given what was decided before it. Without drafts it draws as `coupled` does.

The History is walked and brought back: committing the emitted tokens is the caller's, after its own cut.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import torch

from soloist.drafting.proposal import Law, Proposal
from soloist.errors import EngineError
from soloist.ops.top import Heads
from soloist.sampling.history import History
from soloist.sampling.processors import TargetLaw, greedy_token, target_law
from soloist.sampling.rng import Noise, Stream
from soloist.sampling.rows import LogitRows

Mode = Literal["greedy", "coupled", "rejection"]


@dataclass
class Verdict:
    """The emitted tokens of one step, 1..n+1 of them, each with what it takes to cut there.

    tokens   [m] emitted token ids
    rows     [m] the row whose logits produced tokens[i] (its log-probabilities are that row's); rows[0] = 0
    nodes    [m] the accepted proposal node, or -1 where the target's own token was emitted
    sources  [m] the node's source, or "target"

    Keeping the first j tokens settles rows[:j]; tokens[j - 1] is then the new anchor.
    """

    tokens: list[int] = field(default_factory=list)
    rows: list[int] = field(default_factory=list)
    nodes: list[int] = field(default_factory=list)
    sources: list[str] = field(default_factory=list)

    @property
    def accepted(self) -> int:
        """Accepted drafts; the rest (0 or 1 token) is the target's own."""
        return sum(node >= 0 for node in self.nodes)

    def cut(self, tokens: int) -> Verdict:
        """The verdict that ends after the first `tokens` emitted tokens."""
        return Verdict(self.tokens[:tokens], self.rows[:tokens], self.nodes[:tokens], self.sources[:tokens])


def verify(
    rows: torch.Tensor,
    proposal: Proposal,
    history: History,
    seed: int,
    mode: Mode,
    limit: int | None = None,
    heads: Heads | None = None,
) -> Verdict:
    """Walk one request's verify step.

    rows     [1 + len(proposal), V] raw logits of the anchor and the nodes, any float dtype
    history  stands at the anchor (the anchor is its last token); unchanged on return
    seed     64-bit seed of the sequence; unused by greedy
    mode     "coupled" or "rejection" for sampling; a request with temperature 0 is greedy whatever it says
    limit    emit at most this many tokens (what `max_tokens` leaves)
    heads    the best entries of the same rows, where a card brought them along

    The walk also ends with a stop id. Raises EngineError for a non-finite row, a row without any allowed token, or a
    law that gives its own draft no mass.
    """
    if rows.shape[0] != len(proposal) + 1:
        raise EngineError(f"{rows.shape[0]} rows for a proposal of {len(proposal)} nodes.")
    if history.params.greedy:
        mode = "greedy"
    elif mode == "greedy":
        raise EngineError("Greedy verification of a request whose temperature is above 0.")
    children = proposal.children()
    logits = LogitRows(rows, heads)
    stops = history.params.stop_ids
    verdict = Verdict()
    row, depth = 0, history.depth
    try:
        while True:
            branches = children[row]
            if mode == "greedy":
                token = greedy_token(logits, row, history)
                node = _child(proposal, branches, token)
            else:
                law = target_law(logits, row, history)
                if mode == "rejection" and branches:
                    token, node = _try_branches(law, proposal, branches, seed, history.position)
                else:
                    token = law.sample(Noise.at(seed, Stream.TARGET, history.position))
                    node = _child(proposal, branches, token)
            verdict.tokens.append(token)
            verdict.rows.append(row)
            verdict.nodes.append(node)
            verdict.sources.append(proposal.sources[node] if node >= 0 else "target")
            if node < 0 or token in stops or len(verdict.tokens) == limit:
                return verdict
            history.push(token)
            row = node + 1
    finally:
        history.pop(history.depth - depth)


def _child(proposal: Proposal, branches: list[int], token: int) -> int:
    return next((c for c in branches if proposal.tokens[c] == token), -1)


@dataclass(frozen=True)
class Trial:
    """One step of multi-branch rejection: accept `node` with probability `accept`, else the next trial.

    The last one has node -1 and the law `rest` that is left when every child was rejected.
    """

    node: int
    accept: float
    rest: TargetLaw | None = None


def branch_trials(law: TargetLaw, proposal: Proposal, branches: list[int]) -> Iterator[Trial]:
    """The trials at one row in their order: every probability of the rule, and none of its randomness.

    `law` is p of the row, `branches` its children. What is left of p is computed only if the next trial is asked for.
    """
    ids, r = law.ids, law.probs
    for node in branches:
        token, q = proposal.tokens[node], proposal.laws[node]
        place = _find(ids, token)
        mass = float(r[place]) if place >= 0 else 0.0
        yield Trial(node, min(1.0, mass / (1.0 if q is None else _mass(q, token))))
        r = _residual(ids, r, token, q)
    keep = r.nonzero()[0]
    yield Trial(-1, 1.0, TargetLaw.of(ids[keep], np.log(r[keep]).astype(np.float32)))


def _try_branches(law: TargetLaw, proposal: Proposal, branches: list[int], seed: int, position: int) -> tuple[int, int]:
    """Multi-branch rejection at one row: (emitted token, accepted node or -1)."""
    accept = Noise.at(seed, Stream.ACCEPT, position)
    for number, trial in enumerate(branch_trials(law, proposal, branches)):
        if trial.rest is not None:
            return trial.rest.sample(Noise.at(seed, Stream.RESIDUAL, position)), -1
        if accept.uniform(number) < trial.accept:
            return proposal.tokens[trial.node], trial.node
    raise AssertionError("the last trial always ends the walk")


def _residual(ids: np.ndarray, r: np.ndarray, token: int, q: Law | None) -> np.ndarray:
    """norm(max(r - q, 0)) on ascending ids; r itself if nothing is left (then r = q up to rounding)."""
    rest = r.copy()
    if q is None:
        place = _find(ids, token)
        if place >= 0:
            rest[place] = 0.0
    else:
        q_ids = np.array(q.ids, dtype=np.int64)
        places = ids.searchsorted(q_ids).clip(max=len(ids) - 1)
        shared = ids[places] == q_ids
        places = places[shared]
        rest[places] = np.maximum(rest[places] - np.array(q.probs)[shared], 0.0)
    total = rest.sum()
    return rest / total if total > 0 else r


def _find(ids: np.ndarray, token: int) -> int:
    i = int(ids.searchsorted(token))
    return i if i < len(ids) and ids[i] == token else -1


def _mass(q: Law, token: int) -> float:
    try:
        mass = q.probs[q.ids.index(token)]
    except ValueError:
        mass = 0.0
    if not mass > 0:
        raise EngineError(f"The proposal law of draft token {token} gives it no mass.")
    return mass
