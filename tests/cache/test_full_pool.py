"""R50: a quantised cache is still right when every page has been another request's; R07, R12 are in test_conversation
(twelve turns, counted by ids) and test_formats, test_tiers (restarts)."""

from __future__ import annotations

from pathlib import Path

import pytest

from cache.arms import Arm, text

VOCAB = 256
REQUESTS = 30
PAGES = 24


@pytest.mark.parametrize("name", ["int8", *(pytest.param(name, marks=pytest.mark.slow) for name in ("fp8", "kvarn"))])
def test_the_last_requests_of_a_worn_pool_are_as_exact_as_the_first(tiny_model: Path, name: str) -> None:
    """No tolerance: every answer has the bits of an engine that has seen nothing else."""
    lengths = [40 + 37 * i % 400 for i in range(REQUESTS)]
    sizes = {"pool_tokens": str(PAGES * 64), "max_len": "512", "max_seqs": "3", "reserve_tokens": "64"}
    knobs = {"kv_format": name, "host_cache_gb": "0"}
    with (
        Arm(tiny_model, spec="mtp", **knobs, **sizes) as worn,
        Arm(tiny_model, spec="none", lookup="0", prefix_cache="0", **knobs) as plain,
    ):
        written = 0
        for first in range(0, REQUESTS, 3):
            prompts = [text(length, VOCAB, 900 + length) for length in lengths[first : first + 3]]
            answers = [pending.answer() for pending in [worn.start(prompt, tokens=8) for prompt in prompts]]
            written += sum(len(prompt) // 64 for prompt in prompts)
            if first < 9 or first >= REQUESTS - 9:
                for prompt, answer in zip(prompts, answers, strict=True):
                    assert answer.bits == plain.ask(prompt, tokens=8).bits
        worn.quiet()
        assert written > 3 * PAGES  # every page had several owners
