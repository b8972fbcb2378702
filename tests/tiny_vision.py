"""A random tiny checkpoint with a vision tower: the text model of `tiny.py`, transformers' tower, a template that shows
pictures, a preprocessor config. And pictures to show it."""

from __future__ import annotations

import base64
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken, Tokenizer
from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5VisionConfig
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5VisionModel

from tiny import build_tiny

VISION = {
    "model_type": "qwen3_5",
    "depth": 2,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_heads": 2,
    "in_channels": 3,
    "patch_size": 8,
    "temporal_patch_size": 2,
    "spatial_merge_size": 2,
    "num_position_embeddings": 36,
    "hidden_act": "gelu_pytorch_tanh",
}
MARKS = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
SHOWN = "<|vision_start|><|image_pad|><|vision_end|>"
PROCESSOR = {
    "image_processor_type": "Qwen2VLImageProcessor",
    "patch_size": 8,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "image_mean": [0.5, 0.4, 0.3],
    "image_std": [0.5, 0.25, 0.2],
    "size": {"shortest_edge": 16 * 16 * 4, "longest_edge": 16 * 16 * 64},
}


def build_tiny_vision(directory: Path, seed: int = 0, **changes: Any) -> Path:
    """Write a model directory whose tower is as random as the rest; its rows are as large as token embeddings."""
    build_tiny(directory, nested=True, seed=seed, **changes)
    config = json.loads((directory / "config.json").read_text())
    text = config["text_config"]
    text["rope_parameters"] |= {"mrope_section": [4, 2, 2], "mrope_interleaved": True}
    tower = VISION | {"out_hidden_size": text["hidden_size"]}
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    tokenizer.add_special_tokens([AddedToken(mark, special=True, normalized=False) for mark in MARKS])
    tokenizer.save(str(directory / "tokenizer.json"))
    start, end, image, video = (tokenizer.token_to_id(mark) for mark in MARKS)
    config |= {
        "vision_config": tower,
        "vision_start_token_id": start,
        "vision_end_token_id": end,
        "image_token_id": image,
        "video_token_id": video,
    }
    (directory / "config.json").write_text(json.dumps(config, indent=1))
    (directory / "preprocessor_config.json").write_text(json.dumps(PROCESSOR))
    template = directory / "chat_template.jinja"
    plain = "(p.text if p.text is defined else '')"
    source = template.read_text()
    assert plain in source
    template.write_text(source.replace(plain, f"('{SHOWN}' if p.type == 'image' else p.text)"))
    tensors = load_file(directory / "model.safetensors")
    tensors |= {f"model.visual.{name}": tensor for name, tensor in _tower(tower, seed).items()}
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    return directory


def _tower(config: dict[str, Any], seed: int) -> dict[str, torch.Tensor]:
    shapes = Qwen3_5VisionModel(Qwen3_5VisionConfig(**{k: v for k, v in config.items() if k != "model_type"}))
    generator = torch.Generator().manual_seed(seed + 1000)
    tensors = {}
    for name, tensor in shapes.state_dict().items():
        noise = torch.randn(tensor.shape, generator=generator)
        if "norm" in name and name.endswith("weight"):
            tensors[name] = 1 + 0.3 * noise
        elif tensor.dim() == 1:
            tensors[name] = 0.3 * noise
        else:
            fan_in = tensor[0].numel()
            tensors[name] = noise * (2.0 if name.startswith("merger.linear_fc2") else 1.0) * fan_in**-0.5
    tensors["pos_embed.weight"] *= config["hidden_size"] ** 0.5
    return tensors


def picture(seed: int, width: int = 64, height: int = 48) -> Image.Image:
    """Smooth random colours, so that scaling is no matter of single pixels."""
    noise = np.random.default_rng(seed).integers(0, 256, (6, 8, 3), dtype=np.uint8)
    return Image.fromarray(noise).resize((width, height), Image.Resampling.BICUBIC)


def png(image: Image.Image) -> str:
    """Base64 of the picture as PNG."""
    file = io.BytesIO()
    image.save(file, format="PNG")
    return base64.b64encode(file.getvalue()).decode()


def data_url(image: Image.Image) -> str:
    return f"data:image/png;base64,{png(image)}"
