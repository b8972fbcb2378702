"""Directories laid out as published quants are: several oddities at once, opened, served, and brought to our own form.

A multimodal prefix and a vision tower, shards, the MTP module in a side file that the index names and the quantisation
config does not mention, group scales of either sign, head in bf16 or tied to a bf16 embedding.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from foreign import make_foreign
from soloist import Engine
from soloist.checkpoint.reader import open_checkpoint
from soloist.checkpoint.shards import INDEX_NAME
from soloist.errors import CheckpointError
from soloist.prepare.inspect import inspect
from soloist.prepare.quantize import quantize
from soloist.prepare.recipe import PartRecipe
from soloist.sampling.params import SamplingParams
from tiny import build_tiny

EXTRA = "model_extra_tensors.safetensors"
LAYOUTS: dict[str, tuple[str, bool, dict[str, object]]] = {
    # name: the tensors' form, symmetric, what the config says beyond that form's usual words
    "AutoRound, auto_gptq": (
        "gptq",
        True,
        {
            "quant_method": "auto-round",
            "packing_format": "auto_round:auto_gptq",
            "block_name_to_quantize": "model.language_model.layers",
            "extra_config": {"model.language_model.layers.0.linear_attn.in_proj_a": {"bits": 16, "data_type": "float"}},
        },
    ),
    "AutoRound, auto_awq, asymmetric": (
        "awq",
        False,
        {"quant_method": "auto-round", "packing_format": "auto_round:auto_awq", "sym": False, "zero_point": True},
    ),
    "AutoRound, raw zero points, asymmetric": ("auto-round", False, {}),
    "compressed-tensors, asymmetric": ("pack-quantized", False, {}),
    "compressed-tensors, ignore without MTP": ("pack-quantized", True, {"ignore": ["lm_head", "re:.*visual.*"]}),
    "GPTQ that excludes MTP": ("gptq", False, {"dynamic": {"-:.*mtp.*": {}}}),
}


def published(directory: Path, form: str, symmetric: bool, words: dict[str, object], tied: bool) -> dict[str, object]:
    """Write it; returns stored module name -> weight."""
    source = build_tiny(
        directory.with_name("source"), pattern="LLLF", nested=True, tied=tied, shards=2, dtype=torch.bfloat16
    )
    expected = make_foreign(source, directory, form, symmetric=symmetric)
    index = json.loads((directory / INDEX_NAME).read_text())
    extra: dict[str, torch.Tensor] = {}
    for path in sorted(directory.glob("*.safetensors")):
        tensors = load_file(path)
        moved = {name: tensors.pop(name) for name in list(tensors) if name.startswith("mtp.")}
        extra |= moved
        tensors[f"model.visual.blocks.{len(tensors)}.norm1.weight"] = torch.zeros(4, dtype=torch.bfloat16)
        save_file(tensors, path, {"format": "pt"})
        index["weight_map"] |= dict.fromkeys(tensors, path.name)
    save_file(extra, directory / EXTRA, {"format": "pt"})
    index["weight_map"] |= dict.fromkeys(extra, EXTRA)
    (directory / INDEX_NAME).write_text(json.dumps(index))
    config = json.loads((directory / "config.json").read_text())
    config["quantization_config"] |= words
    (directory / "config.json").write_text(json.dumps(config))
    return dict(expected)


def answers(directory: Path, spec: str) -> list[tuple[int, ...]]:
    params = SamplingParams(max_tokens=12, temperature=0.0)
    with Engine(directory, spec=spec, lookup=False, threads=1, max_len=128, prefix_cache=False, vision=False) as engine:
        return [answer.tokens for answer in engine.generate([list(b"a fox"), list(b"the moon and")], params)]


QUICK = (("AutoRound, auto_awq, asymmetric", True), ("compressed-tensors, ignore without MTP", False))


@pytest.mark.parametrize(
    "layout, tied",
    [
        pytest.param(layout, tied, marks=() if (layout, tied) in QUICK else pytest.mark.slow)
        for layout in LAYOUTS
        for tied in (False, True)
    ],
)
def test_opened_served_and_converted(tmp_path: Path, layout: str, tied: bool) -> None:
    directory = tmp_path / "published"
    expected = published(directory, *LAYOUTS[layout], tied)
    checkpoint = open_checkpoint(directory)
    for name, weight in expected.items():
        module = name.removeprefix("model.language_model.")
        assert torch.equal(checkpoint.weight(module).dequantize(), weight), name  # type: ignore[arg-type]
    assert checkpoint.has_mtp and checkpoint.modules["mtp.fc"].dense and checkpoint.config.tied is tied
    plain = answers(directory, "none")
    assert answers(directory, "mtp") == plain
    quantize(checkpoint, {"mtp": PartRecipe(8, group=32)}, tmp_path / "ours")
    ours = open_checkpoint(tmp_path / "ours")
    assert {m.form for m in ours.modules.values() if not m.dense} == {"pack-quantized"} and ours.notes == ()
    assert answers(tmp_path / "ours", "mtp") == plain  # converted without loss, whatever the drafts are
    assert inspect(tmp_path / "ours").missing[0].what == "a 4-bit head"


@pytest.mark.parametrize("file", ["model-00001-of-00002.safetensors", EXTRA])
def test_a_missing_shard_is_named(tmp_path: Path, file: str) -> None:
    directory = tmp_path / "published"
    published(directory, *LAYOUTS["AutoRound, auto_gptq"], tied=False)
    (directory / file).unlink()
    with pytest.raises(CheckpointError, match=file) as caught:
        open_checkpoint(directory)
    assert "soloist fetch" in caught.value.remedy
