"""Each stored format gives exactly the weight that the library defining it gives."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from compressed_tensors.compressors import PackedQuantizationCompressor
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32
from compressed_tensors.quantization import QuantizationScheme
from safetensors.torch import load_file, save_file

from foreign import make_foreign, random_codes
from soloist.checkpoint import formats
from soloist.checkpoint.formats import pack_quantized
from soloist.checkpoint.reader import open_checkpoint
from soloist.checkpoint.shards import read_directory
from soloist.errors import CheckpointError
from soloist.ops.linear import QuantizedWeight
from soloist.prepare.rtn import round_to_nearest
from tiny import build_tiny

VECTORS = Path(__file__).parents[1] / "golden" / "formats.safetensors"
CONFIGS: dict[str, dict[str, object]] = {
    "auto_gptq_sym4": {"quant_method": "auto-round", "packing_format": "auto_round:auto_gptq", "sym": True},
    "auto_gptq_asym4": {"quant_method": "auto-round", "packing_format": "auto_round:auto_gptq", "sym": False},
    "auto_gptq_sym8": {"quant_method": "auto-round", "packing_format": "auto_round:auto_gptq", "sym": True},
    "auto_round_asym4": {"quant_method": "auto-round", "packing_format": "auto_round", "sym": False},
    "auto_awq": {"quant_method": "auto-round", "packing_format": "auto_round:auto_awq", "sym": False},
    "gptq_v1_sym4": {"quant_method": "gptq", "checkpoint_format": "gptq", "sym": True},
    "gptq_v1_asym4": {"quant_method": "gptq", "checkpoint_format": "gptq", "sym": False},
    "gptq_v2_asym4": {"quant_method": "gptq", "checkpoint_format": "gptq_v2", "sym": False},
    "gptq_v2_sym8": {"quant_method": "gptq", "checkpoint_format": "gptq_v2", "sym": True},
}


def _module(directory: Path, tensors: dict[str, torch.Tensor], shape: tuple[int, int], config: object) -> object:
    save_file({f"m.{k}": v.contiguous() for k, v in tensors.items()}, directory / "x.safetensors")
    found = {name.removeprefix("m."): info for name, info in read_directory(directory).items()}
    return formats.load(formats.detect("m", shape, found, False, config))  # type: ignore[arg-type]


@pytest.mark.parametrize("case", CONFIGS)
def test_library_vectors(tmp_path: Path, case: str) -> None:
    vectors = load_file(VECTORS)
    tensors = {k.removeprefix(f"{case}."): v for k, v in vectors.items() if k.startswith(f"{case}.")}
    expected = tensors.pop("expected")
    weight = _module(tmp_path, tensors, (expected.shape[0], expected.shape[1]), CONFIGS[case])
    assert isinstance(weight, QuantizedWeight)
    assert (weight.zeros is None) == ("_sym" in case)
    assert bool((weight.scales < 0).any())
    assert torch.equal(weight.dequantize(torch.float16), expected)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("shape, group", [((48, 128), 32), ((40, 256), 128), ((16, 132), 132), ((24, 96), 96)])
def test_compressed_tensors_both_ways(
    tmp_path: Path, bits: int, symmetric: bool, shape: tuple[int, int], group: int
) -> None:
    generator = torch.Generator().manual_seed(bits * shape[1])
    codes, scales, zeros = random_codes(shape, bits, group, symmetric, generator)
    half = 1 << (bits - 1)
    stored = {
        "weight_packed": pack_to_int32((codes - half).to(torch.int8), bits),
        "weight_scale": scales.float(),
        "weight_shape": torch.tensor(shape),
    }
    if not symmetric:
        stored["weight_zero_point"] = pack_to_int32((zeros - half).to(torch.int8), bits, packed_dim=0)
    channel = group == shape[1]
    scheme = QuantizationScheme.model_validate(
        {
            "targets": ["Linear"],
            "weights": {
                "num_bits": bits,
                "symmetric": symmetric,
                "strategy": "channel" if channel else "group",
                "group_size": None if channel else group,
            },
        }
    )
    theirs = PackedQuantizationCompressor.decompress(stored, scheme)["weight"]
    weight = _module(tmp_path, stored, shape, {})
    assert isinstance(weight, QuantizedWeight) and weight.bits == bits and weight.group == group
    assert torch.equal(weight.dequantize(), theirs)
    written = pack_quantized.stored_tensors(weight)
    assert written.keys() == stored.keys()
    assert all(torch.equal(written[key], stored[key]) for key in stored)


@pytest.mark.parametrize("form", ["pack-quantized", "gptq", "gptq_v2", "auto-round", "awq"])
@pytest.mark.parametrize("symmetric", [True, False])
def test_whole_models(tmp_path: Path, form: str, symmetric: bool) -> None:
    source = build_tiny(tmp_path / "dense", pattern="LF", nested=True, shards=2, dtype=torch.bfloat16)
    expected = make_foreign(source, tmp_path / "q", form, symmetric=symmetric)
    checkpoint, dense = open_checkpoint(tmp_path / "q"), open_checkpoint(source)
    assert len(expected) == 13
    for name, stored in checkpoint.modules.items():
        whole = "model.language_model." + name
        if whole in expected:
            assert not stored.dense
            assert torch.equal(checkpoint.weight(name).dequantize(), expected[whole]), name
            assert checkpoint.weight(name).nbytes == stored.nbytes
        else:
            assert torch.equal(checkpoint.tensor(f"{name}.weight"), dense.tensor(f"{name}.weight")), name
    if form == "pack-quantized":
        assert any("mtp" in note and "config says int4" in note for note in checkpoint.notes)
    fused = checkpoint.fused([f"layers.1.self_attn.{x}_proj" for x in "qkv"])
    assert isinstance(fused, QuantizedWeight)
    rows = [expected[f"model.language_model.layers.1.self_attn.{x}_proj"] for x in "qkv"]
    assert torch.equal(fused.dequantize(), torch.cat(rows))


@pytest.mark.parametrize("form", ["dense", "pack-quantized", "gptq", "awq"])
def test_fused_storage(tmp_path: Path, form: str) -> None:
    source = build_tiny(tmp_path / "dense", pattern="LF", mtp=False)
    directory = source if form == "dense" else tmp_path / "q"
    if form != "dense":
        make_foreign(source, directory, form, symmetric=form != "awq")
    split = open_checkpoint(directory)
    wanted = {name: split.weight(name).dequantize() for name in split.modules}
    path = directory / "model.safetensors"
    tensors = load_file(path)
    for stem, fused, parts in (
        ("model.layers.1.self_attn", "qkv_proj", ("q_proj", "k_proj", "v_proj")),
        ("model.layers.0.mlp", "gate_up_proj", ("gate_proj", "up_proj")),
        ("model.layers.0.linear_attn", "in_proj_qkvz", ("in_proj_qkv", "in_proj_z")),
        ("model.layers.0.linear_attn", "in_proj_ba", ("in_proj_b", "in_proj_a")),
    ):
        suffixes = [name.rpartition(".")[2] for name in tensors if name.startswith(f"{stem}.{parts[0]}.")]
        for suffix in suffixes:
            pieces = [tensors.pop(f"{stem}.{part}.{suffix}") for part in parts]
            along = 1 if suffix in ("qweight", "qzeros", "scales") else 0
            whole = pieces[0] if suffix in ("g_idx", "weight_shape") else torch.cat(pieces, along)
            tensors[f"{stem}.{fused}.{suffix}"] = whole
    save_file({k: v.contiguous() for k, v in tensors.items()}, path, {"format": "pt"})
    fused_checkpoint = open_checkpoint(directory)
    assert sum(stored.fused for stored in fused_checkpoint.modules.values()) == 9
    for name, weight in wanted.items():
        assert torch.equal(fused_checkpoint.weight(name).dequantize(), weight), name
        assert fused_checkpoint.weight(name).nbytes == fused_checkpoint.modules[name].nbytes


def _damage(directory: Path, name: str, **tensors: torch.Tensor | None) -> None:
    path = directory / "model.safetensors"
    held = load_file(path)
    for suffix, value in tensors.items():
        held.pop(f"{name}.{suffix}", None)
        if value is not None:
            held[f"{name}.{suffix}"] = value
    save_file(held, path, {"format": "pt"})


@pytest.mark.parametrize(
    "form, damage, message",
    [
        ("pack-quantized", {"weight_scale": None}, "weight_scale is missing"),
        ("pack-quantized", {"weight_packed": torch.zeros(512, 7, dtype=torch.int32)}, "not int4 or int8"),
        ("pack-quantized", {"weight_scale": torch.ones(512, 3)}, "does not divide"),
        ("pack-quantized", {"weight_shape": torch.tensor([1, 2])}, "disagrees with the config"),
        ("pack-quantized", {"weight_g_idx": torch.arange(128).flip(0) // 32}, "activation order"),
        ("pack-quantized", {"weight_zero_point": torch.zeros(3, 3, dtype=torch.int32)}, "not packed along"),
        ("gptq", {"scales": None}, "scales is missing"),
        ("gptq", {"qzeros": None}, "qzeros is missing"),
        ("gptq", {"qweight": torch.zeros(12, 512, dtype=torch.int32)}, "not int4 or int8"),  # 3 bits
        ("gptq", {"scales": torch.ones(3, 512)}, "does not divide"),
        ("gptq", {"g_idx": torch.arange(128, dtype=torch.int32).flip(0) // 32}, "activation order"),
        ("awq", {"qzeros": torch.zeros(3, 3, dtype=torch.int32)}, "not 4-bit AWQ"),
    ],
)
def test_corrupt_modules_are_named(
    tmp_path: Path, form: str, damage: dict[str, torch.Tensor | None], message: str
) -> None:
    source = build_tiny(tmp_path / "dense", pattern="LF", mtp=False)
    make_foreign(source, tmp_path / "q", form, symmetric=form != "awq")
    name = "model.layers.1.self_attn.q_proj"
    _damage(tmp_path / "q", name, **damage)
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(tmp_path / "q")
    assert message in caught.value.message and "layers.1.self_attn.q_proj" in caught.value.message
    assert caught.value.remedy


@pytest.mark.parametrize(
    "quantization, message",
    [
        ({"quant_method": "fp8"}, "'fp8'"),
        ({"quant_method": "bitsandbytes"}, "'bitsandbytes'"),
        ({"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparsity_config"),
        ({"transform_config": {"config_groups": {"R1": {}}}}, "transform_config"),
        ({"activations": True}, "quantises activations"),
        ({"format": "nvfp4-pack-quantized"}, "nvfp4-pack-quantized"),
        ({"strategy": "block"}, "'block'"),
    ],
)
def test_unsupported_schemes_are_refused_by_name(tmp_path: Path, quantization: dict[str, object], message: str) -> None:
    source = build_tiny(tmp_path / "dense", pattern="LF", mtp=False)
    make_foreign(source, tmp_path / "q", "pack-quantized")
    path = tmp_path / "q" / "config.json"
    config = json.loads(path.read_text())
    table = config["quantization_config"]
    group = table["config_groups"]["group_0"]
    if quantization.pop("activations", False):
        group["input_activations"] = {"num_bits": 8}
    if "strategy" in quantization:
        group["weights"]["strategy"] = quantization.pop("strategy")
    table.update(quantization)
    path.write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(tmp_path / "q")


def test_symmetric_gptq_with_odd_zeros_is_refused(tmp_path: Path) -> None:
    source = build_tiny(tmp_path / "dense", pattern="LF", mtp=False)
    make_foreign(source, tmp_path / "q", "gptq")
    name = "model.layers.1.self_attn.q_proj"
    zeros = load_file(tmp_path / "q" / "model.safetensors")[f"{name}.qzeros"]
    zeros[-1, -1] += 1
    _damage(tmp_path / "q", name, qzeros=zeros)
    with pytest.raises(CheckpointError, match="qzeros differ"):
        open_checkpoint(tmp_path / "q").weight("layers.1.self_attn.q_proj")


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("form", ["dense", "pack-quantized", "gptq"])
def test_values_that_are_not_finite_are_refused(tmp_path: Path, form: str, value: float) -> None:
    directory = build_tiny(tmp_path / "dense", pattern="LF", mtp=False)
    if form != "dense":
        make_foreign(directory, tmp_path / "q", form)
        directory = tmp_path / "q"
    suffix = {"dense": "weight", "pack-quantized": "weight_scale", "gptq": "scales"}[form]
    name = "model.layers.1.self_attn.q_proj"
    tensor = load_file(directory / "model.safetensors")[f"{name}.{suffix}"]
    tensor[1, 2] = value
    _damage(directory, name, **{suffix: tensor})
    checkpoint = open_checkpoint(directory)
    with pytest.raises(CheckpointError, match=f"q_proj.{suffix} holds NaN or infinite"):
        checkpoint.weight("layers.1.self_attn.q_proj")
    with pytest.raises(CheckpointError, match="holds NaN or infinite"):
        checkpoint.fused([f"layers.1.self_attn.{x}_proj" for x in "qkv"])
    _damage(directory, "model.norm", weight=torch.full((128,), value))
    with pytest.raises(CheckpointError, match=r"norm\.weight holds NaN or infinite"):
        open_checkpoint(directory).tensor("norm.weight")


@pytest.mark.parametrize("bits, bound", [(4, 0.12), (8, 0.008)])
def test_round_to_nearest(bits: int, bound: float) -> None:
    weight = torch.randn(64, 256, generator=torch.Generator().manual_seed(3))
    weight[5, :128] = 0
    quantised = round_to_nearest(weight, bits, 128)
    back = quantised.dequantize()
    assert float((back - weight).norm() / weight.norm()) < bound
    step = quantised.scales.float().repeat_interleave(128, 1)
    inside = (weight / step).abs() <= (1 << (bits - 1)) - 1
    assert bool(((back - weight).abs() <= step * 0.5 + 1e-7)[inside].all())
    assert not bool(back[5, :128].any())
