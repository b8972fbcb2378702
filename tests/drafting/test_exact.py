"""E1: greedy text and its log-probabilities are the same bits whatever was proposed. E4: sampled text with a seed too.

Random tiny checkpoints (logits with a spread of 3) and scripted proposals first: they reach every acceptance length
and every tree shape, which a trained drafter on a looping text does not. Then the demo with its real drafters.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from cache.arms import Answer, Arm, text
from drafting.scripted import Scripted, distinct_grams
from soloist import demo
from soloist.checkpoint.reader import Checkpoint
from soloist.models import step as step_module
from soloist.models.qwen3_5 import Qwen35
from soloist.models.state import Record
from soloist.ops.linear import DenseWeight, Weight
from tiny import build_tiny

PLAIN = {"spec": "none", "lookup": "0", "prefix_cache": "0", "settle": "0"}
TOKENS = 120


def use(arm: Arm, speculation) -> None:
    """Put another speculation into a resting engine."""
    arm.engine.speculation = arm.engine.runner.speculation = speculation


@pytest.fixture(scope="module")
def arm(tmp_path_factory) -> Iterator[Arm]:
    model = build_tiny(tmp_path_factory.mktemp("tiny"), pattern="LLFL", mtp=False)
    with Arm(model, verify_rows="16", **PLAIN) as arm:
        yield arm


@pytest.fixture(scope="module")
def truths(arm: Arm) -> dict[tuple[int, ...], Answer]:
    prompts = [tuple(text(n, 250, seed=n)) for n in (5, 63, 64, 65, 150)]
    out = {p: arm.ask(p, TOKENS) for p in prompts}
    assert sum(distinct_grams(a.tokens) > 0.6 for a in out.values()) >= 3
    return out


def faults(
    arm: Arm, truths: dict[tuple[int, ...], Answer], shape: str, seed: int, params: dict | None = None
) -> tuple[int, Scripted]:
    """Prompts whose answer differs under scripted proposals, all prompts at once."""
    script = Scripted({p: a.tokens for p, a in truths.items()}, shape, 250, seed)
    plain = arm.engine.speculation
    use(arm, script)
    try:
        running = {p: arm.start(p, TOKENS, params=params or {}) for p in truths}
        wrong = sum(running[p].answer().bits != a.bits for p, a in truths.items())
    finally:
        use(arm, plain)
    return wrong, script


@pytest.mark.parametrize("shape", ["chain", "tree", "wrong"])
@pytest.mark.parametrize("seed", range(3))
def test_no_proposal_changes_a_bit(arm: Arm, truths, shape: str, seed: int) -> None:
    wrong, script = faults(arm, truths, shape, seed)
    assert wrong == 0
    if shape == "wrong":
        assert sum(n * count for n, count in script.accepted.items()) < 10
    else:
        # How many rows a request gets depends on how many run beside it, so the far lengths may be missed.
        assert set(range(5)) <= set(script.accepted), "too few acceptance lengths were reached"


@pytest.mark.parametrize("fault", ["fold", "ancestor mask", "convolution tap", "accepted path"])
def test_the_instrument_sees_one_wrong_piece(arm: Arm, truths, fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    settle = Record.settle
    if fault == "fold":
        # One layer's state is not moved on after a step.
        def lame(self, step, caches, paths):
            kept = caches.state.states[1].clone()
            settle(self, step, caches, paths)
            caches.state.states[1].copy_(kept)

        monkeypatch.setattr(Record, "settle", lame)
    elif fault == "ancestor mask":
        # A row of a tree sees the row before it instead of its parent.
        def chained(parents, depth):
            lanes = lanes_of(parents, depth)
            if lanes is not None:
                lanes[-1, depth[-1] - 1] = len(parents) - 2
            return lanes

        lanes_of = step_module._lanes
        monkeypatch.setattr(step_module, "_lanes", chained)
    elif fault == "convolution tap":
        # The oldest tap of the last row reads its neighbour.
        forward = Qwen35.forward

        def shifted(self, step, caches, taps=()):
            if hasattr(step, "taps") and step.rows > 1:
                step.taps[-1, 0] = step.taps[-2, 0]
            return forward(self, step, caches, taps)

        monkeypatch.setattr(Qwen35, "forward", shifted)
    else:
        # The accepted path is taken to be the first rows of the step.
        def first_rows(self, step, caches, paths):
            moved = [replace(p, rows=range(p.rows[0], p.rows[0] + len(p.rows))) for p in paths]
            settle(self, step, caches, moved)

        monkeypatch.setattr(Record, "settle", first_rows)
    wrong, _ = faults(arm, truths, "tree", seed=0)
    assert wrong > 0, f"a wrong {fault} went unnoticed"


@pytest.mark.parametrize("shape", ["chain", "tree"])
def test_sampled_text_with_a_seed_does_not_change(arm: Arm, truths, shape: str) -> None:
    params = {"temperature": 0.9, "top_p": 0.95, "seed": 11}
    sampled = {p: arm.ask(p, TOKENS, params=params) for p in truths}
    wrong, script = faults(arm, sampled, shape, 5, params)
    assert wrong == 0
    assert len(script.accepted) > 5


# -- the demo with its drafters ------------------------------------------------------------------------------------

SHAPES = [
    {"spec": "mtp", "tree": "0", "lookup": "0", "draft_tokens": "1"},
    {"spec": "mtp", "tree": "0", "lookup": "1", "draft_tokens": "8", "block_rule": "saturated"},
    {"spec": "mtp", "tree": "1", "lookup": "1", "block_rule": "saturated"},
    {"spec": "dflash2", "tree": "0", "lookup": "1", "dflash_tokens": "15", "block_rule": "saturated"},
    {"spec": "dflash2", "tree": "1", "lookup": "0", "block_rule": "gain"},
    {"spec": "none", "tree": "1", "lookup": "1", "block_rule": "saturated"},
]
QUICK = {"greedy": {}, "coupled": {"temperature": 1.0, "seed": 3}, "cut": {"temperature": 0.8, "seed": 4, "top_k": 20}}


@pytest.fixture(scope="module")
def plain_answers() -> dict[tuple[str, int], Answer]:
    prompts = demo_prompts()[:3]
    with Arm(demo.path(), **PLAIN) as arm:
        return {
            (name, i): arm.ask(p, 60, params=params) for name, params in QUICK.items() for i, p in enumerate(prompts)
        }


def demo_prompts() -> list[list[int]]:
    """Copying, periodic and random text, as ids of the demo's vocabulary."""
    passage = text(90, 16000, seed=1)
    return [passage + passage[:20], ([11, 500, 394] * 30)[:80], text(70, 16000, seed=2), text(64, 16000, seed=3)]


