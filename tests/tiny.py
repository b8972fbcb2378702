"""Random tiny checkpoints of the Qwen3.5 family, written as ordinary Hugging Face directories.

Every parameter is random, also those whose defaults of 0 or 1 hide convention errors (norms, A_log, dt_bias), and
the final norm is scaled so that logits have a standard deviation of 3. Decay rates are slow enough for the
recurrent state to matter: dropping it moves log-probabilities (tests/checkpoint/test_tiny.py measures by how much).
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from soloist import demo
from soloist.checkpoint.config import ModelConfig, read_model_config
from soloist.checkpoint.layout import Layout, drafter_layout, merged, mtp_layout, target_layout

SPECIALS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|mask|>",
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
    "<tool_response>",
    "</tool_response>",
)


@dataclass(frozen=True)
class Tiny:
    """Shapes of a random checkpoint. `pattern`: one letter per layer, L(inear) or F(ull); `nested`: text_config."""

    pattern: str = "LLLFLLLF"
    hidden: int = 128
    ffn: int = 192
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 64
    rotary: float = 0.25
    key_heads: int = 2
    value_heads: int = 4
    key_dim: int = 32
    value_dim: int = 32
    conv: int = 4
    vocab: int = 320
    theta: float = 10000.0
    tied: bool = False
    nested: bool = False
    mtp: bool = True
    attention_bias: bool = False
    gate: str | None = None
    dtype: torch.dtype = torch.float32
    shards: int = 1
    seed: int = 0
    spread: float = 3.0
    layer_list: bool = True

    def config(self) -> dict[str, Any]:
        """config.json in the flat or the nested layout."""
        kinds = ["full_attention" if kind == "F" else "linear_attention" for kind in self.pattern]
        text: dict[str, Any] = {
            "model_type": "qwen3_5_text",
            "vocab_size": self.vocab,
            "hidden_size": self.hidden,
            "intermediate_size": self.ffn,
            "num_hidden_layers": len(kinds),
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "linear_num_key_heads": self.key_heads,
            "linear_num_value_heads": self.value_heads,
            "linear_key_head_dim": self.key_dim,
            "linear_value_head_dim": self.value_dim,
            "linear_conv_kernel_dim": self.conv,
            "rms_norm_eps": 1e-6,
            "hidden_act": "silu",
            "attention_bias": self.attention_bias,
            "attn_output_gate": True,
            "max_position_embeddings": 8192,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": self.theta,
                "partial_rotary_factor": self.rotary,
            },
            "mtp_num_hidden_layers": int(self.mtp),
            "eos_token_id": 258,
            "dtype": str(self.dtype).removeprefix("torch."),
        }
        if self.layer_list:
            text["layer_types"] = kinds
        else:
            text["full_attention_interval"] = self.pattern.index("F") + 1
        if self.gate is not None:
            text["output_gate_type"] = self.gate
        if not self.nested:
            return text | {"architectures": ["Qwen3_5ForCausalLM"], "tie_word_embeddings": self.tied}
        return {
            "architectures": ["Qwen3_5ForConditionalGeneration"],
            "model_type": "qwen3_5",
            "tie_word_embeddings": self.tied,
            "text_config": text,
            "vision_config": {"model_type": "qwen3_5", "depth": 1},
        }


def foreign_quantization(group: int) -> dict[str, Any]:
    """A compressed-tensors int4 config as published checkpoints carry it: MTP names are missing from `ignore`."""
    weights = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": group}
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": None}},
        "ignore": ["lm_head", "re:.*in_proj_[ab]$", "re:.*visual.*"],
    }


def byte_tokenizer(vocab: int = 320) -> Tokenizer:
    """256 byte tokens, then the special tokens from id 256 on; ids up to `vocab` decode to nothing."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={symbol: i for i, symbol in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIALS[:4]])
    tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in SPECIALS[4:]])
    if tokenizer.get_vocab_size() > vocab:
        raise ValueError(f"a byte tokenizer needs {tokenizer.get_vocab_size()} ids, the vocabulary has {vocab}")
    return tokenizer


