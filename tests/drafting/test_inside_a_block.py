"""What falls inside an accepted block: stops, limits, options, log-probabilities. All as if tokens came one by one.

Every event is swept over its offset in blocks of 1 to 15 accepted drafts. R14, R16, R18, R53: reports of what went
wrong on other systems, see docs/speculation.md.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from cache.arms import Arm, text
from drafting.scripted import Scripted, distinct_grams
from soloist.engine.request import Event, Request
from tiny import build_tiny

PLAIN = {"spec": "none", "lookup": "0", "prefix_cache": "0", "settle": "0"}
BLOCKS = ["1", "3", "4", "7", "15"]
PROMPT = text(40, 250, seed=3)
LENGTH = 48


@dataclass
class Stop:
    """A stop string spread over several tokens."""

    ids: Sequence[int]
    seen: list[int] = field(default_factory=list)

    def push(self, token: int) -> str | None:
        self.seen.append(token)
        return "END" if self.seen[-len(self.ids) :] == list(self.ids) else None


@dataclass
class Heard:
    tokens: list[int]
    entries: list
    reason: str | None
    stop: object
    request: Request


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return build_tiny(tmp_path_factory.mktemp("tiny"), pattern="LLFL", mtp=False)


@pytest.fixture(scope="module")
def arm(model: Path) -> Iterator[Arm]:
    with Arm(model, **PLAIN) as arm:
        yield arm


@pytest.fixture(scope="module")
def truth(arm: Arm) -> list[int]:
    tokens = list(arm.ask(PROMPT, LENGTH).tokens)
    assert distinct_grams(tokens, 3) > 0.9
    return tokens


def hear(
    arm: Arm, answer: Sequence[int] | None, shape: str, halt: Stop | None = None, limit: int = LENGTH, **params
) -> Heard:
    """One request whose right answer is proposed; `answer` None speculates nothing."""
    plain = arm.engine.speculation
    if answer is not None:
        script = Scripted({tuple(PROMPT): answer}, shape, 250, seed=1)
        arm.engine.speculation = arm.engine.runner.speculation = script
    try:
        pending = arm.start(PROMPT, limit, params={"logprobs": 3, **params}, halt=halt)
        events: list[Event] = []
        while not events or events[-1].finish_reason is None:
            events.append(pending.events.get(timeout=60))
            if events[-1].error is not None:
                raise events[-1].error
    finally:
        arm.engine.speculation = arm.engine.runner.speculation = plain
    return Heard(
        [t for e in events for t in e.tokens],
        [entry for e in events for entry in e.logprobs or ()],
        events[-1].finish_reason,
        events[-1].stop_reason,
        pending.request,
    )


def check_ends_after(heard: Heard, wanted: Sequence[int], reason: str) -> None:
    """Exactly these tokens, as many entries, as many counted, nothing held back or left behind."""
    assert heard.tokens == list(wanted)
    assert [entry.token for entry in heard.entries] == heard.tokens
    stats = heard.request.stats
    assert (stats.output_tokens, heard.reason) == (len(wanted), reason)
    assert stats.accepted + stats.steps >= len(wanted)
    assert heard.request.output == list(wanted) and not heard.request.pages


@pytest.mark.parametrize("block", BLOCKS)
def test_a_stop_string_over_three_tokens(arm: Arm, truth: list[int], block: str) -> None:
    """R14a."""
    for end in range(3, 24):
        heard = hear(arm, truth, block, Stop(truth[end - 3 : end]))
        check_ends_after(heard, truth[:end], "stop")
        assert heard.stop == "END"
    arm.quiet()


@pytest.mark.parametrize("block", BLOCKS)
def test_a_stop_id(arm: Arm, truth: list[int], block: str) -> None:
    for end in range(1, 24):
        first = truth.index(truth[end - 1]) + 1
        heard = hear(arm, truth, block, stop_ids=(truth[end - 1],))
        check_ends_after(heard, truth[:first], "stop")
        assert heard.stop == truth[end - 1]


@pytest.mark.parametrize("block", BLOCKS)
def test_max_tokens(arm: Arm, truth: list[int], block: str) -> None:
    """R14b."""
    for limit in range(1, 21):
        check_ends_after(hear(arm, truth, block, limit=limit), truth[:limit], "length")


@pytest.mark.parametrize("shape", [*BLOCKS, "tree"])
@pytest.mark.parametrize("params", [{}, {"temperature": 1.0, "seed": 7}], ids=["greedy", "seeded"])
def test_log_probabilities_and_alternatives_are_the_plain_ones(arm: Arm, shape: str, params: dict) -> None:
    """R16."""
    plain = hear(arm, None, "", **params)
    fast = hear(arm, plain.tokens, shape, **params)
    assert fast.request.stats.accepted > 0
    assert fast.entries == plain.entries
    assert all(len(entry.top) == 3 for entry in fast.entries)
    assert len(fast.entries) == fast.request.stats.output_tokens == LENGTH


SEEDED = {"temperature": 1.0, "seed": 5}
OPTIONS: dict[str, tuple[dict, dict]] = {
    "presence": ({}, {"presence_penalty": 2.0}),
    "frequency": ({}, {"frequency_penalty": 1.5}),
    "repetition": ({}, {"repetition_penalty": 1.3}),
    "bias": ({}, {"logit_bias": {17: 100.0}}),
    "allowed": ({}, {"allowed_ids": tuple(range(0, 200, 3))}),
    "min_p": (SEEDED, {"min_p": 0.2}),
    "top_p": (SEEDED, {"top_p": 0.3}),
    "top_k": (SEEDED, {"top_k": 2}),
    "temperature": (SEEDED, {"temperature": 0.3}),
    "seed": (SEEDED, {"seed": 6}),
    "all": (SEEDED, {"presence_penalty": 0.5, "repetition_penalty": 1.1, "top_k": 20, "top_p": 0.9, "min_p": 0.01}),
}


@pytest.mark.parametrize("option", OPTIONS)
def test_every_option_acts_on_each_token_of_a_block(arm: Arm, option: str) -> None:
    """R18."""
    base, change = OPTIONS[option]
    without = hear(arm, None, "", **base)
    plain = hear(arm, None, "", **base | change)
    assert plain.tokens != without.tokens, "the option does nothing here"
    for shape in ("3", "15", "tree"):
        fast = hear(arm, plain.tokens, shape, **base | change)
        assert fast.request.stats.accepted > 0
        assert (fast.tokens, fast.entries) == (plain.tokens, plain.entries)


def test_bad_words_and_min_tokens_inside_a_block(arm: Arm, truth: list[int]) -> None:
    for at in range(2, 20):
        banned = {"bad_words": ((truth[at - 1], truth[at]),)}
        plain = hear(arm, None, "", **banned)
        assert plain.tokens[: at + 1] != truth[: at + 1]
        assert hear(arm, plain.tokens, "7", **banned).tokens == plain.tokens
        patient = {"stop_ids": (truth[at],), "min_tokens": at + 4}
        plain = hear(arm, None, "", **patient)
        fast = hear(arm, plain.tokens, "7", **patient)
        assert (fast.tokens, fast.reason) == (plain.tokens, plain.reason) and len(fast.tokens) >= at + 4


def test_the_same_request_again_gives_the_same_bytes(arm: Arm, model: Path, truth: list[int]) -> None:
    """R53: twenty times, after other traffic and beside it, and after a restart; greedy and with a seed."""
    firsts = []
    for params in ({}, SEEDED):
        first = hear(arm, None, "", **params)
        answers = []
        for n in range(20):
            if n % 2:
                arm.ask(text(20 + n, 250, seed=n), 4)
            beside = arm.start(text(70, 250, seed=40 + n), 10) if n % 3 == 0 else None
            answers.append(hear(arm, first.tokens, (*BLOCKS, "tree")[n % 6], **params))
            if beside is not None:
                beside.answer()
        assert all((a.tokens, a.entries) == (first.tokens, first.entries) for a in answers)
        firsts.append(first)
    with Arm(model, **PLAIN) as again:
        for params, first in zip(({}, SEEDED), firsts, strict=True):
            answer = hear(again, first.tokens, "7", **params)
            assert (answer.tokens, answer.entries) == (first.tokens, first.entries)
