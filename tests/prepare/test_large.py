"""A 27B-shaped checkpoint of sparse files: looked at in seconds, its head quantised in little memory."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from soloist.checkpoint.config import read_model_config
from soloist.checkpoint.layout import merged, mtp_layout, target_layout
from soloist.checkpoint.reader import open_checkpoint
from soloist.checkpoint.shards import INDEX_NAME
from soloist.checkpoint.writer import OutTensor, header_bytes, tensor_bytes
from soloist.prepare.inspect import inspect
from tiny import Tiny, byte_tokenizer, foreign_quantization

SHAPE = Tiny(
    pattern="LLLF" * 16,
    hidden=5120,
    ffn=17408,
    heads=24,
    kv_heads=4,
    head_dim=256,
    key_heads=16,
    value_heads=48,
    key_dim=128,
    value_dim=128,
    vocab=248320,
    nested=True,
    dtype=torch.bfloat16,
)
SHARD = 5 << 30


def _tensors(directory: Path) -> list[OutTensor]:
    config = read_model_config(directory)
    layout = merged((target_layout(config), mtp_layout(config)))
    out = []
    for name, (n, k) in layout.linears.items():
        stem = name if name.startswith(("lm_head", "mtp.")) else f"model.language_model.{name}"
        if name.startswith("layers.") and not name.endswith(("in_proj_a", "in_proj_b")):
            out.append(OutTensor(f"{stem}.weight_packed", torch.int32, (n, k // 8)))
            out.append(OutTensor(f"{stem}.weight_scale", torch.float16, (n, k // 128)))
        else:
            out.append(OutTensor(f"{stem}.weight", torch.bfloat16, (n, k)))
    for name, shape in layout.tensors.items():
        stem = name if name.startswith("mtp.") else f"model.language_model.{name}"
        out.append(OutTensor(stem, torch.bfloat16, shape))
    return out


def build_large(directory: Path) -> Path:
    """Sharded, int4 body, bf16 head, embedding and MTP module; holes where the weights would be."""
    directory.mkdir()
    config = SHAPE.config() | {"quantization_config": foreign_quantization(128)}
    (directory / "config.json").write_text(json.dumps(config))
    byte_tokenizer(SHAPE.vocab).save(str(directory / "tokenizer.json"))
    (directory / "chat_template.jinja").write_text("{{ messages }}")
    shards: list[list[OutTensor]] = [[]]
    for tensor in _tensors(directory):
        alone = tensor.name.startswith("lm_head")
        if alone or sum(t.nbytes for t in shards[-1]) + tensor.nbytes > SHARD:
            shards.append([])
        shards[-1].append(tensor)
        if alone:
            shards.append([])
    index = {}
    for i, shard in enumerate(shards):
        file = f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors"
        header = header_bytes(shard)
        with (directory / file).open("wb") as handle:
            handle.write(header)
            handle.truncate(len(header) + sum(t.nbytes for t in shard))
        index |= {tensor.name: file for tensor in shard}
    (directory / INDEX_NAME).write_text(json.dumps({"metadata": {}, "weight_map": index}))
    return directory


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_large(tmp_path_factory.mktemp("large") / "m")


def test_inspected_without_reading_weights(large: Path) -> None:
    blocks = {path.name: path.stat().st_blocks for path in large.iterdir()}
    start = time.process_time()
    found = inspect(large)
    taken = time.process_time() - start
    assert taken < 5, taken
    assert found.parameters == 26_895_998_464 + 424_699_392
    body = sum(row.nbytes for row in found.parts if row.bits == 4)
    assert body == 24_326_963_200 // 2 + 24_326_963_200 // 128 * 2
    assert [missing.what for missing in found.missing][:2] == ["a 4-bit head", "an 8-bit embedding"]
    assert {path.name: path.stat().st_blocks for path in large.iterdir()} == blocks


def test_opening_maps_nothing_into_memory(large: Path) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    checkpoint = open_checkpoint(large)
    checkpoint.fingerprint()
    checkpoint.nbytes()
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200 << 10  # KiB


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_the_head_is_quantised_in_little_memory(large: Path, tmp_path: Path) -> None:
    shard = open_checkpoint(large).tensors["lm_head.weight"]
    generator = torch.Generator().manual_seed(0)
    with shard.shard.path.open("r+b") as handle:
        handle.seek(shard.start)
        for _ in range(0, shard.shape[0], 8192):
            rows = torch.randn(8192, shard.shape[1], generator=generator).mul_(0.02).to(torch.bfloat16)
            handle.write(tensor_bytes(rows)[: shard.end - handle.tell()])
    out = tmp_path / "out"
    command = [sys.executable, "-m", "soloist", "quantize", str(large), "--part", "lm_head=int4", "--out", str(out)]
    watched = f"import resource, subprocess, sys; subprocess.run({command!r}, check=True); "
    watched += "print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)"
    done = subprocess.run([sys.executable, "-c", watched], check=True, capture_output=True, text=True)
    peak = int(done.stdout.split()[-1]) / 2**20  # KiB -> GiB
    print(f"peak {peak:.2f} GiB")
    assert peak < 8
    before, after = open_checkpoint(large), open_checkpoint(out)
    assert after.modules["lm_head"].bits == 4
    ids = torch.tensor([0, 16383, 16384, 248319])
    want = before.weight("lm_head", copy=False).rows(ids)
    got = after.weight("lm_head", copy=False).rows(ids)
    assert float((got - want).norm() / want.norm()) < 0.13
