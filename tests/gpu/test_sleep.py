"""A sleeping engine holds no more than shared scratch on the card, an awakened one answers with the same bits, captured
again, and engines beside and after a sleeping one hear nothing of it."""

from __future__ import annotations

import time
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch

from cache.arms import Answer, Pending, text
from soloist import demo
from soloist.engine.build import build_engine
from soloist.engine.engine import Engine
from soloist.engine.kept import ParkedStorages
from soloist.engine.sleep import Sleeper
from soloist.ops.upload import page_lock
from soloist.sampling.params import SamplingParams
from soloist.settings import Settings, resolve

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
LEFT = 16 << 20  # bytes: scratch that the products of every engine of the process share
FORMS = ("int8 weights in bf16", "W4A16")


def settings_of(form: str, directory: Path, **knobs: str) -> Settings:
    model = demo.path()
    if form == "W4A16":
        from gpu.w4 import demo_in_w4

        model = demo_in_w4(directory / "demo")
    return resolve({"model": str(model), "device": "cuda", "pool_tokens": "16384", "spec": "mtp", **knobs}, {}, {})


def answers(engine: Engine | Sleeper) -> list[Answer]:
    """Three answers, when their turns have been settled: nothing runs then."""
    params = SamplingParams(max_tokens=48, temperature=0.0, logprobs=0)
    prompts = [text(n, engine.vocab_size - 64, seed=n) for n in (65, 300, 700)]
    found = [Pending(engine, prompt, params).answer() for prompt in prompts]
    inner = engine._engine if isinstance(engine, Sleeper) else engine
    while inner is not None and inner._settling():
        time.sleep(0.01)
    return found


@pytest.mark.parametrize("kept", ["weights in host memory", "weights read again"])
@pytest.mark.parametrize("form", FORMS)
def test_the_card_comes_back(kept: str, form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if kept == "weights read again":
        monkeypatch.setattr("soloist.engine.kept.host_room", lambda: 0)
    settings = settings_of(form, tmp_path, graphs="check")
    engine = Sleeper(lambda remains: build_engine(settings, kept=remains))
    try:
        first = answers(engine)
        awake = torch.cuda.memory_allocated()
        for _ in range(2):
            engine.sleep()
            asleep = torch.cuda.memory_allocated()
            assert asleep < min(LEFT, awake / 4), f"{asleep} of {awake} bytes are still held"
            assert (engine._kept.weights is not None) == (kept == "weights in host memory")
            again = answers(engine)
            assert [a.bits for a in again] == [a.bits for a in first]
            assert all(a.cached > 0 for a in again)
            assert torch.cuda.memory_allocated() < 1.1 * awake
    finally:
        engine.close()


@pytest.mark.parametrize("form", FORMS)
def test_a_sleeping_engine_takes_nothing_from_others(form: str, tmp_path: Path) -> None:
    """The products of one process share scratch. An engine beside the sleeping one goes on with it, and one that is
    built after a sleeping engine was closed does."""
    settings = settings_of(form, tmp_path)

    def bits(engine: Engine | Sleeper) -> list[tuple]:
        return [a.bits for a in answers(engine)]

    with ExitStack() as at_last:
        beside = build_engine(settings)
        at_last.callback(beside.close)
        first = bits(beside)
        sleeper = Sleeper(lambda remains: build_engine(settings, kept=remains))
        at_last.callback(sleeper.close)
        assert bits(sleeper) == first
        sleeper.sleep()
        assert sleeper._kept.weights is not None
        assert bits(beside) == first
        sleeper.close()
        assert bits(beside) == first
        after = build_engine(settings)
        at_last.callback(after.close)
        assert bits(after) == first


def test_a_card_that_pins_nothing_more_only_copies_slower() -> None:
    """A refusal must not be left to the next kernel to raise."""
    tensor = torch.arange(1 << 20, device="cuda")
    host = torch.empty(1 << 20, dtype=torch.uint8)
    cudart = torch.cuda.cudart()
    assert int(cudart.cudaHostRegister(host.data_ptr(), host.numel(), 0)) == 0
    try:
        assert not page_lock(host, torch.device("cuda")), "it is page-locked already: refused"
        assert torch.equal(tensor + 1, torch.arange(1, (1 << 20) + 1, device="cuda"))
    finally:
        assert int(cudart.cudaHostUnregister(host.data_ptr())) == 0
    parked = ParkedStorages([tensor])
    host = parked._host
    parked.restore()
    parked.close()
    assert int(cudart.cudaHostRegister(host.data_ptr(), host.numel(), 0)) == 0, "it was unlocked when it was closed"
    assert int(cudart.cudaHostUnregister(host.data_ptr())) == 0
