"""Greedy ids equal transformers' own generation: 20 prompts, 200 tokens, the bundled weights in fp32."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cache.arms import Arm
from soloist import demo

GOLDEN = json.loads((Path(__file__).parent.parent / "golden" / "demo.json").read_text())


@pytest.fixture(scope="module")
def arm():
    with Arm(demo.path(), spec="none", lookup="0", prefix_cache="0") as arm:
        yield arm


@pytest.mark.parametrize("kept", [pytest.param(8, id="quick"), pytest.param(20, id="all", marks=pytest.mark.slow)])
def test_twenty_prompts_of_two_hundred_tokens(arm: Arm, kept: int) -> None:
    entries = GOLDEN["entries"][:kept]
    assert len(GOLDEN["entries"]) == 20
    running = [arm.start(e["prompt_ids"], 200) for e in entries]
    for entry, pending in zip(entries, running, strict=True):
        assert len(entry["greedy_ids"]) == 200
        assert list(pending.answer().tokens) == entry["greedy_ids"], entry["prompt"]
