"""The bundled demo with a 4-bit body and MTP module; its head stays in 16 bits."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import save_file

from soloist import demo
from soloist.checkpoint.reader import open_checkpoint
from soloist.prepare.quantize import quantize
from soloist.prepare.recipe import PartRecipe
from tiny import stored_name


def dense_demo(out: Path) -> Path:
    """The bundled weights dequantised to bf16, as an ordinary directory."""
    checkpoint = open_checkpoint(demo.path())
    names = [f"{module}.weight" for module in checkpoint.modules] + list(checkpoint.layout.tensors)
    tensors = {stored_name(n, nested=False): checkpoint.tensor(n).to(torch.bfloat16).contiguous() for n in names}
    out.mkdir(parents=True)
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((demo.path() / "config.json").read_text())
    config.pop("quantization_config", None)
    (out / "config.json").write_text(json.dumps(config))
    for name in ("generation_config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(demo.path() / name, out / name)
    return out


def demo_in_w4(out: Path) -> Path:
    """Round-to-nearest int4 of body and MTP module; the drafter comes along."""
    dense = dense_demo(out.with_name("dense"))
    quantize(open_checkpoint(dense), {"body": PartRecipe(4), "mtp": PartRecipe(4)}, out)
    shutil.copytree(demo.drafter_path(), out / "dflash2")
    return out
