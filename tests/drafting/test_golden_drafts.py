"""Our target's features into our drafters, against drafts recorded from transformers and the drafters' definitions."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from cache.arms import Arm
from soloist import demo
from soloist.checkpoint.reader import open_checkpoint
from soloist.drafting.drafter import Ask, SettledTokens
from soloist.engine import drafters
from soloist.models.step import prefill_step
from soloist.sampling.params import SamplingParams
from soloist.settings import resolve

GOLDEN = json.loads((Path(__file__).parent.parent / "golden" / "demo.json").read_text())["entries"]
PROBED = [entry for entry in GOLDEN if "probe" in entry]
PLAIN = {"spec": "none", "lookup": "0", "prefix_cache": "0", "settle": "0"}


@pytest.fixture(scope="module")
def resting():
    with Arm(demo.path(), **PLAIN) as arm:
        yield arm.engine


@pytest.mark.parametrize("kind", ["mtp", "dflash2"])
def test_drafts_are_the_recorded_ones(kind: str, resting, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drafters, "drafting_dtype", lambda device, dtype: torch.float32)
    settings = resolve({"spec": kind, "block_rule": "saturated", "tree": "0", "threads": "1"}, {}, {})
    drafter = drafters.build_speculation(settings, open_checkpoint(demo.path()), resting.model, resting.memory).drafter
    assert len(PROBED) >= 2
    for entry in PROBED:
        probe = entry["probe"]
        tokens = (entry["prompt_ids"] + entry["greedy_ids"])[: probe["length"]]
        pages = list(range(1, 2 + len(tokens) // 64))
        resting.memory.state.reset(0)
        step = prefill_step(tokens, 0, 0, pages)
        found = resting.model.forward(step, resting.memory.caches, drafter.taps)
        n = len(tokens)
        taps = None if found.taps is None else found.taps[:n]
        drafter.absorb([SettledTokens(0, 0, [*tokens, probe["next"]], found.hidden[:n], taps, pages)])
        greedy = SamplingParams(temperature=0.0)
        ask = Ask(0, probe["next"], n, pages, greedy, 0, "greedy", drafter.depth)
        assert drafter.propose([ask])[0].tokens == probe[f"{kind}_drafts"]
        drafter.drop(0)
