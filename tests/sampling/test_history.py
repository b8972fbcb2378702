"""History along paths: what is pushed is undone exactly; thinking budgets and grammars follow the path."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from soloist.drafting.proposal import Proposal
from soloist.errors import EngineError
from soloist.sampling.history import History
from soloist.sampling.params import SamplingParams, ThinkingBudget
from soloist.sampling.processors import target_law
from soloist.sampling.rows import LogitRows
from soloist.sampling.verify import verify

END, CLOSE = 9, (3, 9, 4)


class Alternating:
    """A grammar of strictly alternating even and odd tokens, starting with an even one; counts its calls."""

    active = True
    finished = False

    def __init__(self) -> None:
        self.taken: list[int] = []

    def advance(self, token: int) -> bool:
        if token % 2 != len(self.taken) % 2:
            return False
        self.taken.append(token)
        return True

    def rollback(self, tokens: int) -> None:
        del self.taken[len(self.taken) - tokens :]

    def mask(self, row: torch.Tensor) -> None:
        row[1 - len(self.taken) % 2 :: 2] = -torch.inf

    def forced(self, limit: int) -> list[int]:
        return []


def test_push_and_pop_restore_every_state() -> None:
    rng = random.Random(0)
    params = SamplingParams(
        repetition_penalty=1.2, frequency_penalty=0.1, bad_words=((1, 2),), thinking=ThinkingBudget(3, CLOSE, END)
    )
    rows = torch.randn(1, 12)
    path = [rng.randrange(12) for _ in range(8)]
    walked, fresh = History(params, [1, 5], 12), History(params, [1, 5], 12)
    for token in path:
        for detour in range(3):
            for extra in range(detour):
                walked.push(rng.randrange(12) if extra else END)
            walked.pop(detour)
        assert (walked.position, walked.forced_token()) == (fresh.position, fresh.forced_token())
        assert walked.banned_words() == fresh.banned_words()
        assert np.array_equal(walked.seen, fresh.seen) and np.array_equal(walked.counts, fresh.counts)
        a, b = target_law(LogitRows(rows), 0, walked), target_law(LogitRows(rows), 0, fresh)
        assert np.array_equal(a.ids, b.ids) and np.array_equal(a.scores, b.scores)
        walked.advance(token)
        fresh.advance(token)


def generate(params: SamplingParams, rows, drafts, steps: int, grammar=None, mode="coupled") -> list[int]:  # type: ignore[no-untyped-def]
    """Speculative generation with `drafts(output) -> Proposal` on logits `rows(output) -> [V]`."""
    history = History(params, [0], 12, grammar)
    out: list[int] = []
    while len(out) < steps:
        proposal = drafts(out)
        paths = [tuple(out)]
        for token, parent in zip(proposal.tokens, proposal.parents, strict=True):
            paths.append((*paths[parent + 1], token))
        verdict = verify(torch.stack([rows(p) for p in paths]), proposal, history, 5, mode, limit=steps - len(out))
        for token in verdict.tokens:
            history.advance(token)
            out.append(token)
        if out[-1] in params.stop_ids:
            break
    return out


def noisy(output: tuple[int, ...]) -> torch.Tensor:
    g = torch.Generator().manual_seed(hash(tuple(output)) % 2**31)
    return torch.randn(12, generator=g)


def never_closing(output: tuple[int, ...]) -> torch.Tensor:
    x = noisy(output)
    x[END] = -50.0
    return x


@pytest.mark.parametrize("budget", [0, 1, 7, 64])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("drafted", [0, 1, 4, 9])
def test_thinking_budget_is_exact_with_drafts(budget: int, temperature: float, drafted: int) -> None:
    params = SamplingParams(temperature=temperature, thinking=ThinkingBudget(budget, CLOSE, END))
    steps = budget + len(CLOSE) + 8
    plain = generate(params, never_closing, lambda out: Proposal(), steps)

    def oracle(out: list[int]) -> Proposal:
        """Right drafts, so that a block runs across the budget's end."""
        return Proposal.chain(plain[len(out) : len(out) + drafted], "test")

    out = generate(params, never_closing, oracle, steps)
    assert out == plain
    assert END not in out[:budget]
    assert tuple(out[budget : budget + len(CLOSE)]) == CLOSE
    free = SamplingParams(temperature=temperature)
    assert out[:budget] == generate(free, never_closing, lambda out: Proposal(), steps)[:budget]


@pytest.mark.parametrize("at", [0, 3, 6])
def test_a_natural_close_before_the_budget_is_respected(at: int) -> None:
    def closing(output: tuple[int, ...]) -> torch.Tensor:
        x = never_closing(output)
        if len(output) == at:
            x[END] = 50.0
        return x

    params = SamplingParams(temperature=0.0, thinking=ThinkingBudget(7, CLOSE, END))
    free = generate(SamplingParams(temperature=0.0), closing, lambda out: Proposal(), 20)
    assert free[at] == END
    assert generate(params, closing, lambda out: Proposal.chain(free[len(out) : len(out) + 4], "test"), 20) == free


@pytest.mark.parametrize("mode", ["coupled", "rejection"])
def test_grammar_follows_the_path_and_is_left_where_it_was(mode: str) -> None:
    rng = random.Random(1)
    grammar = Alternating()

    def drafts(out: list[int]) -> Proposal:
        tokens = [rng.randrange(12) for _ in range(5)]
        return Proposal(tokens, [-1, -1, 0, 1, 2], [None] * 5, ["test"] * 5, [1.0] * 5)

    out = generate(SamplingParams(), noisy, drafts, 200, grammar, mode)
    assert all(t % 2 == i % 2 for i, t in enumerate(out))
    assert grammar.taken == out
    if mode == "coupled":
        assert out == generate(SamplingParams(), noisy, lambda out: Proposal(), 200, Alternating())


def test_an_emitted_token_the_grammar_refuses_is_an_error_of_this_request() -> None:
    history = History(SamplingParams(), [], 12, Alternating())
    with pytest.raises(EngineError, match="not allowed by the grammar"):
        history.advance(1)
    assert history.output == []


@pytest.mark.parametrize("option", ["penalties", "bad_words", "min_tokens"])
def test_options_act_inside_a_block_as_token_by_token(option: str) -> None:
    params = {
        "penalties": SamplingParams(temperature=0.0, repetition_penalty=1.5, presence_penalty=1.0),
        "bad_words": SamplingParams(temperature=0.0, bad_words=tuple((i, (i * 5 + 1) % 12) for i in range(12))),
        "min_tokens": SamplingParams(temperature=0.0, min_tokens=30, stop_ids=tuple(range(6)), max_tokens=60),
    }[option]
    plain = generate(params, noisy, lambda out: Proposal(), 60)
    for drafted in range(1, 10):
        spec = generate(params, noisy, lambda out, n=drafted: Proposal.chain(plain[len(out) :][:n], "test"), 60)
        assert spec == plain
    free = generate(SamplingParams(temperature=0.0), noisy, lambda out: Proposal(), 60)
    assert free != plain
    if option == "min_tokens":
        assert len(plain) > 30 and plain[-1] < 6 and all(t >= 6 for t in plain[:-1])
