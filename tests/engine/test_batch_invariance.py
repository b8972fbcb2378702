"""E2: what runs beside a request, and in which order it came, changes no bit of its answer.

Also E1 in its smallest form (prompt lengths one by one, split at every grid point) and the start-up check that
says so when a product does not keep the promise.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from cache.arms import Arm, text
from soloist import demo

PLAIN = {"spec": "none", "lookup": "0", "prefix_cache": "0"}
TOKENS = 24


@pytest.fixture(scope="module")
def arm() -> Iterator[Arm]:
    with Arm(demo.path(), **PLAIN) as arm:
        yield arm


def _prompts(arm: Arm) -> list[list[int]]:
    lengths = (3, 17, 63, 64, 65, 130, 200, 300)
    return [text(n, arm.engine.vocab_size - 64, seed=n) for n in lengths]


def _params(i: int) -> dict[str, object]:
    """Greedy and coupled sampling, in turn."""
    if i % 2:
        return {"temperature": 0.9, "top_p": 0.95, "top_k": 20, "seed": i}
    return {"temperature": 0.0}


@pytest.mark.parametrize("orders", [pytest.param(2, id="quick"), pytest.param(10, id="ten", marks=pytest.mark.slow)])
def test_eight_at_once_in_many_orders(arm: Arm, orders: int) -> None:
    prompts = _prompts(arm)
    alone = [arm.ask(p, TOKENS, params=_params(i)).bits for i, p in enumerate(prompts)]
    assert len({tokens for tokens, _ in alone}) == len(alone)
    rng = random.Random(0)
    for _ in range(orders):
        order = rng.sample(range(len(prompts)), len(prompts))
        running = {i: arm.start(prompts[i], TOKENS, params=_params(i)) for i in order}
        for i, pending in running.items():
            assert pending.answer().bits == alone[i], f"request {i} in order {order}"
    arm.quiet()


def test_every_prompt_length_split_at_every_grid_point(arm: Arm, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts of 1..200 tokens: in one slice, and in slices of one grid chunk each."""
    ids = text(200, arm.engine.vocab_size - 64, seed=1)
    lengths = [1, 2, 5, 20, 40, 63, 64, 65, 100, 127, 128, 129, 191, 192, 193, 200]
    whole = {n: arm.ask(ids[:n], 3).bits for n in lengths}
    monkeypatch.setattr("soloist.engine.scheduler.IDLE_SLICE_TOKENS", 64)
    for n in lengths:
        assert arm.ask(ids[:n], 3).bits == whole[n], f"prompt of {n} tokens"


@pytest.mark.parametrize(
    "step", [pytest.param(7, id="seventh", marks=pytest.mark.slow), pytest.param(1, id="all", marks=pytest.mark.full)]
)
def test_prompt_lengths_from_one_to_two_hundred(arm: Arm, monkeypatch: pytest.MonkeyPatch, step: int) -> None:
    ids = text(200, arm.engine.vocab_size - 64, seed=2)
    whole = {n: arm.ask(ids[:n], 4).bits for n in range(1, 201, step)}
    monkeypatch.setattr("soloist.engine.scheduler.IDLE_SLICE_TOKENS", 64)
    for n in whole:
        assert arm.ask(ids[:n], 4).bits == whole[n], f"prompt of {n} tokens"


def test_a_product_that_lets_rows_differ_is_named(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with Arm(demo.path(), linear="plain", **PLAIN) as arm:
        degraded = " ".join(arm.engine.status().degraded)
    if not degraded:
        pytest.skip("this machine's plain product happens to keep rows apart")
    assert "E2 is off" in degraded and "LINEAR=plain" in degraded


def test_the_chosen_product_keeps_every_contract(arm: Arm) -> None:
    assert arm.engine.status().degraded == ()
