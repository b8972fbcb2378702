"""The target as transformers computes it: Qwen3_5ForCausalLM in fp32 over the weights of one of our checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

from soloist.checkpoint.config import ModelConfig
from soloist.checkpoint.reader import open_checkpoint


def _hf_config(c: ModelConfig) -> Qwen3_5TextConfig:
    config = Qwen3_5TextConfig(
        vocab_size=c.vocab_size,
        hidden_size=c.hidden_size,
        intermediate_size=c.intermediate_size,
        num_hidden_layers=c.num_layers,
        num_attention_heads=c.num_heads,
        num_key_value_heads=c.num_kv_heads,
        head_dim=c.head_dim,
        linear_num_key_heads=c.linear_key_heads,
        linear_num_value_heads=c.linear_value_heads,
        linear_key_head_dim=c.linear_key_dim,
        linear_value_head_dim=c.linear_value_dim,
        linear_conv_kernel_dim=c.conv_kernel,
        layer_types=list(c.layer_types),
        rms_norm_eps=c.eps,
        attention_bias=c.attention_bias,
        tie_word_embeddings=c.tied,
        max_position_embeddings=c.max_position,
        rope_parameters={
            "rope_type": "default",
            "rope_theta": c.rope_theta,
            "partial_rotary_factor": c.rope_dim / c.head_dim,
        },
        eos_token_id=list(c.eos_ids),
    )
    config._attn_implementation = "eager"
    return config


def target_from_tensors(tensors: Mapping[str, torch.Tensor], config: ModelConfig) -> Qwen3_5ForCausalLM:
    """Build the oracle from canonical tensors (`layers.0...`, `norm.weight`, `lm_head.weight` unless tied)."""
    model = Qwen3_5ForCausalLM(_hf_config(config)).float().eval()
    state = {}
    for name in model.state_dict():
        known = name.removeprefix("model.")
        if known == "lm_head.weight" and config.tied:
            known = "embed_tokens.weight"
        state[name] = tensors[known].float()
    model.load_state_dict(state, strict=True)
    return model


def load_target(directory: str | Path) -> Qwen3_5ForCausalLM:
    """The oracle for a model directory; quantised weights are dequantised to fp32."""
    checkpoint = open_checkpoint(directory)
    names = [f"{module}.weight" for module in checkpoint.modules] + list(checkpoint.layout.tensors)
    names += [f"{module}.bias" for module in checkpoint.layout.biased]
    return target_from_tensors(
        {name: checkpoint.tensor(name) for name in names if not name.startswith("mtp.")}, checkpoint.config
    )


@dataclass(frozen=True)
class States:
    """hidden [T, H] after the final norm; layers[i] [T, H] the residual stream after layer i; logits [T, V]."""

    hidden: torch.Tensor
    layers: tuple[torch.Tensor, ...]
    logits: torch.Tensor


@torch.no_grad()
def states(model: Qwen3_5ForCausalLM, ids: list[int]) -> States:
    """One forward of a whole sequence. The last layer's stream is not exposed by transformers, so it is left out."""
    out = model.model(torch.tensor([ids]), output_hidden_states=True)
    logits = model.lm_head(out.last_hidden_state)[0]
    return States(out.last_hidden_state[0], tuple(h[0] for h in out.hidden_states[1:-1]), logits)


@torch.no_grad()
def greedy(model: Qwen3_5ForCausalLM, ids: list[int], tokens: int, stop: tuple[int, ...] = ()) -> list[int]:
    """transformers' own greedy generation, cut after the first stop id."""
    out = model.generate(
        torch.tensor([ids]),
        max_new_tokens=tokens,
        do_sample=False,
        eos_token_id=list(stop) or None,
        pad_token_id=0,
        use_cache=True,
    )
    return out[0, len(ids) :].tolist()
