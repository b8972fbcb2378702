"""The `quantization_config` of a checkpoint Soloist writes: compressed-tensors, resolvable by name.

One group targets the class `Linear` (the form most body modules share); parts stored in another form get a
group of their own by name, which beats the class. Dense linears are listed in `ignore`, folded over layers.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from typing import Any

PART_PATTERNS = {
    "embed": r"re:.*embed_tokens$",
    "lm_head": r"re:.*lm_head$",
    "mtp": r"re:^mtp\..*",
}

CHANNEL = 0
Scheme = tuple[int, int, bool]  # bits, group, symmetric; group CHANNEL: one scale per output


def _group(targets: list[str], scheme: Scheme) -> dict[str, Any]:
    bits, group, symmetric = scheme
    weights = {
        "num_bits": bits,
        "type": "int",
        "symmetric": symmetric,
        "strategy": "channel" if group == CHANNEL else "group",
        "group_size": None if group == CHANNEL else group,
        "actorder": None,
        "block_structure": None,
        "dynamic": False,
        "observer": "minmax",
        "observer_kwargs": {},
    }
    return {
        "targets": targets,
        "weights": weights,
        "input_activations": None,
        "output_activations": None,
        "format": "pack-quantized",
    }


def _fold(name: str) -> str:
    """`model.layers.3.linear_attn.in_proj_a` -> `re:.*linear_attn\\.in_proj_a$`; other names stay exact."""
    match = re.search(r"layers\.\d+\.(.+)$", name)
    return name if match is None else "re:.*" + re.escape(match.group(1)).replace("\\_", "_") + "$"


def _schemes(modules: Mapping[str, tuple[str, Scheme | None, int]]) -> dict[str, tuple[str, Scheme]]:
    """Quantised modules with their schemes; a group that is the whole row wherever it occurs is one per channel."""
    found = [(name, part, scheme, k) for name, (part, scheme, k) in modules.items() if scheme is not None]
    grouped = {scheme for _, _, scheme, k in found if scheme[1] != k}
    return {
        name: (part, scheme if scheme in grouped else (scheme[0], CHANNEL, scheme[2]))
        for name, part, scheme, _ in found
    }


def build(modules: Mapping[str, tuple[str, Scheme | None, int]]) -> dict[str, Any] | None:
    """modules: stored module name -> (part, scheme or None if dense, K). None if nothing is quantised.

    A pattern in `ignore` must not hide a quantised module: names that would clash are listed exactly.
    """
    quantised = _schemes(modules)
    if not quantised:
        return None
    body = Counter(scheme for part, scheme in quantised.values() if part not in PART_PATTERNS)
    groups: dict[Scheme, list[str]] = {}
    if body:
        groups[body.most_common(1)[0][0]] = ["Linear"]
    for part, pattern in PART_PATTERNS.items():
        members = {name: scheme for name, (owner, scheme) in quantised.items() if owner == part}
        dense = any(owner == part for owner, scheme, _ in modules.values() if scheme is None)
        alike = len(set(members.values())) == 1 and not dense
        for name, scheme in members.items():
            targets = groups.setdefault(scheme, [])
            # A head is named even where the class has its form: other readers know it by another class.
            if "Linear" not in targets or part != "mtp":
                targets.append(pattern if alike else name)
    for name, (part, scheme) in quantised.items():
        targets = groups.setdefault(scheme, [])
        if part not in PART_PATTERNS and "Linear" not in targets:
            targets.append(name)
    ignore: list[str] = []
    for name, (_, form, _k) in modules.items():
        if form is None:
            pattern = _fold(name)
            clash = pattern.startswith("re:") and any(re.match(pattern[3:], other) for other in quantised)
            ignore.append(name if clash else pattern)
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "config_groups": {
            f"group_{i}": _group(list(dict.fromkeys(targets)), scheme)
            for i, (scheme, targets) in enumerate(groups.items())
        },
        "ignore": list(dict.fromkeys(ignore)),
        "kv_cache_scheme": None,
        "global_compression_ratio": None,
    }
