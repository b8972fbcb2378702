"""A drafter that is never right is said so: R57."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from cache.arms import Arm, text
from soloist.drafting.draft import Draft
from soloist.drafting.watch import AcceptanceWatch
from tiny import build_tiny


def test_a_barren_drafter_is_named_once_and_forgiven(caplog):
    watch = AcceptanceWatch(quiet=8)
    caplog.set_level(logging.INFO, "soloist.drafting")
    for _ in range(7):
        watch.observe(["mtp", "mtp"], [])
    assert watch.sentences == () and not caplog.records
    for _ in range(5):
        watch.observe(["mtp"], [])
    (sentence,) = watch.sentences
    assert "mtp" in sentence and [r.levelname for r in caplog.records] == ["WARNING"]
    watch.observe(["mtp"], ["mtp"])
    assert watch.sentences == () and "again" in caplog.records[-1].message


def test_a_step_that_another_source_won_says_nothing():
    watch = AcceptanceWatch(quiet=2)
    for _ in range(10):
        watch.observe(["mtp", "lookup"], ["lookup"])
    assert watch.sentences == ()
    watch.observe(["mtp"], [])
    watch.observe(["mtp"], [])
    assert len(watch.sentences) == 1


def test_one_success_starts_the_count_anew():
    watch = AcceptanceWatch(quiet=4)
    for step in range(40):
        watch.observe(["dflash2"], ["dflash2"] if step % 4 == 3 else [])
        assert watch.sentences == ()


def test_a_damaged_drafter_shows_in_the_status_and_in_no_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    prompt, model = text(60, 256, 4), tmp_path / "model"
    build_tiny(model)
    with (
        Arm(model, spec="none", lookup="0") as plain,
        Arm(model, spec="mtp", lookup="0", tree="0", block_rule="saturated") as arm,
    ):
        speculation = arm.engine.speculation
        monkeypatch.setattr(speculation, "_watch", AcceptanceWatch(quiet=10))
        right = plain.ask(prompt, tokens=30)
        expected = dict(enumerate(right.tokens, len(prompt)))

        def propose(asks):
            """The one token that is surely not the next."""
            return [Draft("mtp", [expected[a.position + 1] ^ 1], [None], [0.9]) for a in asks]

        monkeypatch.setattr(speculation.drafter, "propose", propose)
        assert arm.engine.status().degraded == ()
        assert arm.ask(prompt, tokens=30).bits == right.bits
        (sentence,) = arm.engine.status().degraded
        assert sentence.startswith("No draft of mtp was accepted")
