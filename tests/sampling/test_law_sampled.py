"""The emitted law by sampling: blocks drawn and verified by the real code, tested by chi-square.

A block = draft from the DRAFT stream, verify in rejection mode, again until two tokens are out; their joint law on 36
cells is compared with the target's. The quick form runs some thousands of blocks per mode and shows that the same test
fails when a term of the rule is removed or a value-dependent cut is planted; `-m slow` runs 30,000 per mode, `-m full`
200,000.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from enum import IntEnum
from functools import cache

import numpy as np
import pytest

from sampling.tiny import Tiny, true_law
from soloist.drafting.calibration import Rates
from soloist.drafting.draft import Draft as DrafterOutput
from soloist.drafting.fusion import fuse_chain
from soloist.drafting.lookup import LookupConfig, Match
from soloist.drafting.proposal import Law, Proposal
from soloist.sampling import verify as verify_module
from soloist.sampling.draft import draft_law, draw
from soloist.sampling.history import History
from soloist.sampling.params import SamplingParams
from soloist.sampling.processors import TargetLaw, target_law
from soloist.sampling.rng import Stream
from soloist.sampling.rows import LogitRows
from soloist.sampling.verify import Mode, Trial, branch_trials, verify

V, TOKENS, QUICK, SLOW, FULL = 6, 2, 3_000, 30_000, 200_000
TARGET, DRAFTER = Tiny(V, 11), Tiny(V, 12)
PLAIN = SamplingParams()
PROCESSED = SamplingParams(
    temperature=0.9,
    top_k=5,
    top_p=0.93,
    min_p=0.02,
    repetition_penalty=1.2,
    presence_penalty=0.3,
    frequency_penalty=0.1,
)
Drafter = Callable[[tuple[int, ...], int, SamplingParams], Proposal]


@cache
def _draft_law(prefix: tuple[int, ...], top_k: int) -> TargetLaw:
    return draft_law(DRAFTER.logits(prefix), SamplingParams(top_k=top_k))


def chain(prefix: tuple[int, ...], seed: int, params: SamplingParams, top_k: int = 0, point: bool = False) -> Proposal:
    """Two drawn drafts, the second a point mass if `point`."""
    tokens: list[int] = []
    laws: list[Law | None] = []
    for i in range(2):
        law = _draft_law(prefix + tuple(tokens), top_k)
        if point and i == 1:
            token, q = int(law.ids[law.scores.argmax()]), None
        else:
            token, q = draw(law, seed, len(prefix) + i, "rejection")[0]
        tokens.append(token)
        laws.append(q)
    return Proposal.chain(tokens, "mtp", laws)


def truncated(prefix: tuple[int, ...], seed: int, params: SamplingParams) -> Proposal:
    return chain(prefix, seed, params, top_k=3)


def mixed(prefix: tuple[int, ...], seed: int, params: SamplingParams) -> Proposal:
    return chain(prefix, seed, params, top_k=4, point=True)


def lookup(prefix: tuple[int, ...], seed: int, params: SamplingParams) -> Proposal:
    return Proposal.chain([(sum(prefix) + 1) % V, (sum(prefix) + 3) % V, 2], "lookup")


def fused(prefix: tuple[int, ...], seed: int, params: SamplingParams) -> Proposal:
    """A drawn block of two under a weak match that is taken where the first tokens agree."""
    drafted = chain(prefix, seed, params)
    config = LookupConfig(nmin=2, nmax=8, nstrong=8, agree=1, nmin_tail=2)
    match = Match(tuple((sum(prefix) + 2 * i) % V for i in range(3)), 4, 0)
    output = DrafterOutput("dflash2", drafted.tokens, drafted.laws, [1.0] * 2)
    return fuse_chain(output, match, config, 3, Rates()).proposal


def tree(prefix: tuple[int, ...], seed: int, params: SamplingParams) -> Proposal:
    """Two siblings without replacement, a copied third, and a drawn child below the first two."""
    (a, qa), (b, qb) = draw(_draft_law(prefix, 0), seed, len(prefix), "rejection", count=2)
    below = [draw(_draft_law((*prefix, t), 3), seed, len(prefix) + 1, "rejection")[0] for t in (a, b)]
    tokens = [a, b, (sum(prefix) + 1) % V, below[0][0], below[1][0]]
    laws = [qa, qb, None, below[0][1], below[1][1]]
    return Proposal(tokens, [-1, -1, -1, 0, 1], laws, ["dflash2"] * 5, [1.0] * 5)


DRAFTERS: dict[str, Drafter] = {
    "mtp": chain,
    "truncated": truncated,
    "mixed": mixed,
    "lookup": lookup,
    "fused": fused,
    "tree": tree,
}


def chi_square(drafter: Drafter, params: SamplingParams, blocks: int, mode: Mode = "rejection") -> float:
    """(chi2 - dof) / sqrt(2 dof) of the joint law of two emitted tokens over `blocks` seeds.

    The walk, the trials and the draws are the real ones; the law of a path, the same for every seed, is computed once.
    """
    laws: dict[tuple[int, ...], TargetLaw] = {}

    def law_of_path(rows: LogitRows, index: int, history: History) -> TargetLaw:
        path = tuple(history.output)
        if path not in laws:
            laws[path] = target_law(rows, index, history)
        return laws[path]

    counts = np.zeros((V,) * TOKENS)
    state = History(params, [], V)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(verify_module, "target_law", law_of_path)
        for seed in range(blocks):
            while len(state.output) < TOKENS:
                prefix = tuple(state.output)
                proposal = drafter(prefix, seed, params)
                for token in verify(TARGET.rows(prefix, proposal), proposal, state, seed, mode).tokens:
                    state.push(token)
            counts[tuple(state.output[:TOKENS])] += 1
            state.pop(state.depth)
    want = true_law(TARGET, params, TOKENS) * blocks
    assert counts[want == 0].sum() == 0, "a token outside the support was emitted"
    cells = want > 0
    dof = int(cells.sum()) - 1
    return float((((counts - want) ** 2)[cells] / want[cells]).sum() - dof) / (2 * dof) ** 0.5


@pytest.mark.parametrize("name", DRAFTERS)
@pytest.mark.parametrize("params", [PLAIN, PROCESSED], ids=["plain", "processed"])
def test_emitted_law(name: str, params: SamplingParams) -> None:
    assert abs(chi_square(DRAFTERS[name], params, QUICK)) < 4


def test_emitted_law_when_coupled() -> None:
    assert abs(chi_square(tree, PROCESSED, QUICK, "coupled")) < 4


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", DRAFTERS)
@pytest.mark.parametrize("params", [PLAIN, PROCESSED], ids=["plain", "processed"])
@pytest.mark.parametrize(
    "blocks", [pytest.param(SLOW, marks=pytest.mark.slow), pytest.param(FULL, marks=pytest.mark.full)]
)
def test_emitted_law_over_many_blocks(name: str, params: SamplingParams, blocks: int, record_property) -> None:
    value = chi_square(DRAFTERS[name], params, blocks)
    for what, number in (("blocks", blocks), ("standardised chi-square", value), ("limit", 4)):
        record_property(what, number)
    assert abs(value) < 4


def test_the_test_sees_a_missing_residual(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verify_module, "_residual", lambda ids, r, token, q: r)
    assert chi_square(chain, PLAIN, QUICK) > 10


def test_the_test_sees_a_test_without_q(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verify_module, "_mass", lambda q, token: 1.0)
    assert chi_square(chain, PLAIN, QUICK) > 10


def test_the_test_sees_a_residual_without_the_siblings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Multi-branch rejection whose second trial starts from p again."""

    def forgetful(law: TargetLaw, proposal: Proposal, branches: list[int]):  # type: ignore[no-untyped-def]
        for node in branches:
            yield next(iter(branch_trials(law, proposal, [node])))
        yield Trial(-1, 1.0, list(branch_trials(law, proposal, branches[-1:]))[-1].rest)

    monkeypatch.setattr(verify_module, "branch_trials", forgetful)
    assert chi_square(tree, PLAIN, QUICK) > 10


