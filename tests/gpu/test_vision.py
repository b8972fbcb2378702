"""Pictures on a card: the tower streamed from host memory, E1 and E3 behind pictures, closeness to the CPU's answer."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from cache.arms import Answer, Arm
from soloist.checkpoint.processor import read_processor
from soloist.models.pictures import Picture
from soloist.server.pictures import PictureRules, decode_data_url, rasterise
from tiny_vision import build_tiny_vision, data_url, picture

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

SHAPES = {"head_dim": 256, "heads": 2, "kv_heads": 1, "hidden": 256, "key_dim": 128, "value_dim": 128}
KNOBS = {"vision": "1", "device": "cuda", "pool_tokens": "8192", "max_len": "1024"}
PAD = 268


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_vision(tmp_path_factory.mktemp("vision"), **SHAPES)


def _prompt(directory: Path, *seeds: int) -> tuple[list[int], tuple[Picture, ...]]:
    rules = PictureRules(read_processor(directory))
    ids = torch.randint(0, 256, (70,), generator=torch.Generator().manual_seed(0)).tolist()
    placed = []
    for seed in seeds:
        raster = rasterise(decode_data_url(data_url(picture(seed, 128, 128)), "here"), rules, "here")
        placed.append(Picture(raster.pixels, raster.rows, raster.columns, len(ids), raster.digest))
        ids += [PAD] * raster.tokens + ids[:60]
    return ids, tuple(placed)


def _ask(arm: Arm, prompt: tuple[list[int], tuple[Picture, ...]]) -> Answer:
    return arm.ask(prompt[0], 32, pictures=prompt[1])


def test_every_arm_gives_the_same_bits(directory: Path) -> None:
    prompts = [_prompt(directory, 1), _prompt(directory, 2), _prompt(directory, 1, 2)]
    with Arm(directory, **KNOBS, spec="none", lookup="0", prefix_cache="0") as arm:
        plain = [_ask(arm, prompt).bits for prompt in prompts]
    assert plain[0] != plain[1]
    for knobs in ({"spec": "mtp", "vision_offload": "1"}, {"spec": "mtp", "graphs": "off"}):
        with Arm(directory, **KNOBS, **knobs) as arm:
            for round_ in range(2):
                answers = [_ask(arm, prompt) for prompt in prompts]
                assert [answer.bits for answer in answers] == plain, f"round {round_}, {knobs}"
                arm.quiet()
            assert all(answer.cached >= 128 for answer in answers)


def test_the_streamed_tower_equals_the_resident_one_and_holds_nothing(directory: Path) -> None:
    _, (seen,) = _prompt(directory, 3)
    rows = []
    for offload in ("0", "1"):
        with Arm(directory, **KNOBS, spec="none", vision_offload=offload) as arm:
            tower = arm.engine.tower
            assert tower is not None and (tower.nbytes == 0) == (offload == "1")
            rows.append(tower.encode(seen).cpu())
    assert torch.equal(*rows)


def test_the_card_says_what_the_cpu_says(directory: Path) -> None:
    """First-token log-probabilities in bf16 beside fp32: far nearer than another picture's."""
    cpu = {"vision": "1", "device": "cpu", "max_len": "1024", "spec": "none"}
    prompts = [_prompt(directory, 1), _prompt(directory, 2)]
    found = []
    for knobs in (cpu, {**KNOBS, "spec": "none"}):
        with Arm(directory, **knobs) as arm:
            forced = [arm.ask(p[0], 1, pictures=p[1], params={"allowed_ids": (65,)}) for p in prompts]
            found.append(torch.tensor([answer.logprobs[0] for answer in forced]))
    assert (found[0] - found[1]).abs().max() < 0.25 * (found[0][0] - found[0][1]).abs()
