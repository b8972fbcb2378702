"""The emitted law by enumeration: every draft, every trial and every residual of the real rule, summed exactly.

The target is a random conditional table on 5 tokens; the joint law of the first emitted tokens must be the target's
own, whatever the drafter proposes. The same sums show the known mistakes to be visible.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from sampling.tiny import Draft, Drafter, Tiny, dense_law, emitted_law, keep_top, sparse, true_law
from soloist.drafting.calibration import Rates
from soloist.drafting.draft import Draft as DrafterOutput
from soloist.drafting.fusion import fuse_chain
from soloist.drafting.lookup import LookupConfig, Match
from soloist.drafting.proposal import Law, Proposal
from soloist.sampling.params import SamplingParams

V = 5
TARGET, DRAFTER = Tiny(V, 1), Tiny(V, 2)
PLAIN = SamplingParams()
PROCESSED = SamplingParams(
    temperature=0.8, top_k=4, top_p=0.9, min_p=0.02, repetition_penalty=1.3, presence_penalty=0.4, frequency_penalty=0.2
)


def q_full(prefix: tuple[int, ...]) -> np.ndarray:
    return DRAFTER.probs(prefix)


def q_truncated(prefix: tuple[int, ...]) -> np.ndarray:
    return keep_top(DRAFTER.probs(prefix), 2)


def chain(k: int, q, point=()) -> Drafter:  # type: ignore[no-untyped-def]
    """k drafts drawn from q(prefix); positions in `point` propose the argmax as a point mass."""

    def drafts(prefix: tuple[int, ...]) -> Iterator[Draft]:
        def grow(tokens: list[int], laws: list[Law | None], mass: float) -> Iterator[Draft]:
            i = len(tokens)
            if i == k:
                yield Proposal.chain(tokens, "test", laws), mass
                return
            law = q(prefix + tuple(tokens))
            if i in point:
                yield from grow([*tokens, int(law.argmax())], [*laws, None], mass)
                return
            for t in np.flatnonzero(law).tolist():
                yield from grow([*tokens, t], [*laws, sparse(law)], mass * law[t])

        yield from grow([], [], 1.0)

    return drafts


def tree(conditional: bool = True, copied: bool = True) -> Drafter:
    """Two children without replacement, a point mass as a third; below the first a child of its own, drawn too.

    `conditional` False forgets that the second child was drawn without the first: a known mistake.
    """

    def drafts(prefix: tuple[int, ...]) -> Iterator[Draft]:
        q = q_full(prefix)
        lookup = (sum(prefix) + 2) % V
        for a in range(V):
            left = q.copy()
            left[a] = 0.0
            left /= left.sum()
            for b in np.flatnonzero(left).tolist():
                below = q_truncated((*prefix, a))
                for c in np.flatnonzero(below).tolist():
                    tokens, parents = [a, b, c], [-1, -1, 0]
                    laws: list[Law | None] = [sparse(q), sparse(left if conditional else q), sparse(below)]
                    if copied:
                        tokens, parents, laws = [*tokens, lookup, a], [*parents, -1, 1], [*laws, None, None]
                    yield (
                        Proposal(tokens, parents, laws, ["t"] * len(tokens), [1.0] * len(tokens)),
                        (q[a] * left[b] * below[c]),
                    )

    return drafts


def value_dependent_cut(prefix: tuple[int, ...]) -> Iterator[Draft]:
    """A known mistake: drop a draft when its own probability is low."""
    for proposal, mass in chain(2, q_full)(prefix):
        keep = 0
        for token, law in zip(proposal.tokens, proposal.laws, strict=True):
            assert law is not None
            if law.probs[law.ids.index(token)] < 0.25:
                break
            keep += 1
        yield proposal.cut(keep), mass


def invalid_treated_as_none(prefix: tuple[int, ...]) -> Iterator[Draft]:
    """A known mistake: a draft the target forbids is dropped instead of rejected."""
    allowed = dense_law(TARGET.logits(prefix), PROCESSED, (), prefix) > 0
    for proposal, mass in chain(1, q_full)(prefix):
        yield (proposal if allowed[proposal.tokens[0]] else Proposal()), mass


def fused(agree: int, keep_law: bool = True) -> Drafter:
    """The drafter's drawn block merged with a weak lookup match, which is taken when the first `agree` tokens agree."""
    config = LookupConfig(nmin=2, nmax=8, nstrong=8, agree=agree, nmin_tail=2)

    def drafts(prefix: tuple[int, ...]) -> Iterator[Draft]:
        looked = tuple((sum(prefix) + 3 * i) % V for i in range(3))
        for proposal, mass in chain(2, q_full)(prefix):
            output = DrafterOutput("mtp", proposal.tokens, proposal.laws, [1.0] * 2)
            merged = fuse_chain(output, Match(looked, 4, 0), config, 3, Rates()).proposal
            if not keep_law:
                merged.laws = [None if s == "lookup" else law for s, law in zip(merged.sources, merged.laws)]
            yield merged, mass

    return drafts


EXACT = {
    "full": chain(2, q_full),
    "full, three drafts": chain(3, q_full),
    "truncated": chain(2, q_truncated),
    "point masses": chain(2, q_full, point=(0, 1)),
    "mixed, point first": chain(2, q_full, point=(0,)),
    "mixed, point last": chain(2, q_truncated, point=(1,)),
    "tree": tree(),
    "tree without copies": tree(copied=False),
    "lookup, AGREE 1": fused(1),
    "lookup, AGREE 0": fused(0),
    "nothing": lambda prefix: iter([(Proposal(), 1.0)]),
}


@pytest.mark.parametrize("name", EXACT)
@pytest.mark.parametrize("params", [PLAIN, PROCESSED], ids=["plain", "processed"])
def test_emitted_law_is_the_targets(name: str, params: SamplingParams) -> None:
    got, want = emitted_law(TARGET, EXACT[name], params, 3), true_law(TARGET, params, 3)
    assert got.sum() == pytest.approx(1.0, abs=1e-9)
    assert np.abs(got - want).max() < 1e-6


BIASED = {
    "value-dependent cut": (value_dependent_cut, PLAIN),
    "second child with the unconditional law": (tree(conditional=False), PLAIN),
    "invalid draft treated as no proposal": (invalid_treated_as_none, PROCESSED),
    "AGREE with point masses throughout": (fused(1, keep_law=False), PLAIN),
}


@pytest.mark.parametrize("name", BIASED)
def test_known_mistakes_are_visible(name: str) -> None:
    drafter, params = BIASED[name]
    off = np.abs(emitted_law(TARGET, drafter, params, 2) - true_law(TARGET, params, 2)).max()
    assert off > 5e-3
