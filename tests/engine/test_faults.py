"""E5: one request's fault ends that request and no other; a fault of the card ends the engine, and everyone is told."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from cache.arms import Arm, text
from soloist.errors import EngineDeadError, EngineError
from tiny import build_tiny

TOKENS = 24


@pytest.fixture
def arm(tmp_path: Path) -> Iterator[Arm]:
    build_tiny(tmp_path)
    with Arm(tmp_path, prefix_cache="0") as arm:
        yield arm


class Bomb:
    """A stop rule that raises at the n-th token."""

    def __init__(self, at: int) -> None:
        self.left = at

    def push(self, token: int) -> str | None:
        self.left -= 1
        if self.left == 0:
            raise ValueError("the stop rule is broken")
        return None


def _prompts() -> list[list[int]]:
    return [text(n, 250, seed=n) for n in (10, 20, 70)]


@pytest.mark.parametrize("at", [1, 2, 5, 9])
def test_a_broken_stop_rule_ends_its_request_alone(arm: Arm, at: int) -> None:
    prompts = _prompts()
    alone = [arm.ask(p, TOKENS).bits for p in prompts]
    first, bad, last = (
        arm.start(prompts[0], TOKENS),
        arm.start(prompts[1], TOKENS, halt=Bomb(at)),
        arm.start(prompts[2], TOKENS),
    )
    with pytest.raises(EngineError, match="the stop rule is broken"):
        bad.answer()
    assert (first.answer().bits, last.answer().bits) == (alone[0], alone[2])
    arm.quiet()


def test_a_nan_row_ends_its_request_alone(arm: Arm, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = _prompts()
    alone = [arm.ask(p, TOKENS).bits for p in prompts]
    model, calls = arm.engine.model, 0
    logits = model.logits

    def poisoned(hidden: torch.Tensor) -> torch.Tensor:
        nonlocal calls
        out = logits(hidden)
        # The first step that holds several requests: the last row belongs to the last one in the batch.
        if len(arm.engine.scheduler.decoding) == 3 and calls == 0 and hidden.shape[0] >= 3:
            calls += 1
            out = out.clone()
            out[-1] = float("nan")
            out[-2] = float("nan")
        return out

    monkeypatch.setattr(model, "logits", poisoned)
    running = [arm.start(p, TOKENS) for p in prompts]
    bits, failed = [], 0
    for pending in running:
        try:
            bits.append(pending.answer().bits)
        except EngineError as error:
            assert "row" in str(error)
            bits.append(None)
            failed += 1
    assert calls == 1 and failed <= 1
    for found, wanted in zip(bits, alone, strict=True):
        assert found in (None, wanted)
    arm.quiet()


def test_a_failing_step_is_retried_one_by_one(arm: Arm, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = _prompts()
    alone = [arm.ask(p, TOKENS).bits for p in prompts]
    runner = arm.engine.runner
    whole = runner._verify
    failures = 0

    def failing(requests, proposals):
        nonlocal failures
        if len(requests) > 1 and failures < 3:
            failures += 1
            raise RuntimeError("a host fault")
        return whole(requests, proposals)

    monkeypatch.setattr(runner, "_verify", failing)
    running = [arm.start(p, TOKENS) for p in prompts]
    assert [pending.answer().bits for pending in running] == alone
    assert failures
    arm.quiet()


def test_tokens_that_cannot_be_settled_end_the_request(arm: Arm, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fault after tokens were handed out must not hand them out twice."""
    runner = arm.engine.runner
    commit, seen = runner._commit, 0

    def failing(*args):
        nonlocal seen
        seen += 1
        if seen == 3:
            raise RuntimeError("the caches are out of reach")
        return commit(*args)

    monkeypatch.setattr(runner, "_commit", failing)
    running = [arm.start(p, TOKENS) for p in _prompts()[:2]]
    for pending in running:
        try:
            assert len(pending.answer().tokens) == TOKENS
        except EngineError as error:
            assert "out of reach" in str(error)
    arm.quiet()


def test_a_card_fault_ends_the_engine_and_everyone_is_told(arm: Arm, monkeypatch: pytest.MonkeyPatch) -> None:
    def fault(requests, proposals):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(arm.engine.runner, "_verify", fault)
    running = [arm.start(p, TOKENS) for p in _prompts()]
    for pending in running:
        with pytest.raises(EngineDeadError):
            pending.answer(timeout=5)
    assert not arm.engine.alive
    with pytest.raises(EngineDeadError):
        arm.start([1, 2, 3])
