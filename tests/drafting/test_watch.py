"""A drafter that is never right is said so: R57."""

from __future__ import annotations

import logging

from soloist.drafting.watch import AcceptanceWatch


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
