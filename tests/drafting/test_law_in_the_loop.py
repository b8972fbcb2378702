"""Rejection sampling through the whole speculator: learning rates, block rules, lookup in the text it makes, trees.

A Markov target over six tokens and a drafter with another law; tokens are decoded step by step through `Speculator` and
`verify`, and the transitions counted must follow the target. The controllers learn on the way, so whatever a step may
legally look at, it does look at.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch

from soloist.drafting import fusion
from soloist.drafting.block_length import GainRule, SaturatedConfig, SaturatedRule, StepCost
from soloist.drafting.calibration import scored
from soloist.drafting.choice import pick, rank
from soloist.drafting.draft import CandidateGraph, Draft
from soloist.drafting.drafter import Ask
from soloist.drafting.lookup import LookupConfig
from soloist.engine.request import Request
from soloist.engine.speculator import SpeculationConfig, Speculator
from soloist.sampling.history import History
from soloist.sampling.params import SamplingParams
from soloist.sampling.verify import verify

V, DEPTH = 6, 3
IDS = np.arange(V)
QUICK, SLOW, FULL = 6_000, 30_000, 200_000
LIMIT = {"quick": 75.0, "planted": 110.0}  # chi-square with V * (V - 1) = 30 degrees of freedom: p = 1e-5, 1e-10


def table(seed: int) -> np.ndarray:
    """Scores fp32 [V, V] of the next token after each token."""
    return np.log(np.random.default_rng(seed).dirichlet(np.full(V, 0.8), V) + 1e-3).astype(np.float32)


class MarkovDrafter:
    """Drafts from its own transition table."""

    name, taps, depth, nbytes, stores = "mtp", (), DEPTH, 0, {}

    def __init__(self, scores: np.ndarray) -> None:
        self.scores = scores

    def absorb(self, batch) -> None:
        pass

    def drop(self, slot: int) -> None:
        pass

    def propose(self, batch: Sequence[Ask]) -> list[Draft]:
        return [self._draft(ask) if ask.count else Draft(self.name) for ask in batch]

    def _draft(self, ask: Ask) -> Draft:
        tokens, laws, probs = [], [], []
        last = ask.anchor
        for i in range(min(ask.count, DEPTH)):
            last, law, prob = pick(IDS, self.scores[last], ask, ask.position + 1 + i)
            tokens.append(last)
            laws.append(law)
            probs.append(prob)
        return Draft(self.name, tokens, laws, probs, self._graph(ask) if ask.tree else None)

    def _graph(self, ask: Ask) -> CandidateGraph:
        """State 0: the anchor; 1 + level * V + token: that token at that level."""
        tokens, probs, nexts = [], [], []
        for level in range(DEPTH + 1):
            for token in [ask.anchor] if level == 0 else range(V):
                order, p = rank(IDS[None], self.scores[token][None], ask, [ask.position + 1 + level], 3)
                inner = level < DEPTH
                tokens.append(order[0].tolist() if inner else [])
                probs.append(p[0].tolist() if inner else [])
                nexts.append([1 + level * V + t if level + 1 < DEPTH else -1 for t in tokens[-1]])
        return CandidateGraph(tokens, probs, nexts)


def statistic(config: SpeculationConfig, params: SamplingParams, steps: int, seed: int = 0) -> tuple[float, int]:
    """(chi-square of the transitions against the target's law, accepted drafts) over `steps` verify steps."""
    target, drafter = table(1), MarkovDrafter(table(2))
    law = np.stack([_law(row, params) for row in target])
    counts = np.zeros((V, V))
    accepted = done = 0
    while done < steps:
        request = Request([seed % V, 3], params, lambda event: None, seed=1_000_003 * seed + 17, mode="rejection")
        request.slot, request.history = 0, History(params, request.prompt, V, None)
        speculator = Speculator(drafter, config)
        seed += 1
        while len(request.output) < 400 and done < steps:
            (proposal,) = speculator.propose([request], [8])
            last = [request.token(request.length - 1), *proposal.tokens]
            rows = torch.from_numpy(target[last])
            verdict = verify(rows, proposal, request.history, request.seed, "rejection")
            speculator.observe(request, proposal, verdict)
            for token in verdict.tokens:
                counts[request.token(request.length - 1), token] += 1
                request.history.advance(token)
                request.output.append(token)
            accepted += verdict.accepted
            done += 1
    expected = counts.sum(1, keepdims=True) * law
    seen = expected > 0
    assert counts[~seen].sum() == 0
    return float(((counts - expected)[seen] ** 2 / expected[seen]).sum()), accepted


def _law(scores: np.ndarray, params: SamplingParams) -> np.ndarray:
    """softmax(scores / T) cut to the top k."""
    x = scores.astype(np.float64) / params.temperature
    if params.top_k:
        x[x < np.sort(x)[-params.top_k]] = -np.inf
    p = np.exp(x - x.max())
    return p / p.sum()


COST = StepCost((0.0, *(1.0 + 0.25 * n for n in range(9))), draft=0.3)
LOOKUP = LookupConfig(nmin=1, nmax=4, nstrong=4, agree=1, nmin_tail=2, longmin=2)
RULES = {
    "saturated": lambda: SaturatedRule(SaturatedConfig(2, 8)),
    "gain": lambda: GainRule(COST, 8, probe=4, patience=4, keep=0.8),
}
CASES = {
    "drawn chain": (None, False, True, "saturated"),
    "drawn chain, gain": (None, False, True, "gain"),
    "drawn chain with lookup": (LOOKUP, False, True, "saturated"),
    "drawn chain with lookup, gain": (LOOKUP, False, True, "gain"),
    "likeliest chain with lookup, gain": (LOOKUP, False, False, "gain"),
    "tree with lookup": (LOOKUP, True, True, "saturated"),
    "tree with lookup, gain": (LOOKUP, True, True, "gain"),
}


def case(name: str) -> SpeculationConfig:
    lookup, tree, sample, rule = CASES[name]
    return SpeculationConfig(lookup, tree, DEPTH, 8, sample, RULES[rule])


PARAMS = {"T=1": SamplingParams(temperature=1.0), "T=0.8 top-4": SamplingParams(temperature=0.8, top_k=4)}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("params", PARAMS)
def test_transitions_follow_the_target(name: str, params: str) -> None:
    value, accepted = statistic(case(name), PARAMS[params], QUICK)
    assert accepted > QUICK / 10
    assert value < LIMIT["quick"]


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("params", PARAMS)
@pytest.mark.parametrize(
    "blocks", [pytest.param(SLOW, marks=pytest.mark.slow), pytest.param(FULL, marks=pytest.mark.full)]
)
def test_transitions_follow_the_target_over_many_blocks(name: str, params: str, blocks: int, record_property) -> None:
    value, accepted = statistic(case(name), PARAMS[params], blocks, seed=10_000)
    for what, number in (("blocks", blocks), ("chi-square", value), ("limit", LIMIT["quick"]), ("accepted", accepted)):
        record_property(what, number)
    assert value < LIMIT["quick"]


def test_a_rule_that_looks_at_drawn_values_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Survival by the drawn token's own probability: unlikely draws are put up less often than drawn."""

    def fuse(draft: Draft, *args, **kwargs):
        monkeypatch.setattr(fusion, "drawn", lambda source, depth: scored(source, draft.scores[depth]))
        return fuse_chain(draft, *args, **kwargs)

    fuse_chain = fusion.fuse_chain
    monkeypatch.setattr("soloist.engine.speculator.fuse_chain", fuse)
    value, _ = statistic(case("drawn chain, gain"), PARAMS["T=1"], 2 * QUICK)
    assert value > LIMIT["planted"]


def test_agreement_without_the_law_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Point masses on tokens that were chosen because they were drawn."""

    def forgetful(draft: Draft, match, *args, **kwargs):
        fused = fuse_chain(draft, match, *args, **kwargs)
        for i, source in enumerate(fused.proposal.sources):
            if source == "lookup":
                fused.proposal.laws[i] = None
        return fused

    fuse_chain = fusion.fuse_chain
    weak = replace(case("drawn chain with lookup"), lookup=replace(LOOKUP, nstrong=9))
    assert statistic(weak, PARAMS["T=1"], QUICK)[0] < LIMIT["quick"]
    monkeypatch.setattr("soloist.engine.speculator.fuse_chain", forgetful)
    value, _ = statistic(weak, PARAMS["T=1"], 2 * QUICK)
    assert value > LIMIT["planted"]
