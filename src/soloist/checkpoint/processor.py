"""How a checkpoint wants its pictures: sizes and normalisation, from `preprocessor_config.json`.

Newer directories keep the same table under `image_processor` in `processor_config.json`; both are read. Keys and
defaults follow transformers' Qwen2-VL image processor, which the family uses.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from soloist.errors import CheckpointError

FILES = ("preprocessor_config.json", "processor_config.json")


@dataclass(frozen=True)
class Processor:
    """Lengths in pixels. A token is a square of `factor` pixels; `smallest` and `largest` bound a picture's area."""

    patch: int
    frames: int
    merge: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    scale: float
    resample: int
    smallest: int
    largest: int

    @property
    def factor(self) -> int:
        """Side of a merged patch."""
        return self.patch * self.merge


def read_processor(directory: str | Path) -> Processor:
    """Raises CheckpointError naming the file for a missing or unusable one."""
    directory = Path(directory)
    path = next((directory / name for name in FILES if (directory / name).is_file()), None)
    if path is None:
        raise CheckpointError(
            f"{directory} has no {FILES[0]}, which pictures need.",
            "Copy it from the original model's repository, or set VISION=0.",
        )
    try:
        table = json.loads(path.read_text(encoding="utf-8"))
        return _processor(table.get("image_processor") or table)
    except (UnicodeDecodeError, json.JSONDecodeError, AttributeError, TypeError, ValueError, KeyError) as error:
        raise CheckpointError(f"{path} cannot be used ({error}).", "Download the file again.") from None


def _processor(t: dict[str, Any]) -> Processor:
    for switch in ("do_resize", "do_rescale", "do_normalize", "do_convert_rgb"):
        if t.get(switch) is False:
            raise ValueError(f"{switch} is off")
    size = t.get("size") or {}
    made = Processor(
        patch=int(t.get("patch_size", 14)),
        frames=int(t.get("temporal_patch_size", 2)),
        merge=int(t.get("merge_size", 2)),
        mean=tuple(float(v) for v in t["image_mean"]),
        std=tuple(float(v) for v in t["image_std"]),
        scale=float(t.get("rescale_factor", 1 / 255)),
        resample=int(t.get("resample", 3)),
        smallest=int(t.get("min_pixels") or size.get("shortest_edge") or 56 * 56),
        largest=int(t.get("max_pixels") or size.get("longest_edge") or 28 * 28 * 1280),
    )
    if len(made.mean) != 3 or len(made.std) != 3 or min(made.patch, made.frames, made.merge) < 1:
        raise ValueError("three means, three deviations and positive patch sizes are expected")
    return made
