"""An engine at rest gives freed memory back, once after use and never while somebody waits."""

from __future__ import annotations

from pathlib import Path

import pytest

from cache.arms import Arm, text
from soloist.engine import tidy
from tiny import build_tiny


def test_a_tidier_is_due_after_use_and_after_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(tidy.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(tidy, "trim_host", lambda: None)
    tidier = tidy.Tidier(every_s=30)
    now[0] = 100.0
    assert not tidier.due  # nobody has asked anything yet
    tidier.used()
    assert tidier.due
    tidier.tidy()
    tidier.used()
    assert not tidier.due
    now[0] = 130.0
    assert tidier.due


def test_an_engine_trims_when_it_has_come_to_rest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    with Arm(build_tiny(tmp_path / "m"), spec="mtp") as arm:
        engine = arm.engine
        engine._tidier = tidy.Tidier(every_s=0)
        monkeypatch.setattr(tidy, "trim_host", lambda: seen.append(engine._has_work()))
        first = arm.ask(text(40, 256, 1))
        arm.quiet()
        engine.call(lambda: None)
        assert seen and not any(seen)
        trims = len(seen)
        arm.quiet()
        assert len(seen) == trims  # nothing was asked since
        assert arm.ask(text(40, 256, 1)).bits == first.bits
