"""The same bits from every tier: after eviction, from host memory, from disk, after a restart, after parking."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from cache.arms import Arm, text

VOCAB = 256
MTP = {"spec": "mtp", "tree": "1"}


@pytest.fixture(scope="module")
def cold(tiny_model: Path) -> Iterator[Arm]:
    with Arm(tiny_model, spec="none", lookup="0", prefix_cache="0") as arm:
        yield arm


def test_more_conversations_than_pages(cold: Arm, tiny_model: Path) -> None:
    """A pool for two conversations and six of them: pages go to host memory and come back."""
    prompts = [text(300 + i, VOCAB, 500 + i) for i in range(6)]
    with Arm(tiny_model, **MTP, pool_tokens="768", max_len="384", max_seqs="2") as arm:
        first = [arm.ask(prompt) for prompt in prompts]
        again = [arm.ask(prompt) for prompt in prompts]
        arm.quiet()
        stats = arm.engine.reuse.prefix.stats
        assert stats.spilled_pages > 0 and stats.loaded_host > 0
        for prompt, one, two in zip(prompts, first, again, strict=True):
            assert one.bits == two.bits == cold.ask(prompt).bits
            assert two.cached == 256


def test_no_host_memory_means_cold_but_right(cold: Arm, tiny_model: Path) -> None:
    prompts = [text(300 + i, VOCAB, 600 + i) for i in range(4)]
    with Arm(tiny_model, **MTP, pool_tokens="768", max_len="384", max_seqs="2", host_cache_gb="0") as arm:
        for prompt in prompts * 2:
            answer = arm.ask(prompt)
            assert answer.cached == 0 and answer.bits == cold.ask(prompt).bits
        arm.quiet()


@pytest.mark.parametrize("spec", [{"spec": "none"}, MTP, {"spec": "dflash2", "tree": "0"}], ids=lambda s: s["spec"])
def test_a_restart_finds_the_conversation(cold: Arm, tiny_model: Path, tmp_path: Path, spec: dict[str, str]) -> None:
    prompt = text(200, VOCAB, 31)
    knobs = {**spec, "session_dir": str(tmp_path)}
    with Arm(tiny_model, **knobs) as arm:
        answer = arm.ask(prompt)
        arm.quiet()
        settled = len(prompt) + len(answer.tokens)
    follow = [*prompt, *answer.tokens, *text(40, VOCAB, 32)]
    with Arm(tiny_model, **knobs) as arm:
        warm = arm.ask(follow)
        assert warm.cached == (settled - 1) // 64 * 64
        assert warm.bits == cold.ask(follow).bits
        assert arm.ask(prompt).bits == answer.bits
        arm.quiet()
        assert arm.engine.reuse.prefix.stats.loaded_disk > 0


SPECS = {
    "none": {"spec": "none", "lookup": "0"},
    "mtp": {"spec": "mtp", "tree": "0", "lookup": "0"},
    "dflash2+lookup": {"spec": "dflash2", "tree": "0"},
    "tree": MTP,
}


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize(
    "step",
    [pytest.param(23, id="thirteen", marks=pytest.mark.slow), pytest.param(1, id="all", marks=pytest.mark.full)],
)
def test_lengths_up_to_three_hundred_from_every_tier(
    cold: Arm, tiny_model: Path, tmp_path: Path, spec: str, step: int
) -> None:
    """E3 after eviction, from host memory, from disk and after a restart: resent, and followed by another turn."""
    prompts = [text(n, VOCAB, 70_000 + n) for n in range(1, 301, step)]
    expected = [cold.ask(prompt) for prompt in prompts]
    turns = [[*p, *e.tokens, *text(30, VOCAB, len(p))] for p, e in zip(prompts, expected, strict=True)]
    follow = [cold.ask(turn) for turn in turns]
    small = {"pool_tokens": "768", "max_len": "384", "max_seqs": "2"}  # two conversations; there are at least thirteen

    def same(arm: Arm) -> int:
        """Everything asked again; returns the tokens that were reused."""
        reused = 0
        for asked, right in ((prompts, expected), (turns, follow)):
            for prompt, answer in zip(asked, right, strict=True):
                got = arm.ask(prompt)
                assert got.bits == answer.bits, (len(prompt), got.cached)
                reused += got.cached
        arm.quiet()
        return reused

    with Arm(tiny_model, **SPECS[spec], **small, host_cache_gb="0") as arm:
        same(arm)
        same(arm)
        assert arm.engine.reuse.prefix.stats.evicted_pages > 0
    with Arm(tiny_model, **SPECS[spec], **small, session_dir=str(tmp_path)) as arm:
        same(arm)
        assert same(arm) > 0
        stats = arm.engine.reuse.prefix.stats
        assert stats.spilled_pages > 0 and stats.loaded_host > 0
    with Arm(tiny_model, **SPECS[spec], **small, session_dir=str(tmp_path)) as arm:
        assert same(arm) > 0
        assert arm.engine.reuse.prefix.stats.loaded_disk > 0


def test_other_numerics_start_cold(cold: Arm, tiny_model: Path, tmp_path: Path, caplog) -> None:
    prompt = text(200, VOCAB, 33)
    with Arm(tiny_model, spec="none", session_dir=str(tmp_path)) as arm:
        arm.ask(prompt)
        arm.quiet()
    with caplog.at_level(logging.WARNING), Arm(tiny_model, **MTP, session_dir=str(tmp_path)) as arm:
        assert arm.ask(prompt).cached == 0
    assert "belongs to another numerics" in caplog.text


def test_a_dry_pool_parks_the_youngest(cold: Arm, tiny_model: Path) -> None:
    """Eight requests, a pool for about three, no max_tokens to go by: all finish with the text they have alone."""
    prompts = [text(70 + 9 * i, VOCAB, 700 + i) for i in range(8)]
    with Arm(tiny_model, **MTP, pool_tokens="1024", max_len="512", max_seqs="8", reserve_tokens="64") as arm:
        running = [arm.start(prompt, tokens=200) for prompt in prompts]
        answers = [pending.answer() for pending in running]
        arm.quiet()
        assert arm.engine.counters["preemptions"] > 0
        assert sum(pending.request.stats.parked for pending in running) > 0
        arm.engine.call(arm.engine.reuse.prefix.clear)
        assert arm.engine.memory.pages.used == 0
    for prompt, answer in zip(prompts, answers, strict=True):
        assert answer.bits == cold.ask(prompt, tokens=200).bits
