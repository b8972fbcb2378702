"""Which modules of a checkpoint a part stands for, and the form each is to get."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from soloist.checkpoint.layout import part_of
from soloist.checkpoint.reader import Checkpoint
from soloist.errors import CheckpointError, SettingError

Part = Literal["body", "lm_head", "embed", "mtp", "drafter"]
Method = Literal["rtn", "gptq"]
PARTS: tuple[Part, ...] = ("body", "lm_head", "embed", "mtp", "drafter")
OUTPUTS, TOKENS = "outputs.jsonl", "tokens.json"
"""Files of a capture directory: the answers with their prompts, and how often each token occurs in the answers."""
SMALL = ("in_proj_a", "in_proj_b", "kernel_projection", "hidden_projection")


@dataclass(frozen=True)
class PartRecipe:
    """bits 4 or 8, groups of `group` inputs, by rounding or by GPTQ."""

    bits: int
    method: Method = "rtn"
    group: int = 128

    def __str__(self) -> str:
        return f"int{self.bits} {self.method}, group {self.group}"


def parse_part(text: str, group: int = 128) -> tuple[Part, PartRecipe]:
    """`lm_head=int4:gptq` -> ("lm_head", PartRecipe(4, "gptq")). Raises SettingError with the valid forms."""
    name, _, form = text.partition("=")
    bits, _, method = form.partition(":")
    if name not in PARTS or bits not in ("int4", "int8") or method not in ("", "rtn", "gptq"):
        raise SettingError(
            f"--part {text} is not a part and a form.",
            f"Write PART=int4|int8[:rtn|gptq] with PART one of {', '.join(PARTS)}.",
        )
    part: Part = next(known for known in PARTS if known == name)
    return part, PartRecipe(int(bits.removeprefix("int")), "gptq" if method == "gptq" else "rtn", group)


def modules_of(checkpoint: Checkpoint, part: Part) -> tuple[str, ...]:
    """Canonical modules of a part. Matrices with few rows (in_proj_a/b, convolution kernels) stay in 16 bits."""
    target = checkpoint.kind == "target"
    if target == (part == "drafter"):
        raise CheckpointError(
            f"{checkpoint.directory} is a {checkpoint.kind}; it has no part {part}.",
            "Give --part drafter for a DFlash2 directory, and body, lm_head, embed or mtp for a target.",
        )
    if part == "drafter":
        chosen = [name for name in checkpoint.modules if not name.endswith(SMALL)]
    elif part == "lm_head":
        chosen = ["lm_head"]  # of a tied checkpoint: the embedding, which the result then holds twice
    else:
        groups = {"body": ("attention", "deltanet", "mlp"), "embed": ("embed",), "mtp": ("mtp",)}[part]
        chosen = [n for n in checkpoint.modules if part_of(n) in groups and not n.endswith(SMALL)]
    if not chosen:
        raise CheckpointError(f"{checkpoint.directory} has no {part} module.", f"Leave out --part {part}.")
    return tuple(chosen)


def schemes(checkpoint: Checkpoint, parts: Mapping[Part, PartRecipe]) -> dict[str, PartRecipe]:
    """Canonical module -> form. Raises CheckpointError for a module that is quantised already."""
    chosen: dict[str, PartRecipe] = {}
    for part, recipe in parts.items():
        for module in modules_of(checkpoint, part):
            source = "embed_tokens" if module not in checkpoint.modules else module
            stored = checkpoint.modules[source]
            if stored.fused:
                raise CheckpointError(
                    f"{checkpoint.directory} stores {source} inside a fused matrix.", "Start from the split original."
                )
            if not stored.dense:
                raise CheckpointError(
                    f"{checkpoint.directory}: {source} is int{stored.bits} already ({stored.form}).",
                    f"Leave out --part {part}, or start from a checkpoint where it is dense.",
                )
            chosen[module] = recipe
    return chosen
