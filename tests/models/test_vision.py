"""Pictures against transformers: processor, tower, M-RoPE, and logits of Qwen3_5ForConditionalGeneration in fp32."""

from __future__ import annotations

import itertools
import random
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import Qwen3_5ForConditionalGeneration
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil, smart_resize

from models.rig import Rig
from soloist.checkpoint.processor import read_processor
from soloist.checkpoint.reader import open_checkpoint
from soloist.errors import CheckpointError
from soloist.models.pictures import Picture, Sight, cache_keys, rope_offset, rotary_table
from soloist.models.step import RequestRows, prefill_step, verify_step
from soloist.models.vision import VisionTower
from soloist.server.pictures import PictureRules, decode_data_url, fit, rasterise
from tiny_vision import build_tiny_vision, data_url, picture

TOLERANCE = 1e-4
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_vision(tmp_path_factory.mktemp("vision"))


@pytest.fixture(scope="module")
def oracle(directory: Path) -> Qwen3_5ForConditionalGeneration:
    return Qwen3_5ForConditionalGeneration.from_pretrained(
        directory, dtype=torch.float32, attn_implementation="eager"
    ).eval()


def _tower(directory: Path, offload: bool = False) -> VisionTower:
    checkpoint = open_checkpoint(directory)
    config = checkpoint.config
    assert config.vision is not None
    processor = read_processor(directory)
    return VisionTower(config.vision, checkpoint.visual, processor, config.hidden_size, CPU, torch.float32, offload)


def _placed(directory: Path, image, start: int) -> Picture:
    raster = rasterise(decode_data_url(data_url(image), "here"), PictureRules(read_processor(directory)), "here")
    return Picture(raster.pixels, raster.rows, raster.columns, start, raster.digest)


