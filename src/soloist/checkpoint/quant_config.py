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
    "draft_head": r"re:^mtp\.draft_lm_head$",
    "mtp": r"re:^mtp\..*",
}

Scheme = tuple[int, int, bool]  # bits, group (the whole row: channel), symmetric


def _group(targets: list[str], scheme: Scheme, channel: bool) -> dict[str, Any]:
    bits, group, symmetric = scheme
    weights = {
        "num_bits": bits,
        "type": "int",
        "symmetric": symmetric,
        "strategy": "channel" if channel else "group",
        "group_size": None if channel else group,
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


def build(modules: Mapping[str, tuple[str, Scheme | None, int]]) -> dict[str, Any] | None:
    """modules: stored module name -> (part, scheme or None if dense, K). None if nothing is quantised.

    A pattern in `ignore` must not hide a quantised module: names that would clash are listed exactly.
    """
    quantised = {name: (part, scheme, k) for name, (part, scheme, k) in modules.items() if scheme is not None}
    if not quantised:
        return None
    body = Counter(scheme for part, scheme, _ in quantised.values() if part not in PART_PATTERNS)
    default = body.most_common(1)[0][0] if body else None
    groups: list[dict[str, Any]] = []
    named: dict[tuple[Scheme, bool], list[str]] = {}
    for part, pattern in PART_PATTERNS.items():
        members = [(scheme, k) for owner, scheme, k in quantised.values() if owner == part]
        dense = any(owner == part for owner, scheme, _ in modules.values() if scheme is None)
        for scheme, k in dict.fromkeys(members):
            if scheme == default and part != "embed":
                continue
            if len(set(members)) == 1 and not dense:
                targets = [pattern]
            else:
                targets = [name for name, (owner, s, _) in quantised.items() if owner == part and s == scheme]
            named.setdefault((scheme, scheme[1] == k), []).extend(targets)
    for name, (part, scheme, k) in quantised.items():
        if part not in PART_PATTERNS and scheme != default:
            named.setdefault((scheme, scheme[1] == k), []).append(name)
    if default is not None:
        channel = all(k == default[1] for part, s, k in quantised.values() if s == default)
        groups.append(_group(["Linear"], default, channel))
    groups += [_group(targets, scheme, channel) for (scheme, channel), targets in named.items()]
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
        "config_groups": {f"group_{i}": group for i, group in enumerate(groups)},
        "ignore": list(dict.fromkeys(ignore)),
        "kv_cache_scheme": None,
        "global_compression_ratio": None,
    }
