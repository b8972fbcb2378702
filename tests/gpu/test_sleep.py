"""A sleeping engine holds nothing on the card, and an awakened one answers with the same bits, captured again."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch

from cache.arms import Pending, text
from soloist import demo
from soloist.engine.build import build_engine
from soloist.engine.sleep import Sleeper
from soloist.sampling.params import SamplingParams
from soloist.settings import resolve

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
LEFT = 64 << 20  # bytes: workspaces that every engine of the process shares


@pytest.mark.parametrize("kept", ["weights in host memory", "weights read again"])
@pytest.mark.parametrize("form", ["int8 weights in bf16", "W4A16"])
def test_the_card_comes_back(kept: str, form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = demo.path()
    if form == "W4A16":
        from gpu.w4 import demo_in_w4

        model = demo_in_w4(tmp_path / "demo")
    if kept == "weights read again":
        monkeypatch.setattr("soloist.engine.kept.host_room", lambda: 0)
    knobs = {"model": str(model), "device": "cuda", "pool_tokens": "16384", "spec": "mtp", "graphs": "check"}
    settings = resolve(knobs, {}, {})
    engine = Sleeper(lambda remains: build_engine(settings, kept=remains))
    prompts = [text(n, engine.vocab_size - 64, seed=n) for n in (65, 300, 700)]

    def answers() -> list[tuple]:
        params = SamplingParams(max_tokens=48, temperature=0.0, logprobs=0)
        return [Pending(engine, prompt, params).answer() for prompt in prompts]

    try:
        first = answers()
        while engine._engine is not None and engine._engine._settling():
            time.sleep(0.01)
        awake = torch.cuda.memory_allocated()
        for _ in range(2):
            engine.sleep()
            asleep = torch.cuda.memory_allocated()
            assert asleep < min(LEFT, awake / 4), f"{asleep} of {awake} bytes are still held"
            assert (engine._kept.weights is not None) == (kept == "weights in host memory")
            again = answers()
            assert [a.bits for a in again] == [a.bits for a in first]
            assert all(a.cached > 0 for a in again)
            assert torch.cuda.memory_allocated() < 1.1 * awake
    finally:
        engine.close()
