"""Head, tail and agreement rules by table; the output law of fused chains and trees by enumeration."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from drafting.reference import free_law, random_chain, rejection_law
from soloist.drafting.calibration import Rates
from soloist.drafting.draft import Draft
from soloist.drafting.fusion import fuse_chain
from soloist.drafting.lookup import LookupConfig, Match
from soloist.drafting.proposal import Law, Proposal

DRAFTED = [1, 2, 3, 4]
WEAK = LookupConfig(nmin=4, nstrong=8, agree=2, nmin_tail=5, longmin=6)


def draft(tokens: list[int] = DRAFTED, laws: list[Law | None] | None = None) -> Draft:
    return Draft("mtp", tokens, laws or [None] * len(tokens), [0.5] * len(tokens))


@pytest.mark.parametrize(
    ("name", "config", "looked", "length", "capacity", "tokens", "sources", "tail"),
    [
        ("no match", LookupConfig(), None, 0, 15, DRAFTED, "dddd", False),
        ("strong match overrides", LookupConfig(), [9, 8, 7, 6, 5, 5], 6, 15, [9, 8, 7, 6, 5, 5], "llllll", True),
        ("capacity cuts", LookupConfig(), [9, 8, 7, 6, 5, 5], 6, 4, [9, 8, 7, 6], "llll", False),
        ("short match keeps the rest", LookupConfig(), [9, 8], 6, 15, [9, 8, 3, 4], "lldd", False),
        ("weak match without agreement", WEAK, [1, 9, 9, 9, 9], 5, 15, DRAFTED, "dddd", False),
        ("weak match with agreement", WEAK, [1, 2, 9, 9, 9], 6, 15, [1, 2, 9, 9, 9], "lllll", True),
        ("agreement, too short for the tail", WEAK, [1, 2, 9, 9, 9], 4, 15, [1, 2, 9, 9], "llll", False),
        ("not long enough to fill", WEAK, [1, 2, 9, 9, 9], 5, 15, [1, 2, 9, 9, 9], "lllll", False),
        ("no drafter", LookupConfig(), [9, 8, 7], 6, 2, [9, 8], "ll", True),
    ],
)
def test_rules(
    name: str,
    config: LookupConfig,
    looked: list[int] | None,
    length: int,
    capacity: int,
    tokens: list[int],
    sources: str,
    tail: bool,
) -> None:
    match = Match(tuple(looked), length, 0) if looked else None
    block = draft([] if name == "no drafter" else DRAFTED)
    fused = fuse_chain(block, match, config, capacity, Rates())
    assert fused.proposal.tokens == tokens
    assert "".join(s[0] for s in fused.proposal.sources) == sources.replace("d", "m")
    assert fused.has_tail is tail
    assert fused.proposal.is_chain
    assert len(fused.evidence) == len(tokens) == len(fused.proposal.survival)
    assert all(a >= b for a, b in itertools.pairwise(fused.proposal.survival))


def law_of(row: np.ndarray) -> Law:
    return Law(tuple(range(len(row))), tuple(row))


def fused_law(config: LookupConfig, match: Match, p, q, depth: int, *, keep_laws: bool = True) -> np.ndarray:
    """Law of the first two tokens, over every block the drafter can draw."""
    total = np.zeros((5, 5))
    for tokens in itertools.product(range(5), repeat=depth):
        rows = [q(tokens[:i]) for i in range(depth)]
        weight = float(np.prod([row[t] for row, t in zip(rows, tokens, strict=True)]))
        block = draft(list(tokens), [law_of(row) for row in rows])
        proposal = fuse_chain(block, match, config, 4, Rates()).proposal
        if not keep_laws:
            laws = [None if s == "lookup" else w for s, w in zip(proposal.sources, proposal.laws, strict=True)]
            proposal = Proposal(proposal.tokens, proposal.parents, laws, proposal.sources, proposal.survival)
        total += weight * rejection_law(p, proposal, 2)
    return total


@pytest.mark.parametrize("agree", [0, 1, 2])
@pytest.mark.parametrize("nstrong", [4, 9])
@pytest.mark.parametrize("valid", [1, 2, 4])
def test_the_law_of_a_fused_chain_is_the_targets(agree: int, nstrong: int, valid: int) -> None:
    rng = np.random.default_rng(agree * 10 + nstrong + valid)
    config = LookupConfig(nmin=4, nstrong=nstrong, agree=agree)
    for _ in range(3):
        p, q = random_chain(rng, 5, 3), random_chain(rng, 5, 2)
        match = Match(tuple(int(t) for t in rng.integers(0, 5, valid)), 5, 0)
        assert np.abs(fused_law(config, match, p, q, 2) - free_law(p, (), 2)).max() < 1e-9


def test_dropping_the_law_of_agreed_positions_would_be_biased() -> None:
    rng = np.random.default_rng(0)
    config = LookupConfig(nmin=4, nstrong=9, agree=1)
    worst = 0.0
    for _ in range(5):
        p, q = random_chain(rng, 5, 3), random_chain(rng, 5, 2)
        match = Match(tuple(int(t) for t in rng.integers(0, 5, 2)), 5, 0)
        worst = max(worst, np.abs(fused_law(config, match, p, q, 2, keep_laws=False) - free_law(p, (), 2)).max())
    assert worst > 0.02