def test_the_test_sees_a_value_dependent_cut() -> None:
    def cut(prefix: tuple[int, ...], seed: int, params: SamplingParams) -> Proposal:
        proposal = chain(prefix, seed, params)
        laws = [law for law in proposal.laws if law is not None]
        confident = [law.probs[law.ids.index(t)] >= 0.25 for t, law in zip(proposal.tokens, laws, strict=True)]
        return proposal.cut([*confident, False].index(False))

    assert chi_square(cut, PLAIN, QUICK) > 10


def test_the_test_sees_drafts_drawn_from_another_law() -> None:
    """q handed over before a truncation that the draw applied."""

    def lying(prefix: tuple[int, ...], seed: int, params: SamplingParams) -> Proposal:
        drawn = chain(prefix, seed, params, top_k=3)
        full = [draw(_draft_law(prefix + tuple(drawn.tokens[:i]), 0), 0, 0, "rejection")[0][1] for i in range(2)]
        return dataclasses.replace(drawn, laws=full)

    assert chi_square(lying, PLAIN, QUICK) > 10


def test_the_test_sees_shared_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafts and acceptance that draw from one stream."""

    class Streams(IntEnum):
        TARGET = Stream.TARGET
        ACCEPT = Stream.DRAFT
        RESIDUAL = Stream.RESIDUAL

    monkeypatch.setattr(verify_module, "Stream", Streams)
    assert chi_square(chain, PLAIN, QUICK) > 10
