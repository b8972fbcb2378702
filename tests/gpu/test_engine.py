"""E1, E2 and E3 on a card: the bundled demo in bf16 and in W4A16, eager and captured."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from cache.arms import Arm, text
from soloist import demo

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

TOKENS = 64
ARMS = {
    "mtp chain": {"spec": "mtp", "tree": "0", "lookup": "0"},
    "mtp tree and lookup": {"spec": "mtp", "tree": "1", "lookup": "1"},
    "dflash2 tree": {"spec": "dflash2", "tree": "1", "lookup": "1"},
    "eager": {"spec": "mtp", "graphs": "off"},
    "checked": {"spec": "mtp", "graphs": "check"},
    "checked, dflash2 chain": {"spec": "dflash2", "lookup": "0", "graphs": "check"},
}


@pytest.fixture(scope="module", params=["int8 weights in bf16", "W4A16"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    if request.param != "W4A16":
        return demo.path()
    from gpu.w4 import demo_in_w4

    return demo_in_w4(tmp_path_factory.mktemp("w4") / "demo")


def _prompts(vocab: int) -> list[list[int]]:
    return [text(n, vocab - 64, seed=n) for n in (5, 63, 64, 65, 200, 300, 700)]


@pytest.fixture(scope="module")
def plain(model: Path) -> dict[int, tuple]:
    with Arm(model, device="cuda", pool_tokens="16384", spec="none", lookup="0", prefix_cache="0") as arm:
        assert arm.engine.status().degraded == ()
        prompts = _prompts(arm.engine.vocab_size)
        return {i: arm.ask(p, TOKENS).bits for i, p in enumerate(prompts)}


@pytest.mark.parametrize("name", ARMS)
def test_speculation_changes_no_bit(model: Path, plain: dict[int, tuple], name: str) -> None:
    with Arm(model, device="cuda", pool_tokens="16384", prefix_cache="0", **ARMS[name]) as arm:
        prompts = _prompts(arm.engine.vocab_size)
        for i, prompt in enumerate(prompts):
            assert arm.ask(prompt, TOKENS).bits == plain[i], f"prompt {i}"
        drafted = arm.engine.counters["drafted"]
        assert drafted > 0


def test_company_changes_no_bit(model: Path, plain: dict[int, tuple]) -> None:
    with Arm(model, device="cuda", pool_tokens="16384", spec="mtp", prefix_cache="0") as arm:
        prompts = _prompts(arm.engine.vocab_size)
        for seed in range(5):
            order = random.Random(seed).sample(range(len(prompts)), len(prompts))
            running = {i: arm.start(prompts[i], TOKENS) for i in order}
            for i, pending in running.items():
                assert pending.answer().bits == plain[i], f"request {i} in {order}"


FORMATS = {
    "fp8": {"kv_format": "fp8"},
    "int8": {"kv_format": "int8"},
    "fp8+int8": {"kv_format": "fp8", "kv_format_v": "int8"},
}


@pytest.mark.parametrize("name", FORMATS)
def test_every_kv_format_keeps_the_contracts(model: Path, plain: dict[int, tuple], name: str) -> None:
    """E1, E2 and E3 over stored codes: a plain arm against a drafting tree, alone, in company, warm and captured."""
    knobs = {"device": "cuda", "pool_tokens": "16384", **FORMATS[name]}
    with Arm(model, **knobs, spec="none", lookup="0", prefix_cache="0") as arm:
        prompts = _prompts(arm.engine.vocab_size)
        expected = {i: arm.ask(p, TOKENS).bits for i, p in enumerate(prompts)}
    assert expected != plain
    with Arm(model, **knobs, spec="mtp", tree="1") as arm:
        for i, prompt in enumerate(prompts):
            assert arm.ask(prompt, TOKENS).bits == expected[i], f"prompt {i} alone"
        running = {i: arm.start(prompt, TOKENS) for i, prompt in enumerate(prompts)}
        for i, pending in running.items():
            assert pending.answer().bits == expected[i], f"prompt {i} in company"
        arm.quiet()
        answer = arm.ask(prompts[-1], TOKENS)
        assert answer.cached > 0 and answer.bits == expected[len(prompts) - 1]
    with Arm(model, **knobs, spec="mtp", graphs="check", prefix_cache="0") as arm:
        assert arm.ask(prompts[-2], TOKENS).bits == expected[len(prompts) - 2]


def test_tiles_keep_the_contracts(model: Path) -> None:
    """E1, E2 and E3 with KVarN: answers that begin, cross or end at a tile's edge, prompts in slices, a small pool."""
    knobs = {"device": "cuda", "ctx": "huge"}
    lengths = (63, 250, 330, 370, 383, 384, 385, 510, 700, 1500)
    with Arm(model, **knobs, pool_tokens="16384", spec="none", lookup="0", prefix_cache="0") as arm:
        prompts = [text(n, arm.engine.vocab_size - 64, seed=n) for n in lengths]
        expected = [arm.ask(p, TOKENS).bits for p in prompts]
        assert arm.engine.memory.kv.format == "kvarn" and arm.engine.status().degraded == ()
    for spec in ("mtp", "dflash2"):
        with Arm(model, **knobs, pool_tokens="16384", spec=spec, tree="1", prefix_cache="0") as arm:
            for i, prompt in enumerate(prompts):
                assert arm.ask(prompt, TOKENS).bits == expected[i], f"{lengths[i]} tokens, {spec}"
            assert arm.engine.counters["drafted"] > 0
    with Arm(model, **knobs, pool_tokens="16384", spec="mtp") as arm:
        for seed in range(3):
            order = random.Random(seed).sample(range(len(prompts)), len(prompts))
            running = {i: arm.start(prompts[i], TOKENS) for i in order}
            for i, pending in running.items():
                assert pending.answer().bits == expected[i], f"{lengths[i]} tokens in {order}"
            arm.quiet()
        answer = arm.ask(prompts[-1], TOKENS)
        assert answer.cached == 1408 and answer.bits == expected[-1]
    with Arm(model, **knobs, pool_tokens="2048", max_len="1024", reserve_tokens="64", spec="mtp") as arm:
        running = {i: arm.start(prompts[i], TOKENS) for i in range(2, 8)}
        for i, pending in running.items():
            assert pending.answer().bits == expected[i], f"{lengths[i]} tokens in a small pool"
    with Arm(model, **knobs, pool_tokens="16384", spec="mtp", graphs="check", prefix_cache="0") as arm:
        assert arm.ask(prompts[3], TOKENS).bits == expected[3]


def test_warm_equals_cold(model: Path, plain: dict[int, tuple]) -> None:
    with Arm(model, device="cuda", pool_tokens="16384", spec="mtp") as arm:
        prompts = _prompts(arm.engine.vocab_size)
        for round_ in range(2):
            for i, prompt in enumerate(prompts):
                answer = arm.ask(prompt, TOKENS)
                assert answer.bits == plain[i], f"prompt {i}, round {round_}"
                arm.quiet()
        assert answer.cached > 0
