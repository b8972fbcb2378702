"""What a `quantization_config` says: refuse what cannot be read, and predict a module's scheme for a cross-check.

The prediction never decides how a module is read (its tensors do); a disagreement becomes a note in the load
report. Published files are known to leave MTP names out of `ignore`, for example.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from soloist.checkpoint.layout import aliases
from soloist.errors import CheckpointError

METHODS = ("compressed-tensors", "gptq", "awq", "auto-round")
USE_OTHER = "Use a checkpoint in bf16, or in compressed-tensors W4A16/W8A16, GPTQ, AWQ or AutoRound form."


def check(quantization: Mapping[str, Any], path: Path) -> None:
    """Refuse by name: methods, formats, sparsity, transforms, activation quantisation. Raises CheckpointError."""
    if not quantization:
        return
    method = quantization.get("quant_method")
    if method not in METHODS:
        raise CheckpointError(f"{path}: quant_method {method!r} is not supported.", USE_OTHER)
    if method != "compressed-tensors":
        return
    for key in ("sparsity_config", "transform_config"):
        value = quantization.get(key)
        if (value and value.get("format", "dense") != "dense") or (key == "transform_config" and value):
            raise CheckpointError(f"{path}: {key} is not supported.", USE_OTHER)
    for name, group in (quantization.get("config_groups") or {}).items():
        form = group.get("format") or quantization.get("format")
        weights = group.get("weights") or {}
        if group.get("input_activations"):
            raise CheckpointError(f"{path}: {name} quantises activations, which is not supported.", USE_OTHER)
        if form != "pack-quantized" or weights.get("type", "int") != "int":
            raise CheckpointError(f"{path}: format {form!r} of {name} is not supported.", USE_OTHER)
        if weights.get("strategy") not in ("group", "channel"):
            raise CheckpointError(f"{path}: strategy {weights.get('strategy')!r} is not supported.", USE_OTHER)


def _matches(module: str, patterns: list[str]) -> bool:
    names = aliases(module)
    for pattern in patterns:
        if pattern.startswith("re:"):
            if any(re.match(pattern[3:], name) for name in names):
                return True
        elif pattern in names:
            return True
    return False


def predict(quantization: Mapping[str, Any], module: str) -> int | None:
    """The bits a compressed-tensors config gives a linear module: None for unquantised."""
    if _matches(module, list(quantization.get("ignore") or ())):
        return None
    groups = list((quantization.get("config_groups") or {}).values())
    for group in groups:
        if _matches(module, list(group["targets"])):
            return int(group["weights"]["num_bits"])
    kind = "Embedding" if module == "embed_tokens" else "Linear"
    for group in groups:
        if kind in group["targets"]:
            return int(group["weights"]["num_bits"])
    return None


def disagreements(quantization: Mapping[str, Any], found: Mapping[str, int | None]) -> list[str]:
    """Notes for modules whose stored bits (None: dense) differ from the config's, folded by last name."""
    if quantization.get("quant_method") != "compressed-tensors":
        return []
    kinds: dict[str, int] = {}
    for module, bits in found.items():
        told = predict(quantization, module)
        if told != bits:
            last = re.sub(r"layers\.\d+\.", "layers.*.", module)
            text = f"{last} is stored {form(bits)}, the config says {form(told)}"
            kinds[text] = kinds.get(text, 0) + 1
    return [text if count == 1 else f"{text} ({count} modules)" for text, count in kinds.items()]


def form(bits: int | None) -> str:
    return "unquantised" if bits is None else f"int{bits}"
