"""A random model directory of a named shape: what `soloist serve` is pointed at where no checkpoint is at hand.

An ordinary directory in the prepared format (4-bit body, head, embedding, MTP module, draft head and DFlash2 drafter;
16-bit gates), so that planner, reader and loader are the real ones. Codes repeat a block of random bytes; only scales
and norms are drawn for their place. Nothing it says means anything.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from soloist import demo
from soloist.bench.synthetic import DRAFT_ROWS, GROUP, SHAPES, dflash2_27b
from soloist.checkpoint.config import DrafterConfig, ModelConfig, read_drafter_config, read_model_config
from soloist.checkpoint.layout import Layout, drafter_layout, merged, mtp_layout, target_layout
from soloist.checkpoint.writer import OutTensor, header_bytes, index_text, tensor_bytes, write_text_atomic

DENSE = ("in_proj_b", "in_proj_a", "kernel_projection", "hidden_projection")
NOISE = 1 << 24  # bytes of codes before they repeat
FILE_BYTES = 2 << 30


def target_json(c: ModelConfig) -> dict[str, Any]:
    """config.json of a target."""
    return {
        "architectures": ["Qwen3_5ForCausalLM"],
        "model_type": "qwen3_5_text",
        "vocab_size": c.vocab_size,
        "hidden_size": c.hidden_size,
        "intermediate_size": c.intermediate_size,
        "num_hidden_layers": c.num_layers,
        "num_attention_heads": c.num_heads,
        "num_key_value_heads": c.num_kv_heads,
        "head_dim": c.head_dim,
        "linear_num_key_heads": c.linear_key_heads,
        "linear_num_value_heads": c.linear_value_heads,
        "linear_key_head_dim": c.linear_key_dim,
        "linear_value_head_dim": c.linear_value_dim,
        "linear_conv_kernel_dim": c.conv_kernel,
        "layer_types": list(c.layer_types),
        "rms_norm_eps": c.eps,
        "hidden_act": "silu",
        "attn_output_gate": True,
        "tie_word_embeddings": c.tied,
        "max_position_embeddings": c.max_position,
        "mtp_num_hidden_layers": c.mtp_layers,
        "eos_token_id": list(c.eos_ids),
        "dtype": c.dtype,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": c.rope_theta,
            "partial_rotary_factor": c.rope_dim / c.head_dim,
        },
    }


def drafter_json(d: DrafterConfig, target_layers: int) -> dict[str, Any]:
    """config.json of a DFlash2 drafter."""
    return {
        "architectures": ["DFlash2DraftModel"],
        "model_type": "qwen3",
        "dtype": "bfloat16",
        "hidden_act": "silu",
        "rms_norm_eps": d.eps,
        "hidden_size": d.hidden_size,
        "intermediate_size": d.intermediate_size,
        "num_hidden_layers": d.num_layers,
        "num_attention_heads": d.num_heads,
        "num_key_value_heads": d.num_kv_heads,
        "head_dim": d.head_dim,
        "vocab_size": d.vocab_size,
        "block_size": d.block_size,
        "layer_types": ["sliding_attention"] * d.num_layers,
        "use_sliding_window": True,
        "sliding_window": d.window,
        "rope_parameters": {"rope_type": "default", "rope_theta": d.rope_theta},
        "rope_theta": d.rope_theta,
        "num_target_layers": target_layers,
        "target_hidden_size": d.hidden_size,
        "dflash_config": {
            "target_layer_ids": list(d.tap_layers),
            "mask_token_id": d.mask_token_id,
            "conv_kernel_size": d.conv_taps,
            "conv_group_size": d.conv_group,
            "selector_rank": d.selector_rank,
            "selector_top_k": d.selector_top_k,
            "causal": d.causal,
            "use_aux_hidden_state": True,
            "sample_from_anchor": False,
        },
    }


def _plain(name: str, shape: tuple[int, ...], centred: bool) -> torch.Tensor:
    """A tensor stored as it is: norms around 1 (`centred`: as their distance from it), the rest small."""
    noise = torch.randn(shape) * 0.1
    if name.endswith("base_kernel"):
        noise[:, 0] += 1.0
    elif name.endswith("norm.weight") and not (centred and "linear_attn" not in name):
        noise += 1.0
    return noise.to(torch.bfloat16)


def _stored(layout: Layout, centred: bool, hollow: bool) -> Iterator[tuple[OutTensor, torch.Tensor | None]]:
    """Every tensor in order; None where any bytes will do: `hollow`, for all but shapes."""
    for module, (n, k) in layout.linears.items():
        if hollow and not k % GROUP and module.rsplit(".", 1)[-1] not in DENSE:
            yield OutTensor(f"{module}.weight_packed", torch.int32, (n, k // 8)), None
            yield OutTensor(f"{module}.weight_scale", torch.float16, (n, k // GROUP)), None
            yield OutTensor(f"{module}.weight_shape", torch.int64, (2,)), torch.tensor([n, k])
            continue
        if hollow:
            yield OutTensor(f"{module}.weight", torch.bfloat16, (n, k)), None
            continue
        if module.rsplit(".", 1)[-1] in DENSE or k % GROUP:
            yield OutTensor(f"{module}.weight", torch.bfloat16, (n, k)), (torch.randn(n, k) * k**-0.5).bfloat16()
            continue
        yield OutTensor(f"{module}.weight_packed", torch.int32, (n, k // 8)), None
        # Uniform codes have a standard deviation of 4.6 steps.
        scales = (torch.randn(n, k // GROUP) * (k**-0.5 / 4.6)).to(torch.float16)
        yield OutTensor(f"{module}.weight_scale", torch.float16, (n, k // GROUP)), scales
        yield OutTensor(f"{module}.weight_shape", torch.int64, (2,)), torch.tensor([n, k])
    for name, shape in layout.tensors.items():
        if hollow:
            yield OutTensor(name, torch.bfloat16, shape), None
            continue
        values = torch.randn(shape).bfloat16() if name.endswith("codebook") else _plain(name, shape, centred)
        yield OutTensor(name, torch.bfloat16, shape), values


def _write(out: Path, layout: Layout, centred: bool, prefix: str = "", hollow: bool = False) -> None:
    noise = torch.randint(0, 256, (NOISE,), dtype=torch.uint8).numpy().data
    listed: dict[str, tuple[str, int]] = {}
    batch: list[tuple[OutTensor, torch.Tensor | None]] = []
    files = 0

    def flush() -> None:
        nonlocal files
        if not batch:
            return
        name = f"model-{files:05d}.safetensors"
        files += 1
        with (out / name).open("wb") as handle:
            handle.write(header_bytes([tensor for tensor, _ in batch]))
            for tensor, values in batch:
                listed[tensor.name] = (name, tensor.nbytes)
                if values is not None:
                    handle.write(tensor_bytes(values))
                    continue
                if hollow:
                    handle.seek(tensor.nbytes, os.SEEK_CUR)
                    continue
                for at in range(0, tensor.nbytes, NOISE):
                    handle.write(noise[: min(NOISE, tensor.nbytes - at)])
            handle.truncate(handle.tell())
        batch.clear()

    for tensor, values in _stored(layout, centred, hollow):
        stored = tensor.name if tensor.name.startswith(("lm_head", "mtp.")) else prefix + tensor.name
        batch.append((OutTensor(stored, tensor.dtype, tensor.shape), values))
        if sum(t.nbytes for t, _ in batch) > FILE_BYTES:
            flush()
    flush()
    write_text_atomic(out / "model.safetensors.index.json", index_text(listed))


def _config(out: Path, text: Mapping[str, Any]) -> None:
    weights = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": GROUP}
    group = {"targets": ["Linear", "Embedding"], "weights": weights, "input_activations": None}
    quantization = {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {"group_0": group},
        "ignore": [f"re:.*{name}$" for name in DENSE],
    }
    out.mkdir(parents=True)
    write_text_atomic(out / "config.json", json.dumps({**text, "quantization_config": quantization}, indent=1))


def write_synthetic(out: Path, config: ModelConfig, drafter: DrafterConfig | None = None, hollow: bool = False) -> None:
    """Write a target with its MTP module, a draft head and a DFlash2 drafter (default: the 27B's).

    `hollow`: files of the right size with headers and holes, for what reads headers only. A 27B takes a megabyte.
    """
    torch.manual_seed(0)
    _config(out, target_json(config))
    layout = merged((target_layout(read_model_config(out)), mtp_layout(config)))
    rows = min(DRAFT_ROWS, config.vocab_size // 2)
    layout.linears["mtp.draft_lm_head"] = (rows, config.hidden_size)
    _write(out, layout, True, "model.", hollow)
    write_text_atomic(out / "draft_vocab_ids.json", json.dumps(list(range(rows))))
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(demo.path() / name, out / name)
    inside = out / "dflash2"
    _config(inside, drafter_json(drafter or dflash2_27b(config), config.num_layers))
    found: DrafterConfig = read_drafter_config(inside)
    _write(inside, drafter_layout(found), False, hollow=hollow)


def synthetic_directory(out: Path, shape: str, layers: int) -> Path:
    """The directory `out` of a shape in `SHAPES`, written unless it is there."""
    if not (out / "dflash2" / "model.safetensors.index.json").exists():
        write_synthetic(out, SHAPES[shape](layers))
    return out
