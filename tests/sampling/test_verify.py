"""One verify step: walking, cutting, errors; coupled text is a function of seed and prompt alone."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from sampling.tiny import Tiny, sparse
from soloist.drafting.proposal import Law, Proposal
from soloist.errors import EngineError
from soloist.sampling.draft import draft_law, draw
from soloist.sampling.history import History
from soloist.sampling.params import SamplingParams
from soloist.sampling.rng import derive_seed
from soloist.sampling.verify import Mode, verify

V = 6
TARGET, DRAFTER = Tiny(V, 1, 2.0), Tiny(V, 2, 2.0)
GREEDY = SamplingParams(temperature=0.0)


def one_hot(tokens: list[int]) -> torch.Tensor:
    return torch.nn.functional.one_hot(torch.tensor(tokens), 10).float()


def history(params: SamplingParams, output: tuple[int, ...] = (), vocab: int = V) -> History:
    out = History(params, [], vocab)
    for token in output:
        out.advance(token)
    return out


def test_greedy_chain_accepts_up_to_the_first_difference() -> None:
    state = history(GREEDY, vocab=10)
    best = [3, 4, 5, 6]
    for drafts, want in [([3, 4, 5], 4), ([3, 4, 9], 3), ([3, 9, 5], 2), ([9, 4, 5], 1), ([], 1)]:
        proposal = Proposal.chain(drafts, "mtp")
        verdict = verify(one_hot(best[: len(drafts) + 1]), proposal, state, 0, "greedy")
        assert verdict.tokens == best[:want]
        assert verdict.rows == list(range(want))
        assert verdict.nodes == [*range(want - 1), -1]
        assert verdict.sources == ["mtp"] * (want - 1) + ["target"]
        assert verdict.accepted == want - 1
        assert verdict.cut(1).tokens == best[:1]
    assert state.output == [] and state.depth == 0


def test_tree_walk_steps_to_the_matching_child() -> None:
    proposal = Proposal([1, 2, 3, 4, 5], [-1, -1, 1, 1, 3], [None] * 5, ["a", "b", "a", "c", "a"], [1.0] * 5)
    rows = one_hot([2, 9, 4, 9, 5, 7])
    verdict = verify(rows, proposal, history(GREEDY, vocab=10), 0, "greedy")
    assert verdict.tokens == [2, 4, 5, 7]
    assert verdict.nodes == [1, 3, 4, -1]
    assert verdict.rows == [0, 2, 4, 5]
    assert verdict.sources == ["b", "c", "a", "target"]


def test_the_walk_ends_at_a_stop_id_or_the_limit() -> None:
    proposal = Proposal.chain([3, 4, 5], "mtp")
    rows = one_hot([3, 4, 5, 6])
    stopping = SamplingParams(temperature=0.0, stop_ids=(4,))
    verdict = verify(rows, proposal, history(stopping, vocab=10), 0, "greedy")
    assert (verdict.tokens, verdict.nodes) == ([3, 4], [0, 1])
    assert verify(rows, proposal, history(GREEDY, vocab=10), 0, "greedy", limit=1).tokens == [3]
    assert verify(rows, proposal, history(GREEDY, vocab=10), 0, "greedy", limit=9).tokens == [3, 4, 5, 6]


@pytest.mark.parametrize("params", [GREEDY, SamplingParams(), SamplingParams(temperature=0.0, presence_penalty=0.1)])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_broken_row_is_named_only_if_the_walk_reaches_it(params: SamplingParams, bad: float) -> None:
    proposal = Proposal.chain([3, 4], "mtp")
    rows = one_hot([3, 8, 5]) * 60
    rows[2, 0] = bad
    state = history(params, vocab=10)
    assert verify(rows, proposal, state, 0, "coupled").tokens == [3, 8]
    rows[1, 7] = bad
    with pytest.raises(EngineError, match="row 1"):
        verify(rows, proposal, state, 0, "coupled")
    assert state.depth == 0 and state.output == []


def test_faults_of_the_caller_are_errors() -> None:
    with pytest.raises(EngineError, match="2 rows"):
        verify(torch.zeros(2, V), Proposal(), history(GREEDY), 0, "greedy")
    with pytest.raises(EngineError, match="temperature"):
        verify(torch.zeros(1, V), Proposal(), history(SamplingParams()), 0, "greedy")
    lying = Proposal.chain([3], "mtp", [Law((1, 2), (0.5, 0.5))])
    with pytest.raises(EngineError, match="token 3"):
        verify(torch.zeros(2, V), lying, history(SamplingParams()), 0, "rejection")


def random_proposal(rng: np.random.Generator, prefix: tuple[int, ...], honest: bool) -> Proposal:
    """A random tree of 0..7 nodes; `honest` ones carry the best guesses of the target itself."""
    proposal = Proposal()
    paths = [prefix]
    for node in range(int(rng.integers(0, 8))):
        parent = int(rng.integers(-1, node))
        path = paths[parent + 1]
        token = int(TARGET.logits(path).argmax()) if honest and rng.random() < 0.7 else int(rng.integers(0, V))
        proposal.tokens.append(token)
        proposal.parents.append(parent)
        proposal.laws.append(None if rng.random() < 0.5 else sparse(DRAFTER.probs(path)))
        proposal.sources.append("test")
        proposal.survival.append(1.0)
        paths.append((*path, token))
    return proposal


def text(params: SamplingParams, seed: int, length: int, mode: Mode, rng: np.random.Generator | None) -> list[int]:
    """`length` tokens, with random proposals if `rng` is given."""
    state = History(params, [], V)
    while len(state.output) < length:
        prefix = tuple(state.output)
        proposal = random_proposal(rng, prefix, bool(rng.integers(0, 2))) if rng is not None else Proposal()
        rows = TARGET.rows(prefix, proposal)
        for token in verify(rows, proposal, state, seed, mode, limit=length - len(prefix)).tokens:
            state.advance(token)
    return state.output


SETTINGS = [
    SamplingParams(),
    SamplingParams(temperature=0.7, top_k=3),
    SamplingParams(top_p=0.8, repetition_penalty=1.2, presence_penalty=0.5, frequency_penalty=0.1),
    SamplingParams(min_p=0.1, bad_words=((1, 2), (3,)), logit_bias={4: 1.0}),
    GREEDY,
]


@pytest.mark.parametrize("index", range(len(SETTINGS)))
def test_coupled_text_does_not_depend_on_proposals(index: int) -> None:
    """2,000 seeds over all settings, random trees, right and wrong drafts."""
    params, rng = SETTINGS[index], np.random.default_rng(index)
    texts = set()
    for seed in range(400):
        plain = text(params, seed - 200, 12, "coupled", None)
        assert text(params, seed - 200, 12, "coupled", rng) == plain
        texts.add(tuple(plain))
    assert len(texts) > 100 if index < 4 else len(texts) == 1


def test_without_drafts_both_schemes_draw_the_same_text() -> None:
    for seed in range(200):
        assert text(SamplingParams(), seed, 12, "rejection", None) == text(SamplingParams(), seed, 12, "coupled", None)


def test_rejection_is_a_function_of_seed_and_proposals() -> None:
    for seed in range(100):
        runs = [text(SamplingParams(), seed, 12, "rejection", np.random.default_rng(seed)) for _ in range(2)]
        assert runs[0] == runs[1]


def test_sequences_of_one_request_differ_and_the_first_is_the_single_one() -> None:
    alone = text(SamplingParams(), 42, 20, "coupled", None)
    several = [text(SamplingParams(), derive_seed(42, j), 20, "coupled", None) for j in range(8)]
    assert several[0] == alone
    assert len({tuple(s) for s in several}) == 8


def test_draws_with_the_same_noise_agree_where_the_laws_do() -> None:
    """A drafter that equals the target is always accepted in coupled mode, whatever the truncation."""
    for params in SETTINGS[:2]:
        for seed in range(100):
            tokens: list[int] = []
            for position in range(5):
                law = draft_law(TARGET.logits(tuple(tokens)), params)
                tokens.append(draw(law, seed, position, "coupled")[0][0])
            proposal = Proposal.chain(tokens, "test")
            verdict = verify(TARGET.rows((), proposal), proposal, History(params, [], V), seed, "coupled")
            assert verdict.tokens[:5] == tokens and verdict.accepted == 5


def test_draft_noise_is_disjoint_from_the_targets() -> None:
    law = draft_law(np.zeros(1000, dtype=np.float32), SamplingParams())
    same = sum(draw(law, 1, t, "rejection")[0][0] == draw(law, 1, t, "coupled")[0][0] for t in range(500))
    assert same < 10


def test_draws_without_replacement_carry_their_conditional_laws() -> None:
    q = DRAFTER.probs(())
    law = draft_law(DRAFTER.logits(()), SamplingParams())
    pairs = np.zeros((V, V))
    n = 6_000
    for position in range(n):
        (a, first), (b, second), *_ = draw(law, 3, position, "rejection", count=3)
        assert first is not None and second is not None
        assert first.probs == pytest.approx(q.tolist())
        left = np.delete(q, a) / (1 - q[a])
        assert a not in second.ids and second.probs == pytest.approx(left.tolist())
        pairs[a, b] += 1
    want = q[:, None] * q[None, :] / (1 - q[:, None])
    np.fill_diagonal(want, 0.0)
    mask = want > 0
    assert pairs[~mask].sum() == 0
    chi2 = ((pairs[mask] - n * want[mask]) ** 2 / (n * want[mask])).sum()
    assert chi2 < 29 + 5 * math.sqrt(58)
    assert draw(law, 3, 0, "greedy", count=2)[0][0] == int(q.argmax())
    assert [t for t, _ in draw(law, 3, 0, "greedy", count=99)] == np.argsort(-q).tolist()


def test_draft_laws_over_a_reduced_vocabulary() -> None:
    """Ids in any order, truncated to the request's support on the draft's own logits."""
    ids = np.array([50, 7, 900, 33])
    logits = np.array([1.0, 3.0, 2.0, 0.0], dtype=np.float32)
    law = draft_law(logits, SamplingParams(top_k=2, temperature=0.5), ids)
    assert law.ids.tolist() == [7, 900]
    assert law.probs == pytest.approx([math.e**2 / (1 + math.e**2), 1 / (1 + math.e**2)])
    assert draft_law(logits, SamplingParams(top_k=2), ids, truncate=False).ids.tolist() == [7, 33, 50, 900]
    assert draw(draft_law(logits, GREEDY, ids), 0, 0, "greedy")[0] == (7, None)