def _ids(count: int, seed: int) -> list[int]:
    return torch.randint(0, 256, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def _prompt(oracle, directory: Path, texts: list[int], images: list) -> tuple[list[int], list[Picture]]:
    """text, picture, text, picture, ..., text."""
    pad = oracle.config.image_token_id
    ids = _ids(texts[0], 0)
    pictures = []
    for i, (count, image) in enumerate(zip(texts[1:], images, strict=True), 1):
        placed = _placed(directory, image, len(ids))
        pictures.append(placed)
        ids += [pad] * placed.tokens + _ids(count, i)
    return ids, pictures


def _oracle_inputs(oracle, directory: Path, ids: list[int], images: list) -> dict:
    processor = Qwen2VLImageProcessorPil.from_pretrained(directory)
    given = processor(images=images, return_tensors="pt")
    tokens = torch.tensor([ids])
    return {
        "input_ids": tokens,
        "pixel_values": given["pixel_values"],
        "image_grid_thw": given["image_grid_thw"],
        "mm_token_type_ids": (tokens == oracle.config.image_token_id).int(),
    }


def _worst(found: torch.Tensor, wanted: torch.Tensor) -> float:
    assert torch.isfinite(found).all()
    return float((found - wanted).abs().max() / wanted.abs().max())


def test_pixels_are_those_of_transformers_processor(directory: Path) -> None:
    tower = _tower(directory)
    processor = Qwen2VLImageProcessorPil.from_pretrained(directory)
    for seed, (width, height) in enumerate([(64, 48), (16, 16), (300, 200), (33, 250), (20, 8)]):
        image = picture(seed, width, height)
        placed = _placed(directory, image, 0)
        wanted = processor(images=image, return_tensors="pt")
        assert wanted["image_grid_thw"].tolist() == [[1, placed.rows * 2, placed.columns * 2]]
        assert _worst(tower.patches(placed), wanted["pixel_values"]) < 1e-6
    clear = picture(9).convert("RGBA")
    clear.putalpha(100)
    wanted = processor(images=clear, return_tensors="pt")
    assert _worst(tower.patches(_placed(directory, clear, 0)), wanted["pixel_values"]) < 1e-6


def test_sizes_are_those_of_transformers_processor(directory: Path) -> None:
    rng = random.Random(1)
    rules = PictureRules(read_processor(directory))
    bounds = {"min_pixels": rules.processor.smallest, "max_pixels": rules.processor.largest}
    for _ in range(500):
        height, width = rng.randint(2, 900), rng.randint(2, 900)
        if max(height, width) <= 200 * min(height, width):
            assert fit(height, width, rules) == smart_resize(height, width, factor=16, **bounds)
    capped = PictureRules(read_processor(directory), max_pixels=4096)
    assert np.prod(fit(900, 900, capped)) <= 4096


def test_tower_equals_transformers(directory: Path, oracle) -> None:
    tower = _tower(directory)
    images = [picture(1), picture(2, 160, 32)]
    given = Qwen2VLImageProcessorPil.from_pretrained(directory)(images=images, return_tensors="pt")
    with torch.no_grad():
        wanted = oracle.model.get_image_features(given["pixel_values"], given["image_grid_thw"]).pooler_output
    for image, rows in zip(images, wanted, strict=True):
        assert _worst(tower.encode(_placed(directory, image, 0)), rows) < 1e-5


def test_offloaded_equals_resident_bit_for_bit(directory: Path) -> None:
    resident, offloaded = _tower(directory), _tower(directory, offload=True)
    assert offloaded.nbytes == 0 < resident.nbytes
    for seed in range(3):
        placed = _placed(directory, picture(seed, 64 + 40 * seed), 0)
        assert torch.equal(resident.encode(placed), offloaded.encode(placed))
        assert torch.equal(resident.encode(placed), offloaded.encode(placed))  # nothing was used up


def test_positions_are_those_of_transformers(directory: Path, oracle) -> None:
    images = [picture(1), picture(2, 160, 32)]
    for texts in ([7, 20, 5], [1, 1, 3], [64, 1, 40]):
        ids, pictures = _prompt(oracle, directory, texts, images)
        given = _oracle_inputs(oracle, directory, ids, images)
        wanted, delta = oracle.model.get_rope_index(
            given["input_ids"], mm_token_type_ids=given["mm_token_type_ids"], image_grid_thw=given["image_grid_thw"]
        )
        assert torch.equal(rotary_table(len(ids), pictures), wanted[:, 0])
        assert rope_offset(pictures) == int(delta)
        sight = Sight(pictures, lambda p: torch.zeros(p.tokens, 1))
        pieces = [sight.rotary(at, 13) for at in range(0, len(ids) - 13, 13)]
        assert torch.equal(torch.cat(pieces, 1), wanted[:, 0, : 13 * len(pieces)])


@pytest.mark.parametrize("texts", [[9, 30, 21], [70, 3, 50]], ids=["short", "across the grid"])
def test_logits_of_text_picture_text_and_decode_after_it(directory: Path, oracle, texts: list[int]) -> None:
    images = [picture(1), picture(2, 160, 32)]
    ids, pictures = _prompt(oracle, directory, texts, images)
    later = _ids(12, 99)
    with torch.no_grad():
        wanted = oracle(**_oracle_inputs(oracle, directory, ids + later, images)).logits[0]
    rig = Rig(directory)
    sight = Sight(pictures, _tower(directory).encode)
    parts = []
    for start in range(0, len(ids), 64):
        step = prefill_step(ids[start : start + 64], start, 0, rig.pages[0], sight)
        hidden = rig.model.forward(step, rig.caches).hidden
        parts.append(rig.model.logits(hidden)[: min(64, len(ids) - start)])
    assert _worst(torch.cat(parts), wanted[: len(ids)]) < TOLERANCE
    for i, token in enumerate(later):
        rows = rig.rows([token], len(ids) + i)
        rows = type(rows)(rows.tokens, rows.parents, rows.settled, rows.slot, rows.pages, sight.offset)
        step, features, logits = rig.verify(rows)
        rig.settle(step, features, len(ids) + i, [0])
        assert _worst(logits[0], wanted[len(ids) + i]) < TOLERANCE


def test_a_wrong_position_or_row_is_noticed(directory: Path, oracle) -> None:
    """The instrument itself: plain positions, or a picture's rows in another order, move the logits past the bound."""
    images = [picture(1)]
    ids, pictures = _prompt(oracle, directory, [9, 30], images)
    with torch.no_grad():
        wanted = oracle(**_oracle_inputs(oracle, directory, ids, images)).logits[0]
    tower = _tower(directory)
    rig = Rig(directory)

    def run(step) -> float:
        rig.fresh()
        return _worst(rig.model.logits(rig.model.forward(step, rig.caches).hidden)[: len(ids)], wanted)

    right = prefill_step(ids, 0, 0, rig.pages[0], Sight(pictures, tower.encode))
    assert run(right) < TOLERANCE
    right.rotary = None
    assert run(right) > 10 * TOLERANCE
    assert (
        run(prefill_step(ids, 0, 0, rig.pages[0], Sight(pictures, lambda p: tower.encode(p).flip(0)))) > 10 * TOLERANCE
    )


def test_a_card_turns_rows_behind_pictures_by_their_offset() -> None:
    pytest.importorskip("triton")
    from soloist.models.card import CardShapes, Tables

    tables = Tables(CardShapes(rows=8, requests=3, pages=4, branches=4, splits=64), 4, CPU)
    batch = [
        RequestRows([1, 2, 3], [-1, 0, 0], 70, 0, [0, 1], rope_offset=-56),
        RequestRows([4, 5], [-1, 0], 9, 1, [2]),
    ]
    tables.fill(verify_step(batch, 4), 6)
    assert tables.card["positions"][:6].tolist() == [70, 71, 71, 9, 10, 0]
    assert tables.card["rotary"][:6].tolist() == [14, 15, 15, 9, 10, 0]
    tables.fill(verify_step(batch[1:], 4), 6)
    assert tables.card["rotary"][:6].tolist() == tables.card["positions"][:6].tolist() == [9, 10, 0, 0, 0, 0]


def test_cache_keys_tell_pictures_apart_and_leave_text_alone(directory: Path) -> None:
    pad = 300
    a, b = (_placed(directory, picture(seed), 5) for seed in (1, 2))
    ids = [*_ids(5, 0), *[pad] * a.tokens, *_ids(6, 1)]
    keys = [cache_keys(ids, [p]) for p in (a, b)]
    for found in keys:
        assert found[:5] == ids[:5] and found[-6:] == ids[-6:] and len(found) == len(ids)
        assert all(word < 0 for word in found[5 : 5 + a.tokens])
    assert all(x != y for x, y in zip(keys[0][5:-6], keys[1][5:-6], strict=True))
    assert cache_keys(ids, [_placed(directory, picture(1), 5)]) == keys[0]


def test_broken_towers_are_refused(directory: Path, tmp_path: Path) -> None:
    checkpoint = open_checkpoint(directory)
    config, processor = checkpoint.config, read_processor(directory)
    arguments = (processor, config.hidden_size, CPU, torch.float32)
    missing = dict(itertools.islice(checkpoint.visual.items(), 3, None))
    with pytest.raises(CheckpointError, match=r"visual\..* is missing"):
        VisionTower(config.vision, missing, *arguments)
    with pytest.raises(CheckpointError, match="the config implies"):
        VisionTower(config.vision | {"intermediate_size": 64}, checkpoint.visual, *arguments)
    with pytest.raises(CheckpointError, match="patch, temporal and merge"):
        VisionTower(config.vision | {"patch_size": 4}, checkpoint.visual, *arguments)
    with pytest.raises(CheckpointError, match=r"preprocessor_config\.json"):
        read_processor(tmp_path)
