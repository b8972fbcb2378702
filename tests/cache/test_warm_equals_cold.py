"""Contract E3: whatever was cached, wherever it had been, ids and log-probabilities are those of a cold run."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from cache.arms import Arm, text

VOCAB = 256
SPECS = {
    "none": {"spec": "none", "lookup": "0"},
    "mtp": {"spec": "mtp", "tree": "0", "lookup": "0"},
    "dflash2+lookup": {"spec": "dflash2", "tree": "0"},
    "tree": {"spec": "mtp", "tree": "1"},
}
LENGTHS = [2, 64, 65, 127, 128, 129]
TAILS = [1, 2, 64, 129]
ALL_TAILS = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 16, 17, 18, 62, 63, 64, 65, 66, 126, 127, 128, 129, 130]


@pytest.fixture(scope="module")
def cold(tiny_model: Path) -> Iterator[Arm]:
    """The plain arm: no cache, no drafts."""
    with Arm(tiny_model, spec="none", lookup="0", prefix_cache="0") as arm:
        yield arm


@pytest.fixture(scope="module", params=list(SPECS))
def warm(request: pytest.FixtureRequest, tiny_model: Path) -> Iterator[Arm]:
    with Arm(tiny_model, **SPECS[request.param]) as arm:
        yield arm
        arm.quiet()


def _sweep(cold: Arm, warm: Arm, lengths: list[int], seed: int) -> None:
    for length in lengths:
        prompt = text(length, VOCAB, seed + length)
        first = warm.ask(prompt)
        expected = cold.ask(prompt)
        assert first.bits == expected.bits and first.cached == 0, length
        again = warm.ask(prompt)
        assert again.bits == expected.bits, length
        assert again.cached == (length - 1) // 64 * 64, length
        warm.quiet()
        follow = [*prompt, *first.tokens, *text(30, VOCAB, 7)]
        next_turn = warm.ask(follow)
        assert next_turn.bits == cold.ask(follow).bits, length
        assert next_turn.cached == (length + len(first.tokens) - 1) // 64 * 64, length


def test_every_length_around_the_grid(cold: Arm, warm: Arm) -> None:
    _sweep(cold, warm, LENGTHS, seed=1000)


@pytest.mark.timeout(0)
@pytest.mark.parametrize(
    "step", [pytest.param(11, id="eleventh", marks=pytest.mark.slow), pytest.param(1, id="all", marks=pytest.mark.full)]
)
def test_lengths_up_to_three_hundred(cold: Arm, warm: Arm, step: int) -> None:
    _sweep(cold, warm, list(range(1, 301, step)), seed=50_000)


def _tails(cold: Arm, warm: Arm, tails: list[int]) -> None:
    head = text(192, VOCAB, 5)
    warm.ask(head, tokens=1)
    for tail in tails:
        prompt = head + text(tail, VOCAB, 100 + tail)
        answer = warm.ask(prompt)
        assert answer.bits == cold.ask(prompt).bits, tail
        assert answer.cached >= 192, tail


def test_uncached_tails(cold: Arm, warm: Arm) -> None:
    _tails(cold, warm, TAILS)


@pytest.mark.slow
def test_all_uncached_tails(cold: Arm, warm: Arm) -> None:
    _tails(cold, warm, ALL_TAILS)


def test_the_state_matters(cold: Arm, tiny_model: Path) -> None:
    """The instrument itself: with its recurrent state zeroed, a resumed prompt must not give the cold bits."""
    prompt = text(200, VOCAB, 9)
    with Arm(tiny_model, **SPECS["none"]) as arm:
        expected = arm.ask(prompt)
        assert expected.bits == cold.ask(prompt).bits
        for node in arm.engine.reuse.prefix.nodes():
            for name, tensor in node.snapshot.tensors.items() if node.snapshot else ():
                if name.startswith("state."):
                    tensor.zero_()
        again = arm.ask(prompt)
        assert again.cached == 192 and again.bits != expected.bits


def test_edit_in_the_middle_and_branches(cold: Arm, warm: Arm) -> None:
    base = text(260, VOCAB, 21)
    ends = [70, 140, 200]
    for end in ends:
        base[end] = 258  # <|im_end|>: a message boundary
    warm.ask(base)
    for place in (30, 180, 259):
        edited = [*base[:place], (base[place] + 1) % VOCAB, *base[place + 1 :]]
        answer = warm.ask(edited)
        assert answer.bits == cold.ask(edited).bits
        below = [end + 1 - (end + 1) % 64 for end in ends if end < place]
        assert answer.cached == max(below, default=0) if place < 259 else answer.cached == 256
        shorter = warm.ask(base[:place])
        assert shorter.bits == cold.ask(base[:place]).bits


def test_interleaved_sessions_and_cancelled_turns(cold: Arm, warm: Arm) -> None:
    turns = {name: text(90 + 7 * i, VOCAB, 300 + i) for i, name in enumerate("abcd")}
    for round_ in range(2):
        running = {name: warm.start(prompt) for name, prompt in turns.items()}
        dropped = warm.start(turns["a"] + text(200, VOCAB, round_), tokens=64)
        warm.engine.cancel(dropped.request)
        for name, pending in running.items():
            answer = pending.answer()
            assert answer.bits == cold.ask(turns[name]).bits
            turns[name] = [*turns[name], *answer.tokens, *text(20, VOCAB, 400 + round_)]
    warm.quiet()


def test_salt_separates(warm: Arm) -> None:
    prompt = text(150, VOCAB, 77)
    warm.ask(prompt)
    assert warm.ask(prompt, cache_salt="someone else").cached == 0
    assert warm.ask(prompt, cache_salt="someone else").cached == 128


def test_sampled_text_with_a_seed(cold: Arm, warm: Arm) -> None:
    prompt = text(140, VOCAB, 88)
    sampling = {"temperature": 0.9, "top_p": 0.95, "seed": 5}
    expected = cold.ask(prompt, params=sampling)
    assert warm.ask(prompt, params=sampling).bits == expected.bits
    again = warm.ask(prompt, params=sampling)
    assert again.bits == expected.bits and again.cached == 128


def test_equal_prompts_together_are_computed_once(cold: Arm, warm: Arm) -> None:
    prompt = text(210, VOCAB, 99)
    running = [warm.start(prompt) for _ in range(4)]
    answers = [pending.answer() for pending in running]
    assert {answer.bits for answer in answers} == {cold.ask(prompt).bits}
    assert sorted(answer.cached for answer in answers) == [0, 192, 192, 192]


def test_a_cancelled_prefill_stays_usable(tiny_model: Path, cold: Arm) -> None:
    prompt = text(1900, VOCAB, 12)
    with Arm(tiny_model, spec="mtp") as arm:
        pending = arm.start(prompt)
        while pending.request.settled < 512:
            time.sleep(0.001)
        arm.engine.cancel(pending.request)
        while arm.engine.status().running:
            time.sleep(0.001)
        reached = pending.request.settled
        answer = arm.ask(prompt)
        assert answer.cached == reached >= 512
        assert answer.bits == cold.ask(prompt).bits
        arm.quiet()


def test_prompt_logprobs_are_complete_on_a_warm_prompt(warm: Arm) -> None:
    prompt = text(130, VOCAB, 14)
    warm.ask(prompt)
    pending = warm.start(prompt, params={"prompt_logprobs": 0})
    assert pending.answer().cached == 0
    assert len(pending.prompt_rows) == len(prompt)


def test_prompt_logprobs_come_from_whole_blocks(warm: Arm, monkeypatch: pytest.MonkeyPatch) -> None:
    """A card runs few rows with a step's kernel, and how many rows a slice leaves for the end depends on who else is
    there; logits of all of a slice would not fit beside a full pool."""
    model, counts = warm.engine.model, []
    prompt = text(64 * 5 + 7, VOCAB, 15)

    def logits(hidden: torch.Tensor) -> torch.Tensor:
        counts.append(hidden.shape[0])
        return type(model).logits(model, hidden)

    monkeypatch.setattr(model, "logits", logits)
    pending = warm.start(prompt, tokens=1, params={"prompt_logprobs": 0})
    pending.answer()
    assert len(pending.prompt_rows) == len(prompt) and pending.prompt_rows[0] is None
    assert [entry.token for entry in pending.prompt_rows[1:]] == prompt[1:]
    assert counts == [64] * 6 + [1]
