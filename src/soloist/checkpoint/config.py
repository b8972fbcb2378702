"""What a checkpoint says about itself: the target's text model and the DFlash2 drafter.

`read_model_config` and `read_drafter_config` turn `config.json` into frozen dataclasses and refuse,
by name, what this engine does not implement. Keys and defaults follow transformers' Qwen3.5
configuration; both layouts load (flat text config, or nested under `text_config`).
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from soloist.errors import CheckpointError

SUPPORTED_MODEL_TYPES = ("qwen3_5", "qwen3_5_text")


@dataclass(frozen=True)
class ModelConfig:
    """Shapes of a Qwen3.5-family target. Lengths are in elements, `rope_dim` is the rotated width of a head."""

    vocab_size: int
    hidden_size: int
    num_layers: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope_dim: int
    rope_theta: float
    mrope_section: tuple[int, ...]
    linear_key_heads: int
    linear_value_heads: int
    linear_key_dim: int
    linear_value_dim: int
    conv_kernel: int
    layer_types: tuple[str, ...]
    eps: float
    attention_bias: bool
    gate_activation: str
    tied: bool
    max_position: int
    mtp_layers: int
    eos_ids: tuple[int, ...]
    dtype: str
    quantization: dict[str, Any] | None
    vision: dict[str, Any] | None

    @property
    def attention_layers(self) -> tuple[int, ...]:
        return tuple(i for i, kind in enumerate(self.layer_types) if kind == "full_attention")

    @property
    def linear_layers(self) -> tuple[int, ...]:
        return tuple(i for i, kind in enumerate(self.layer_types) if kind == "linear_attention")

    @property
    def conv_channels(self) -> int:
        """Channels of the short convolution: q | k | v of a DeltaNet layer."""
        return 2 * self.linear_key_heads * self.linear_key_dim + self.linear_value_heads * self.linear_value_dim

    @property
    def kv_groups(self) -> int:
        return self.num_heads // self.num_kv_heads


@dataclass(frozen=True)
class DrafterConfig:
    """Shapes of a DFlash2 block drafter (Qwen3-style layers, plain RMSNorm)."""

    hidden_size: int
    num_layers: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope_dim: int
    rope_theta: float
    vocab_size: int
    eps: float
    window: int
    causal: bool
    block_size: int
    mask_token_id: int
    tap_layers: tuple[int, ...]
    conv_taps: int
    conv_group: int
    selector_rank: int
    selector_top_k: int
    embedding_scale: float
    output_multiplier: float
    softcap: float
    quantization: dict[str, Any] | None


def _load_json(path: Path) -> dict[str, Any]:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(
            f"{path.parent} has no {path.name}.", "Point MODEL at a Hugging Face model directory."
        ) from None
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise CheckpointError(f"{path} is not valid JSON ({error}).", "Download the file again.") from None
    if not isinstance(data, dict):
        raise CheckpointError(f"{path} does not hold a JSON object.", "Download the file again.")
    return data


def _need(table: dict[str, Any], key: str, path: Path) -> Any:
    if table.get(key) is None:
        raise CheckpointError(f"{path} lacks the key `{key}`.", "Download the file again or complete it.")
    return table[key]


def _as_ids(value: Any) -> tuple[int, ...]:
    if value is None:
        return ()
    return tuple(int(v) for v in value) if isinstance(value, list) else (int(value),)


def _layer_types(t: dict[str, Any], layers: int, path: Path) -> tuple[str, ...]:
    kinds = t.get("layer_types")
    if kinds is None:
        interval = int(t.get("full_attention_interval", 4))
        kinds = ["full_attention" if (i + 1) % interval == 0 else "linear_attention" for i in range(layers)]
    unknown = sorted(set(kinds) - {"full_attention", "linear_attention"})
    if unknown or len(kinds) != layers:
        raise CheckpointError(
            f"{path}: `layer_types` has {len(kinds)} entries for {layers} layers"
            + (f" and the unknown kinds {unknown}." if unknown else "."),
            "Soloist serves linear_attention and full_attention layers.",
        )
    return tuple(kinds)


def read_model_config(directory: str | Path) -> ModelConfig:
    """Read the target's `config.json` (+ `generation_config.json` for the stop ids).

    Raises CheckpointError naming file and key for anything missing or unsupported.
    """
    directory = Path(directory)
    path = directory / "config.json"
    top = _load_json(path)
    t: dict[str, Any] = top.get("text_config") or top
    kind = top.get("model_type")
    if kind not in SUPPORTED_MODEL_TYPES:
        raise CheckpointError(
            f"{path}: model_type {kind!r} is not supported.",
            f"Soloist serves the Qwen3.5 family ({', '.join(SUPPORTED_MODEL_TYPES)}).",
        )
    if t.get("num_experts"):
        raise CheckpointError(f"{path}: mixture-of-experts checkpoints are not supported.", "Use a dense checkpoint.")
    if t.get("mtp_use_dedicated_embeddings"):
        raise CheckpointError(f"{path}: mtp_use_dedicated_embeddings is not supported.", "Use SPEC=none or dflash2.")
    rope = t.get("rope_parameters") or {}
    if rope.get("rope_type", "default") != "default":
        raise CheckpointError(f"{path}: rope_type {rope['rope_type']!r} is not supported.", "Use the default rope.")
    if t.get("attn_output_gate", True) is not True:
        raise CheckpointError(f"{path}: attn_output_gate false is not supported.", "Use a Qwen3.5-family checkpoint.")
    if t.get("hidden_act", "silu") != "silu":
        raise CheckpointError(f"{path}: hidden_act {t['hidden_act']!r} is not supported.", "Only silu is.")
    gate = t.get("output_gate_type") or "silu"
    gate = {"swish": "silu"}.get(gate, gate)
    if gate not in ("silu", "sigmoid"):
        raise CheckpointError(f"{path}: output_gate_type {gate!r} is not supported.", "Known: swish, silu, sigmoid.")
    heads, head_dim = int(_need(t, "num_attention_heads", path)), int(t.get("head_dim") or 256)
    kv_heads = int(_need(t, "num_key_value_heads", path))
    hk, hv = int(t.get("linear_num_key_heads", 16)), int(t.get("linear_num_value_heads", 32))
    if hv % hk or heads % kv_heads:
        raise CheckpointError(
            f"{path}: {hv} value heads over {hk} key heads, {heads} heads over {kv_heads} KV heads do not divide.",
            "The head counts must divide; the file is damaged or of another architecture.",
        )
    factor = float(rope.get("partial_rotary_factor", t.get("partial_rotary_factor", 0.25)))
    layers = int(_need(t, "num_hidden_layers", path))
    eos = _as_ids(t.get("eos_token_id", top.get("eos_token_id")))
    generation = directory / "generation_config.json"
    if generation.exists():
        eos += _as_ids(_load_json(generation).get("eos_token_id"))
    return ModelConfig(
        vocab_size=int(_need(t, "vocab_size", path)),
        hidden_size=int(_need(t, "hidden_size", path)),
        num_layers=layers,
        intermediate_size=int(_need(t, "intermediate_size", path)),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        rope_dim=int(head_dim * factor),
        rope_theta=float(rope.get("rope_theta", t.get("rope_theta", 1e7))),
        mrope_section=tuple(rope.get("mrope_section") or (11, 11, 10)),
        linear_key_heads=hk,
        linear_value_heads=hv,
        linear_key_dim=int(t.get("linear_key_head_dim", 128)),
        linear_value_dim=int(t.get("linear_value_head_dim", 128)),
        conv_kernel=int(t.get("linear_conv_kernel_dim", 4)),
        layer_types=_layer_types(t, layers, path),
        eps=float(t.get("rms_norm_eps", 1e-6)),
        attention_bias=bool(t.get("attention_bias", False)),
        gate_activation=gate,
        tied=bool(t["tie_word_embeddings"] if "tie_word_embeddings" in t else top.get("tie_word_embeddings", False)),
        max_position=int(t.get("max_position_embeddings", 32768)),
        mtp_layers=int(t.get("mtp_num_hidden_layers") or 0),
        eos_ids=tuple(dict.fromkeys(eos)),
        dtype=str(t.get("dtype") or t.get("torch_dtype") or top.get("dtype") or top.get("torch_dtype") or "bfloat16"),
        quantization=top.get("quantization_config"),
        vision=top.get("vision_config"),
    )


def read_drafter_config(directory: str | Path) -> DrafterConfig:
    """Read a DFlash2 drafter's `config.json`. Raises CheckpointError naming file and key."""
    path = Path(directory) / "config.json"
    c = _load_json(path)
    architectures = c.get("architectures") or []
    d: dict[str, Any] = c.get("dflash_config") or {}
    if "DFlash2DraftModel" not in architectures or not d:
        raise CheckpointError(
            f"{path}: architectures {architectures} is not a DFlash2 drafter.", "Point DRAFTER at a DFlash2 directory."
        )
    rope = c.get("rope_parameters") or {}
    head_dim = int(_need(c, "head_dim", path))
    layer_types = list(c.get("layer_types") or [])
    # Causality precedence as vLLM's: top level, then dflash_config, then "sliding layers are causal".
    causal = c.get("is_causal")
    if causal is None:
        causal = d.get("causal")
    if causal is None:
        causal = "sliding_attention" in layer_types
    block = c.get("block_size") or d.get("block_size")
    if not block:
        raise CheckpointError(f"{path} lacks the key `block_size`.", "Download the file again or complete it.")
    return DrafterConfig(
        hidden_size=int(_need(c, "hidden_size", path)),
        num_layers=int(_need(c, "num_hidden_layers", path)),
        intermediate_size=int(_need(c, "intermediate_size", path)),
        num_heads=int(_need(c, "num_attention_heads", path)),
        num_kv_heads=int(_need(c, "num_key_value_heads", path)),
        head_dim=head_dim,
        rope_dim=int(rope.get("rope_dim") or head_dim),
        rope_theta=float(rope.get("rope_theta", c.get("rope_theta", 1e7))),
        vocab_size=int(_need(c, "vocab_size", path)),
        eps=float(c.get("rms_norm_eps", 1e-6)),
        window=int(c.get("sliding_window") or c.get("max_position_embeddings") or 2048),
        causal=bool(causal),
        block_size=int(block),
        mask_token_id=int(_need(d, "mask_token_id", path)),
        tap_layers=tuple(int(i) for i in _need(d, "target_layer_ids", path)),
        conv_taps=int(_need(d, "conv_kernel_size", path)),
        conv_group=int(_need(d, "conv_group_size", path)),
        selector_rank=int(_need(d, "selector_rank", path)),
        selector_top_k=int(_need(d, "selector_top_k", path)),
        embedding_scale=float(d.get("input_embedding_scale", 1.0)),
        output_multiplier=float(d.get("output_multiplier", 1.0)),
        softcap=float(d.get("final_logit_softcapping") or 0.0),
        quantization=c.get("quantization_config"),
    )
