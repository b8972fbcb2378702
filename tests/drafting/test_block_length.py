"""Controllers: the saturated rule against the batch-wide machine it comes from, the gain rule against enumeration."""

from __future__ import annotations

import random

import pytest
import torch

from drafting.reference import upstream_blocks
from soloist.drafting.block_length import GainRule, SaturatedConfig, SaturatedRule, StepCost
from soloist.engine.costs import fastest_ms, interpolated
from soloist.errors import SettingError


def trace_of(rng: random.Random, steps: int) -> list[tuple[bool, int]]:
    """Runs of copying and of prose, with single faults in both."""
    out: list[tuple[bool, int]] = []
    while len(out) < steps:
        copying = rng.random() < 0.5
        for _ in range(rng.randrange(1, 12)):
            normal = rng.random() < 0.85
            out.append((copying == normal, rng.choice([8, 16]) if copying == normal else rng.randrange(1, 8)))
    return out[:steps]


@pytest.mark.parametrize("sticky", [0, 1, 3])
def test_fed_one_step_late_it_is_the_machine_it_comes_from(sticky: int) -> None:
    rng = random.Random(sticky)
    longs = 0
    for _ in range(200):
        trace = trace_of(rng, 60)
        rule = SaturatedRule(SaturatedConfig(short=7, long=15, sticky=sticky))
        late = [(False, 0), (False, 1), *trace[1:-1]]
        ours = [rule.limit([], flag, emitted, 1000, True) for flag, emitted in late]
        assert ours == upstream_blocks(trace, 7, 15, sticky)
        longs += ours.count(15)
    assert longs > 500


def test_prose_never_gets_the_long_block_and_a_copy_gets_it_after_two_steps() -> None:
    rule = SaturatedRule(SaturatedConfig(short=7, long=15))
    steps = [(False, 0), (True, 8), (False, 3), (True, 8), (True, 8), (True, 16), (False, 2), (True, 3), (False, 1)]
    rows = [rule.limit([], flag, emitted, 1000, True) for flag, emitted in [*steps, (False, 1), (False, 1)]]
    assert rows == [7, 7, 7, 7, 15, 15, 15, 15, 15, 7, 7]


def test_always_long_and_cheap_contexts() -> None:
    always = SaturatedRule(SaturatedConfig(7, 15, adaptive=False))
    assert always.limit([], False, 0, 10**6, True) == 15
    cheap = SaturatedRule(SaturatedConfig(7, 15, cheap_ctx=100))
    assert [cheap.limit([], False, 1, n, True) for n in (100, 101)] == [15, 7]
    with pytest.raises(SettingError):
        SaturatedConfig(8, 7)


def test_gain_takes_the_best_prefix() -> None:
    rng = random.Random(5)
    for _ in range(300):
        rows = [0.0] + [2.0 + 0.2 * n + (1.0 if n > 8 else 0.0) for n in range(1, 17)]
        cost = StepCost(tuple(rows), draft=rng.random())
        alive, survival = 1.0, []
        for _ in range(rng.randrange(0, 20)):
            alive *= rng.random()
            survival.append(alive)
        got = GainRule(cost, 15).limit(survival, False, 1, 100, True)
        rate = [(1 + sum(survival[:n])) / (rows[n + 1] + cost.draft) for n in range(min(15, len(survival)) + 1)]
        assert rate[got] == pytest.approx(max(rate))


def test_gain_stops_drafting_where_it_does_not_pay_and_probes_again() -> None:
    rule = GainRule(StepCost((0.0, 1.0, 1.5, 2.0, 2.5), draft=1.0), long=3, probe=5, patience=20)
    drafted = []
    for _ in range(40):
        run = rule.drafts([], 1)
        drafted.append(run)
        rule.limit([0.1, 0.01] if run else [], False, 1, 100, run)
    assert [i for i, run in enumerate(drafted) if run] == [0, 6, 17, 38]
    emitted = 1
    for _ in range(40):
        run = rule.drafts([], emitted)
        rule.limit([0.95, 0.9, 0.85] if run else [], False, emitted, 100, run)
        emitted = 4 if run else 1
    assert all(rule.drafts([], 4) for _ in range(10))


@pytest.mark.parametrize("kept_promise", [True, False])
def test_gain_believes_outcomes_over_promises(kept_promise: bool) -> None:
    """Nodes that look good pay by their estimates; where such steps emit one token each, drafting stops soon."""
    rule = GainRule(StepCost((0.0, 1.0, 1.1, 1.2, 1.3), draft=0.5), long=3)
    emitted, drafted = 0, 0
    for _ in range(24):
        run = rule.drafts([], emitted)
        drafted += run
        rule.limit([0.7, 0.5, 0.3] if run else [], False, emitted, 100, run)
        emitted = 3 if run and kept_promise else 1
    assert drafted == 24 if kept_promise else 2 <= drafted <= 12


def test_a_cost_table_must_have_times() -> None:
    with pytest.raises(SettingError):
        StepCost((0.0,))
    assert StepCost((0.0, 1.0, 2.0)).verify(4) == pytest.approx(4.0)


def test_a_disturbed_measurement_never_looks_like_a_cost() -> None:
    table = interpolated({1: 4.0, 2: 90.0, 4: 5.0, 8: 7.0}, 8)
    assert table == pytest.approx((0.0, 4.0, 5.0, 5.0, 5.0, 5.5, 6.0, 6.5, 7.0))


def test_costs_are_the_fastest_runs_taken_in_turns() -> None:
    order: list[int] = []
    best = fastest_ms({1: lambda: order.append(1), 2: lambda: order.append(2)}, torch.device("cpu"))
    assert order == [1, 2] * (len(order) // 2) and len(order) >= 4
    assert all(0 <= ms < 1000 for ms in best.values())
