"""The contracts on the demo: E1 over every way to speculate, E2 in many orders, E4 over many seeds.

E1 takes five prompts and 200 tokens a way with `-m slow`, all forty and 400 with `-m full`.

Half the prompts decode with a repetition penalty: greedy text of a small model loops, and a loop hides faults. It also
makes every row's law depend on the drafts before it.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from cache.arms import Answer, Arm
from drafting.prompts import prompts
from drafting.scripted import distinct_grams
from soloist import demo

PLAIN = {"spec": "none", "lookup": "0", "prefix_cache": "0", "settle": "0", "max_seqs": "8"}
SCOPES = {"slow": (9, 200), "full": (1, 400)}  # step through the prompts, tokens of an answer
WAYS: dict[str, dict[str, str]] = {
    **{f"mtp {k}": {"spec": "mtp", "tree": "0", "lookup": "0", "draft_tokens": str(k)} for k in range(1, 9)},
    "mtp lookup": {"spec": "mtp", "tree": "0"},
    "mtp tree": {"spec": "mtp"},
    "mtp tree gain": {"spec": "mtp", "block_rule": "gain"},
    "mtp tree of 8": {"spec": "mtp", "verify_rows": "8", "lookup": "0"},
    "dflash2 7": {"spec": "dflash2", "tree": "0", "lookup": "0"},
    "dflash2 7 lookup": {"spec": "dflash2", "tree": "0"},
    "dflash2 15": {"spec": "dflash2", "tree": "0", "dflash_tokens": "15"},
    "dflash2 tree": {"spec": "dflash2"},
    "dflash2 tree gain": {"spec": "dflash2", "block_rule": "gain"},
    "dflash2 tree without lookup": {"spec": "dflash2", "lookup": "0"},
    "lookup": {"spec": "none", "lookup": "1"},
    "lookup gain": {"spec": "none", "lookup": "1", "block_rule": "gain"},
    "rejection": {"spec": "mtp", "sampler": "rejection"},
    "coupled": {"spec": "mtp", "sampler": "coupled"},
}


def params(i: int) -> dict[str, float]:
    return {"temperature": 0.0, "repetition_penalty": 1.3 if i % 2 else 1.0}


@dataclass(frozen=True)
class Told:
    """Answers by prompt, and what speculation did for all of them together."""

    answers: dict[int, Answer]
    accepted: int
    steps: int
    sources: Counter[str]

    @property
    def tokens(self) -> int:
        return sum(len(a.tokens) for a in self.answers.values())


def tell(arm: Arm, scope: str) -> Told:
    step, tokens = SCOPES[scope]
    asked = dict(list(enumerate(prompts()))[::step])
    running = {i: arm.start(p, tokens, params=params(i)) for i, p in asked.items()}
    out = {i: pending.answer(3600) for i, pending in running.items()}
    assert all(len(a.tokens) == tokens for a in out.values())
    stats = [pending.request.stats for pending in running.values()]
    sources: Counter[str] = Counter()
    for s in stats:
        sources.update(s.accepted_by_source)
    return Told(out, sum(sources.values()), sum(s.steps for s in stats), sources)


@pytest.fixture(scope="module", params=[pytest.param(s, marks=getattr(pytest.mark, s)) for s in SCOPES])
def plain(request: pytest.FixtureRequest) -> tuple[str, Told]:
    with Arm(demo.path(), **PLAIN) as arm:
        out = tell(arm, request.param)
    assert lively(out) >= len(out.answers) // 2
    return request.param, out


def lively(told: Told) -> int:
    """How many of the answers do not loop."""
    return sum(distinct_grams(a.tokens) >= 0.6 for a in told.answers.values())


def sources_of(knobs: dict[str, str]) -> set[str]:
    """The draft sources a way has; text of the demo repeats itself enough for lookup to win drafts in all of them."""
    return {knobs["spec"]} - {"none"} | ({"lookup"} if knobs["lookup"] == "1" else set())


@pytest.mark.timeout(7200)
@pytest.mark.parametrize("way", WAYS)
def test_greedy_bits_do_not_depend_on_speculation(way: str, plain: tuple[str, Told], record_property) -> None:
    scope, expected = plain
    knobs = {"lookup": "1", "block_rule": "saturated", **WAYS[way]}
    with Arm(demo.path(), **{**PLAIN, **knobs}) as arm:
        got = tell(arm, scope)
    differ = [i for i, a in expected.answers.items() if got.answers[i].bits != a.bits]
    found = {"prompts": len(expected.answers), "not looping": lively(expected), "tokens": expected.tokens}
    found |= {f"accepted of {name}": count for name, count in sorted(got.sources.items())}
    found |= {"differ": len(differ), "accepted drafts": got.accepted, "tokens per step": got.tokens / got.steps}
    for name, value in found.items():
        record_property(name, value)
    assert differ == []
    assert set(got.sources) == sources_of(knobs), "what was to be swept did not take part"


MIXED = [
    {"temperature": 0.0},
    {"temperature": 0.0, "repetition_penalty": 1.2},
    {"temperature": 1.0, "seed": 1},
    {"temperature": 0.7, "top_k": 20, "top_p": 0.9, "seed": 2},
]


@pytest.fixture(scope="module", params=["mtp", "dflash2"])
def speculating(request) -> Iterator[Arm]:
    with Arm(demo.path(), **{**PLAIN, "spec": request.param, "lookup": "1", "block_rule": "saturated"}) as arm:
        yield arm


def orders(arm: Arm, count: int, tokens: int) -> None:
    chosen = [p[:120] for p in prompts()[::5]]
    how = [MIXED[i % len(MIXED)] for i in range(len(chosen))]
    alone = [arm.ask(p, tokens, params=h).bits for p, h in zip(chosen, how, strict=True)]
    rng = random.Random(1)
    for _ in range(count):
        order = rng.sample(range(len(chosen)), len(chosen))
        running = {i: arm.start(chosen[i], tokens, params=how[i]) for i in order}
        for i, pending in running.items():
            assert pending.answer(300).bits == alone[i], f"request {i} in order {order}"


def test_company_and_order_do_not_matter_while_speculating(speculating: Arm) -> None:
    orders(speculating, 2, 30)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_company_and_twenty_orders_do_not_matter_while_speculating(speculating: Arm) -> None:
    orders(speculating, 20, 60)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_seed_gives_the_same_text_with_and_without_speculation(speculating: Arm, record_property) -> None:
    """E4 over fifty seeds, five prompts and 80 tokens each."""
    chosen, seeds = prompts()[:5], 50
    asked = [(chosen[seed % 5], 80, {"temperature": 1.0, "seed": seed}) for seed in range(seeds)]
    with Arm(demo.path(), **PLAIN) as arm:
        running = [arm.start(prompt, tokens, params=params) for prompt, tokens, params in asked]
        plain = [pending.answer(900).bits for pending in running]
    fast = [speculating.start(prompt, tokens, params=params) for prompt, tokens, params in asked]
    assert [pending.answer(900).bits for pending in fast] == plain
    assert len(set(plain)) > seeds * 0.9
    accepted = sum(pending.request.stats.accepted for pending in fast)
    record_property("seeds", seeds)
    record_property("accepted drafts", accepted)
    assert accepted > 0
