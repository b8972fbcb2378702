"""What a checkpoint must hold: canonical names and shapes, derived from its configuration.

Canonical names have no model prefix: `embed_tokens`, `layers.3.self_attn.q_proj`, `norm.weight`, `lm_head`,
`mtp.fc`. `linears` are modules a format may quantise, `tensors` are always stored as they are.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from soloist.checkpoint.config import DrafterConfig, ModelConfig

TARGET_PREFIXES = ("model.language_model.", "language_model.model.", "model.")
HEAD_PREFIXES = ("model.language_model.", "language_model.", "model.")
VISION_PREFIXES = ("model.visual.", "visual.")
FUSED = {  # stored fused name -> the modules whose rows it stacks, in order
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
    "in_proj_qkvz": ("in_proj_qkv", "in_proj_z"),
    "in_proj_ba": ("in_proj_b", "in_proj_a"),
}
PARTS = ("embed", "attention", "deltanet", "mlp", "norms", "lm_head", "mtp", "draft_head", "drafter")


@dataclass
class Layout:
    """linears: module -> (N, K); tensors: name -> shape; biased: linears that also carry `.bias` [N]."""

    linears: dict[str, tuple[int, int]] = field(default_factory=dict)
    tensors: dict[str, tuple[int, ...]] = field(default_factory=dict)
    biased: set[str] = field(default_factory=set)


def canonical(stored: str) -> str | None:
    """Stored tensor name -> canonical name; None for the vision tower, which text serving skips."""
    if stored.startswith(VISION_PREFIXES):
        return None
    if stored.startswith(("mtp.", "lm_head.")):
        return stored
    for prefix in HEAD_PREFIXES:
        if stored.startswith((prefix + "lm_head.", prefix + "mtp.")):
            return stored.removeprefix(prefix)
    for prefix in TARGET_PREFIXES:
        if stored.startswith(prefix):
            return stored.removeprefix(prefix)
    return stored


def aliases(module: str) -> tuple[str, ...]:
    """Every name a quantisation config may use for a canonical module."""
    if module.startswith(("mtp.", "lm_head")):
        return (module, *(prefix + module for prefix in HEAD_PREFIXES))
    return (*(prefix + module for prefix in TARGET_PREFIXES), module)


def fused_parent(module: str) -> tuple[str, tuple[str, ...]]:
    """(fused name, its parts in order) a module may be stored in; ("", ()) for modules that are never fused."""
    stem, _, last = module.rpartition(".")
    for fused, parts in FUSED.items():
        if last in parts:
            return f"{stem}.{fused}", tuple(f"{stem}.{part}" for part in parts)
    return "", ()


def part_of(name: str) -> str:
    """The part (one of PARTS) a canonical name of a target is accounted under."""
    if name.startswith("mtp.draft_"):
        return "draft_head"
    if name.startswith("mtp."):
        return "mtp"
    for key, part in (
        ("embed_tokens", "embed"),
        ("lm_head", "lm_head"),
        ("layernorm", "norms"),
        ("self_attn", "attention"),
        ("linear_attn", "deltanet"),
        ("mlp", "mlp"),
    ):
        if key in name:
            return part
    return "norms"


def _attention(layout: Layout, prefix: str, c: ModelConfig) -> None:
    heads, kv = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
    shapes = {
        "q_proj": (2 * heads, c.hidden_size),
        "k_proj": (kv, c.hidden_size),
        "v_proj": (kv, c.hidden_size),
        "o_proj": (c.hidden_size, heads),
    }
    for name, shape in shapes.items():
        layout.linears[f"{prefix}.{name}"] = shape
        if c.attention_bias:
            layout.biased.add(f"{prefix}.{name}")
    layout.tensors[f"{prefix}.q_norm.weight"] = layout.tensors[f"{prefix}.k_norm.weight"] = (c.head_dim,)


def _deltanet(layout: Layout, prefix: str, c: ModelConfig) -> None:
    hv, value_width = c.linear_value_heads, c.linear_value_heads * c.linear_value_dim
    layout.linears[f"{prefix}.in_proj_qkv"] = (c.conv_channels, c.hidden_size)
    layout.linears[f"{prefix}.in_proj_z"] = (value_width, c.hidden_size)
    layout.linears[f"{prefix}.in_proj_b"] = layout.linears[f"{prefix}.in_proj_a"] = (hv, c.hidden_size)
    layout.linears[f"{prefix}.out_proj"] = (c.hidden_size, value_width)
    layout.tensors[f"{prefix}.conv1d.weight"] = (c.conv_channels, 1, c.conv_kernel)
    layout.tensors[f"{prefix}.A_log"] = layout.tensors[f"{prefix}.dt_bias"] = (hv,)
    layout.tensors[f"{prefix}.norm.weight"] = (c.linear_value_dim,)


def _decoder_layer(layout: Layout, prefix: str, hidden: int, width: int) -> None:
    layout.tensors[f"{prefix}.input_layernorm.weight"] = (hidden,)
    layout.tensors[f"{prefix}.post_attention_layernorm.weight"] = (hidden,)
    layout.linears[f"{prefix}.mlp.gate_proj"] = layout.linears[f"{prefix}.mlp.up_proj"] = (width, hidden)
    layout.linears[f"{prefix}.mlp.down_proj"] = (hidden, width)


def target_layout(c: ModelConfig) -> Layout:
    """The decoder, embedding, final norm and (unless tied) head of a target."""
    layout = Layout()
    layout.linears["embed_tokens"] = (c.vocab_size, c.hidden_size)
    for i, kind in enumerate(c.layer_types):
        _decoder_layer(layout, f"layers.{i}", c.hidden_size, c.intermediate_size)
        if kind == "full_attention":
            _attention(layout, f"layers.{i}.self_attn", c)
        else:
            _deltanet(layout, f"layers.{i}.linear_attn", c)
    layout.tensors["norm.weight"] = (c.hidden_size,)
    if not c.tied:
        layout.linears["lm_head"] = (c.vocab_size, c.hidden_size)
    return layout


def mtp_layout(c: ModelConfig) -> Layout:
    """The MTP module: `mtp.fc`, its norms and `mtp_layers` full-attention decoder layers."""
    layout = Layout()
    layout.linears["mtp.fc"] = (c.hidden_size, 2 * c.hidden_size)
    for name in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm"):
        layout.tensors[f"mtp.{name}.weight"] = (c.hidden_size,)
    for i in range(c.mtp_layers):
        _decoder_layer(layout, f"mtp.layers.{i}", c.hidden_size, c.intermediate_size)
        _attention(layout, f"mtp.layers.{i}.self_attn", c)
    return layout


def drafter_layout(c: DrafterConfig) -> Layout:
    """A DFlash2 drafter. The two codebooks are plain tensors; embedding and head are the target's."""
    layout = Layout()
    heads, kv, groups = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim, c.hidden_size // c.conv_group
    layout.linears["fc"] = (c.hidden_size, len(c.tap_layers) * c.hidden_size)
    layout.tensors["hidden_norm.weight"] = layout.tensors["norm.weight"] = (c.hidden_size,)
    for i in range(c.num_layers):
        prefix = f"layers.{i}"
        _decoder_layer(layout, prefix, c.hidden_size, c.intermediate_size)
        layout.linears[f"{prefix}.self_attn.q_proj"] = (heads, c.hidden_size)
        layout.linears[f"{prefix}.self_attn.k_proj"] = (kv, c.hidden_size)
        layout.linears[f"{prefix}.self_attn.v_proj"] = (kv, c.hidden_size)
        layout.linears[f"{prefix}.self_attn.o_proj"] = (c.hidden_size, heads)
        layout.tensors[f"{prefix}.self_attn.q_norm.weight"] = (c.head_dim,)
        layout.tensors[f"{prefix}.self_attn.k_norm.weight"] = (c.head_dim,)
        for conv in ("attention_conv", "mlp_conv"):
            layout.tensors[f"{prefix}.{conv}.base_kernel"] = (2, c.conv_taps, c.hidden_size)
            layout.linears[f"{prefix}.{conv}.kernel_projection"] = (2 * c.conv_taps * groups, c.hidden_size)
    layout.linears["candidate_selector.hidden_projection"] = (c.selector_rank, c.hidden_size)
    for side in ("predecessor", "successor"):
        layout.tensors[f"candidate_selector.{side}_codebook"] = (c.vocab_size, c.selector_rank)
    return layout


def merged(layouts: Iterable[Layout]) -> Layout:
    """Union of layouts with disjoint names."""
    out = Layout()
    for layout in layouts:
        out.linears |= layout.linears
        out.tensors |= layout.tensors
        out.biased |= layout.biased
    return out
