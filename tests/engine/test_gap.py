"""Beside a long prompt a stream waits for one slice at a time, and a slice is sized by PREFILL_SLICE_MS."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

from cache.arms import Arm, text
from soloist.engine.request import Request
from soloist.engine.scheduler import PrefillSlice
from tiny import build_tiny

PROMPT = 8128  # what the tiny checkpoint has positions for
SLICE_MS = 40
MS_PER_TOKEN = 0.1  # what the scheduler is told, whatever this machine is busy with
LARGEST = 320  # the whole grid chunks in 340 tokens: a slice aims at 85 % of its time


def test_a_stream_steps_between_any_two_slices_of_a_long_prompt(tmp_path: Path) -> None:
    """By count: the time itself is measured by `python -m tools.robustness gap`."""
    build_tiny(tmp_path)
    work: list[int] = []  # tokens of a slice, 0 for a decode step
    with Arm(tmp_path, prefix_cache="0", max_len="8192", prefill_slice_ms=str(SLICE_MS)) as arm:
        engine = arm.engine
        prefill, decode, told = engine.runner.prefill, engine.runner.decode, engine.scheduler.prefilled

        def seen_prefill(work_: PrefillSlice) -> bool:
            work.append(work_.tokens)
            return prefill(work_)

        def seen_decode(requests: Sequence[Request]) -> None:
            work.append(0)
            decode(requests)

        engine.runner.prefill, engine.runner.decode = seen_prefill, seen_decode  # type: ignore[method-assign]
        engine.scheduler.prefilled = lambda tokens, ms: told(tokens, MS_PER_TOKEN * tokens)  # type: ignore[method-assign]
        stream = arm.start(text(20, 250, seed=1), 4000)
        for _ in range(3):
            stream.events.get(timeout=60)
        arm.ask(text(PROMPT, 250, seed=2), 1)
        engine.cancel(stream.request)
    beside = work[work.index(0) :]
    slices = [i for i, tokens in enumerate(beside) if tokens]
    assert sum(beside) == PROMPT and max(beside) == LARGEST
    assert all(later - earlier >= 2 for earlier, later in pairwise(slices)), "two slices without a step between"
