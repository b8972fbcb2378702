"""Opening model directories: every fault is one CheckpointError that names the file, before weights are read."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from soloist import demo
from soloist.checkpoint.reader import fuse, open_checkpoint
from soloist.errors import CheckpointError
from soloist.ops.linear import DenseWeight, QuantizedWeight
from tiny import build_tiny, build_tiny_drafter

INDEX = "model.safetensors.index.json"


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny(tmp_path_factory.mktemp("plain") / "dflash-named", pattern="LF", shards=3)


@pytest.fixture
def broken(plain: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(plain, tmp_path / "model"))


def _shard(directory: Path, number: int) -> Path:
    return directory / f"model-{number:05d}-of-00003.safetensors"


def _rewrite(path: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, {"format": "pt"})


def _owner(directory: Path, name: str) -> Path:
    return directory / json.loads((directory / INDEX).read_text())["weight_map"][name]


@pytest.mark.parametrize(
    "nested, tied, dtype", [(False, False, torch.float32), (True, True, torch.bfloat16), (True, False, torch.float16)]
)
def test_tensors_come_back_under_canonical_names(tmp_path: Path, nested: bool, tied: bool, dtype: torch.dtype) -> None:
    directory = build_tiny(tmp_path / "m", pattern="LF", nested=nested, tied=tied, dtype=dtype, shards=2)
    checkpoint = open_checkpoint(directory)
    stored: dict[str, torch.Tensor] = {}
    for path in directory.glob("*.safetensors"):
        stored |= load_file(path)
    prefix = "model.language_model." if nested else "model."
    for name in (*(f"{m}.weight" for m in checkpoint.modules), *checkpoint.layout.tensors):
        original = stored[name if name.startswith(("lm_head", "mtp.")) else prefix + name]
        assert torch.equal(checkpoint.tensor(name), original), name
    assert checkpoint.has_mtp and checkpoint.has_template and checkpoint.config.tied is tied
    assert checkpoint.has("lm_head") is not tied
    head = checkpoint.weight("lm_head").dequantize()
    assert torch.equal(head, checkpoint.tensor("embed_tokens.weight" if tied else "lm_head.weight").float())


def test_other_prefix_and_vision_tensors(plain: Path, tmp_path: Path) -> None:
    directory = Path(shutil.copytree(plain, tmp_path / "m"))
    (directory / INDEX).unlink()
    for number in (1, 2, 3):

        def rename(tensors: dict[str, torch.Tensor], number: int = number) -> None:
            for name in list(tensors):
                if name.startswith(("model.", "lm_head")):
                    tensors["language_model." + name] = tensors.pop(name)
            tensors[f"model.visual.blocks.{number}.weight"] = torch.zeros(3)

        _rewrite(_shard(directory, number), rename)
    renamed, original = open_checkpoint(directory), open_checkpoint(plain)
    for name in (*(f"{m}.weight" for m in original.modules), *original.layout.tensors):
        assert torch.equal(renamed.tensor(name), original.tensor(name))


def test_a_tensor_is_a_private_copy(broken: Path) -> None:
    checkpoint = open_checkpoint(broken)
    before = _owner(broken, "model.norm.weight").read_bytes()
    checkpoint.tensor("norm.weight").fill_(7)
    assert not bool((checkpoint.tensor("norm.weight") == 7).any())
    assert _owner(broken, "model.norm.weight").read_bytes() == before


def _remove(name: str) -> Callable[[Path], None]:
    return lambda directory: (directory / name).unlink()


def _truncate(directory: Path) -> None:
    path = _shard(directory, 2)
    path.write_bytes(path.read_bytes()[:-100])


def _cut_header(directory: Path) -> None:
    _shard(directory, 2).write_bytes(b"\x10\x00\x00")


def _wrong_shape(directory: Path) -> None:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors["model.layers.1.self_attn.q_proj.weight"] = torch.zeros(3, 3)

    _rewrite(_owner(directory, "model.layers.1.self_attn.q_proj.weight"), change)


def _wrong_norm(directory: Path) -> None:
    _rewrite(_owner(directory, "model.norm.weight"), lambda t: t.update({"model.norm.weight": torch.zeros(5)}))


def _missing_tensor(directory: Path) -> None:
    name = "model.layers.0.mlp.up_proj.weight"
    _rewrite(_owner(directory, name), lambda t: t.__delitem__(name))


def _unlisted_tensor(directory: Path) -> None:
    index = json.loads((directory / INDEX).read_text())
    del index["weight_map"]["model.layers.0.mlp.up_proj.weight"]
    (directory / INDEX).write_text(json.dumps(index))


def _duplicate(directory: Path) -> None:
    owner = _owner(directory, "model.norm.weight")
    other = next(_shard(directory, n) for n in (1, 2, 3) if _shard(directory, n) != owner)
    _rewrite(other, lambda t: t.update({"model.norm.weight": torch.zeros(128)}))


def _two_prefixes(directory: Path) -> None:
    name = "model.language_model.norm.weight"
    _rewrite(_shard(directory, 1), lambda t: t.update({name: torch.zeros(128)}))
    index = json.loads((directory / INDEX).read_text())
    index["weight_map"][name] = _shard(directory, 1).name
    (directory / INDEX).write_text(json.dumps(index))


def _config(**changes: object) -> Callable[[Path], None]:
    def change(directory: Path) -> None:
        config = json.loads((directory / "config.json").read_text())
        (directory / "config.json").write_text(json.dumps(config | changes))

    return change


def _half_mtp(directory: Path) -> None:
    name = "mtp.fc.weight"
    _rewrite(_owner(directory, name), lambda t: t.__delitem__(name))
    index = json.loads((directory / INDEX).read_text())
    del index["weight_map"][name]
    (directory / INDEX).write_text(json.dumps(index))


def _float8(directory: Path) -> None:
    name = "model.layers.0.mlp.up_proj.weight"
    _rewrite(_owner(directory, name), lambda t: t.update({name: t[name].to(torch.float8_e4m3fn)}))


def _empty_vocabulary(directory: Path) -> None:
    path = directory / "tokenizer.json"
    table = json.loads(path.read_text())
    table["model"]["vocab"] = {}
    path.write_text(json.dumps(table))


FAULTS: dict[str, tuple[Callable[[Path], None], str]] = {
    "no config": (_remove("config.json"), "config.json"),
    "no tokenizer": (_remove("tokenizer.json"), "tokenizer.json"),
    "empty tokenizer": (_empty_vocabulary, "empty vocabulary"),
    "no template": (_remove("chat_template.jinja"), "chat_template.jinja"),
    "no shard": (lambda d: _shard(d, 2).unlink(), "model-00002-of-00003.safetensors"),
    "truncated shard": (_truncate, "100 bytes are missing"),
    "cut header": (_cut_header, "truncated"),
    "wrong shape": (_wrong_shape, "layers.1.self_attn.q_proj.weight is [3, 3]"),
    "wrong norm": (_wrong_norm, "norm.weight is [5]"),
    "missing in shard": (_missing_tensor, "which the index places there"),
    "missing in index": (_unlisted_tensor, "layers.0.mlp.up_proj.weight is missing"),
    "duplicate": (_duplicate, "model.norm.weight is in"),
    "two prefixes": (_two_prefixes, "two prefixes"),
    "architecture": (_config(model_type="llama"), "model_type 'llama'"),
    "experts": (_config(num_experts=8), "mixture-of-experts"),
    "rope": (_config(rope_parameters={"rope_type": "yarn"}), "yarn"),
    "half an MTP module": (_half_mtp, "mtp.fc.weight is missing"),
    "float8": (_float8, "float8"),
    "damaged index": (lambda d: (d / INDEX).write_text("{"), INDEX),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_named(broken: Path, fault: str) -> None:
    damage, expected = FAULTS[fault]
    damage(broken)
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(broken)
    assert expected in caught.value.message
    assert caught.value.remedy
    assert "\n" not in str(caught.value)


def test_absent_mtp_is_a_stated_downgrade(broken: Path) -> None:
    index = json.loads((broken / INDEX).read_text())
    index["weight_map"] = {name: file for name, file in index["weight_map"].items() if not name.startswith("mtp.")}
    (broken / INDEX).write_text(json.dumps(index))
    checkpoint = open_checkpoint(broken)
    assert not checkpoint.has_mtp
    assert any("MTP" in note for note in checkpoint.notes)


def test_extra_tensors_of_a_shard_are_ignored(broken: Path) -> None:
    _rewrite(_shard(broken, 1), lambda t: t.update({"model.layers.9.something": torch.zeros(2)}))
    assert not open_checkpoint(broken).has("layers.9.something")


def test_drafter(plain: Path, tmp_path: Path) -> None:
    directory = build_tiny_drafter(tmp_path / "d", plain, taps=(0, 1))
    checkpoint = open_checkpoint(directory, "drafter")
    assert checkpoint.drafter_config.tap_layers == (0, 1)
    assert len(checkpoint.tensors) == 2 * 15 + 6
    with pytest.raises(CheckpointError, match="not a DFlash2 drafter"):
        open_checkpoint(plain, "drafter")
    with pytest.raises(CheckpointError, match="not supported"):
        open_checkpoint(directory)


def test_fused_equals_stacked(plain: Path) -> None:
    checkpoint = open_checkpoint(plain)
    names = [f"layers.0.linear_attn.in_proj_{x}" for x in ("qkv", "z", "b", "a")]
    fused = checkpoint.fused(names)
    assert isinstance(fused, DenseWeight)
    assert torch.equal(fused.weight, torch.cat([checkpoint.tensor(f"{name}.weight") for name in names]))


def test_fused_packed_and_mixed_forms() -> None:
    checkpoint = open_checkpoint(demo.path())
    names = [f"layers.3.self_attn.{x}_proj" for x in "qkv"]
    fused = checkpoint.fused(names)
    assert isinstance(fused, QuantizedWeight)
    expected = torch.cat([checkpoint.weight(name).dequantize() for name in names])
    assert torch.equal(fused.dequantize(), expected)
    ids = torch.tensor([3, 700, 5])
    assert torch.equal(fused.rows(ids), expected[ids])
    mixed = checkpoint.fused(["layers.0.linear_attn.in_proj_qkv", "layers.0.linear_attn.in_proj_b"])
    assert isinstance(mixed, tuple) and [type(w) for w in mixed] == [QuantizedWeight, DenseWeight]
    assert fuse([fused]) is not None


def test_fingerprint_follows_the_weights(plain: Path, broken: Path) -> None:
    print_before = open_checkpoint(plain).fingerprint()
    assert open_checkpoint(broken).fingerprint() == print_before
    _rewrite(_owner(broken, "model.norm.weight"), lambda t: t["model.norm.weight"].add_(1))
    changed = open_checkpoint(broken).fingerprint()
    assert changed != print_before


def test_summary_counts_every_parameter_and_byte() -> None:
    checkpoint = open_checkpoint(demo.path())
    assert sum(row.parameters for row in checkpoint.summary()) == 29_474_732
    read = sum(checkpoint.weight(name).nbytes for name in checkpoint.modules)
    read += sum(checkpoint.tensor(name).nbytes for name in checkpoint.layout.tensors)
    assert sum(checkpoint.nbytes().values()) == read