@pytest.mark.parametrize("knobs", SHAPES, ids=lambda k: " ".join(f"{a}={b}" for a, b in k.items()))
def test_the_demos_drafters_change_nothing(knobs: dict[str, str], plain_answers) -> None:
    prompts = demo_prompts()[:3]
    with Arm(demo.path(), **{**PLAIN, **knobs}) as arm:
        running = {
            (name, i): arm.start(p, 60, params=params) for name, params in QUICK.items() for i, p in enumerate(prompts)
        }
        accepted = 0
        for key, pending in running.items():
            assert pending.answer().bits == plain_answers[key].bits, key
            accepted += pending.request.stats.accepted
    assert accepted > 0


@pytest.mark.parametrize("damage", [0.7, 30.0], ids=["partial", "near-zero"])
@pytest.mark.parametrize("spec", ["mtp", "dflash2"])
def test_a_corrupted_drafter_changes_nothing(
    spec: str, damage: float, plain_answers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Noise on all matrices of a drafter, in units of their deviation: fewer drafts are right, no text differs."""
    weight = Checkpoint.weight
    noise = torch.Generator().manual_seed(1)

    def corrupted(self: Checkpoint, module: str, copy: bool = True) -> Weight:
        whole = weight(self, module, copy)
        if self.kind != "drafter" and not module.startswith("mtp."):
            return whole
        dense = whole.dequantize()
        return DenseWeight(dense + damage * dense.std() * torch.randn(dense.shape, generator=noise))

    monkeypatch.setattr(Checkpoint, "weight", corrupted)
    knobs = {"spec": spec, "lookup": "0", "block_rule": "saturated"}
    with Arm(demo.path(), **{**PLAIN, **knobs}) as arm:
        running = {
            (name, i): arm.start(demo_prompts()[i], 60, params=QUICK[name]) for name, i in plain_answers if i < 2
        }
        got = {key: pending.answer() for key, pending in running.items()}
    assert [key for key in got if got[key].bits != plain_answers[key].bits] == []
    accepted, drafted = (sum(getattr(p.request.stats, n) for p in running.values()) for n in ("accepted", "drafted"))
    print(f"{spec} {damage}: {accepted} of {drafted}")
    assert 0.01 < accepted / drafted < 0.6 if damage < 1 else accepted / drafted < 0.01