def _random(name: str, shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    noise = torch.randn(shape, generator=generator)
    if name.endswith("A_log"):
        return torch.rand(shape, generator=generator) * 3 - 3
    if name.endswith("dt_bias"):
        return torch.rand(shape, generator=generator) * 3 - 3
    if name.endswith("linear_attn.norm.weight"):
        return 1 + 0.3 * noise
    if name.endswith("conv1d.weight"):
        return noise * shape[-1] ** -0.5
    if len(shape) == 1:
        return 0.3 * noise  # zero-centred norms, biases
    if name.startswith("embed_tokens"):
        return noise
    return noise * shape[-1] ** -0.5


def _random_tensors(layout: Layout, seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes: dict[str, tuple[int, ...]] = {f"{name}.weight": shape for name, shape in layout.linears.items()}
    shapes |= {f"{name}.bias": (layout.linears[name][0],) for name in layout.biased} | layout.tensors
    return {name: _random(name, shape, generator) for name, shape in sorted(shapes.items())}


def stored_name(name: str, nested: bool) -> str:
    """Canonical -> stored name, as published checkpoints have them."""
    if name.startswith(("lm_head", "mtp.")):
        return name
    return ("model.language_model." if nested else "model.") + name


def _calibrate(tensors: dict[str, torch.Tensor], config: ModelConfig, tiny: Tiny) -> None:
    from oracle.target import target_from_tensors

    model = target_from_tensors(tensors, config)
    ids = torch.randint(0, 256, (1, 64), generator=torch.Generator().manual_seed(tiny.seed))
    with torch.no_grad():
        measured = float(model(ids).logits.std())
    tensors["norm.weight"] = (1 + tensors["norm.weight"]) * (tiny.spread / measured) - 1


def write_directory(
    directory: Path, tensors: dict[str, torch.Tensor], config: dict[str, Any], tokenizer: Tokenizer, shards: int = 1
) -> Path:
    """Write tensors (stored names), config, tokenizer and the demo's chat template as a model directory."""
    directory.mkdir(parents=True, exist_ok=True)
    tensors = {name: tensor.contiguous() for name, tensor in tensors.items()}
    if shards == 1:
        save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    else:
        weight_map: dict[str, str] = {}
        for i in range(shards):
            file = f"model-{i + 1:05d}-of-{shards:05d}.safetensors"
            part = {name: tensor for j, (name, tensor) in enumerate(tensors.items()) if j % shards == i}
            save_file(part, directory / file, metadata={"format": "pt"})
            weight_map |= dict.fromkeys(part, file)
        total = sum(tensor.nbytes for tensor in tensors.values())
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    tokenizer.save(str(directory / "tokenizer.json"))
    ids = tokenizer.get_vocab()
    eos = [ids["<|im_end|>"], ids["<|endoftext|>"]]
    text = config.get("text_config", config)  # the stop id is the tokenizer's, whatever else it has learnt
    text["eos_token_id"] = eos[0]
    (directory / "config.json").write_text(json.dumps(config, indent=1))
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": eos, "do_sample": False}))
    (directory / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>"})
    )
    (directory / "chat_template.jinja").write_text((demo.path() / "chat_template.jinja").read_text())
    return directory


def tiny_tensors(tiny: Tiny, directory: Path) -> dict[str, torch.Tensor]:
    """Random tensors by canonical name, calibrated; writes config.json into `directory` on the way."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(tiny.config()))
    config = read_model_config(directory)
    layout = merged((target_layout(config), mtp_layout(config))) if tiny.mtp else target_layout(config)
    tensors = _random_tensors(layout, tiny.seed)
    _calibrate(tensors, config, tiny)
    return tensors


def build_tiny(directory: Path, tiny: Tiny | None = None, **changes: Any) -> Path:
    """Write a random target checkpoint; keyword arguments override fields of `tiny`."""
    tiny = replace(tiny or Tiny(), **changes)
    tensors = tiny_tensors(tiny, directory)
    stored = {stored_name(name, tiny.nested): tensor.to(tiny.dtype) for name, tensor in tensors.items()}
    return write_directory(directory, stored, tiny.config(), byte_tokenizer(tiny.vocab), tiny.shards)


def build_tiny_drafter(
    directory: Path,
    target: Path,
    *,
    layers: int = 2,
    taps: tuple[int, ...] = (1, 3),
    window: int = 64,
    block: int = 8,
    rank: int = 16,
    top_k: int = 8,
    heads: int = 4,
    kv_heads: int = 2,
    conv_taps: int = 2,
    seed: int = 1,
    dtype: torch.dtype = torch.float32,
) -> Path:
    """Write a random DFlash2 drafter that fits `target`: same hidden size and vocabulary."""
    config = read_model_config(target)
    table = {
        "architectures": ["DFlash2DraftModel"],
        "model_type": "qwen3",
        "dtype": str(dtype).removeprefix("torch."),
        "hidden_size": config.hidden_size,
        "intermediate_size": 2 * config.hidden_size,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": 32,
        "vocab_size": config.vocab_size,
        "rms_norm_eps": 1e-6,
        "layer_types": ["sliding_attention"] * layers,
        "sliding_window": window,
        "is_causal": False,
        "num_target_layers": config.num_layers,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "block_size": block,
        "dflash_config": {
            "mask_token_id": 256 + SPECIALS.index("<|mask|>"),
            "target_layer_ids": list(taps),
            "conv_kernel_size": conv_taps,
            "conv_group_size": 16,
            "selector_rank": rank,
            "selector_top_k": top_k,
        },
    }
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(table, indent=1))
    from soloist.checkpoint.config import read_drafter_config

    tensors = _random_tensors(drafter_layout(read_drafter_config(directory)), seed)
    for name, tensor in tensors.items():
        if name.endswith("norm.weight") or "layernorm" in name:
            tensor += 1  # plain norms
        if name.endswith("base_kernel"):
            tensor[:, 0] += 1  # near the identity
    save_file({name: t.to(dtype) for name, t in tensors.items()}, directory / "model.safetensors", {"format": "pt"})
    return directory
