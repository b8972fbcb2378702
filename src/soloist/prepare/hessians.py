"""Where a module's Hessian comes from: a capture directory, or calibration texts streamed through the decoder."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

import torch

from soloist.checkpoint.reader import Checkpoint
from soloist.checkpoint.shards import read_shard, tensor_info
from soloist.checkpoint.writer import write_file_atomic, write_text_atomic
from soloist.errors import CheckpointError
from soloist.ops.linear import Weight
from soloist.prepare.gptq import Hessian
from soloist.prepare.streaming import Overlay, Streams

HESSIANS, SUMMARY = "hessians.safetensors", "capture.json"


class HessianSource(Protocol):
    """Answers for modules in checkpoint order; may drop what it kept for earlier layers."""

    def hessian(self, module: str) -> Hessian | None: ...


class Captured:
    """Hessians written by `soloist capture`. Modules that share an input share one matrix in the file."""

    def __init__(self, directory: Path, device: torch.device | None = None) -> None:
        self._device = device or torch.device("cpu")
        path = directory / SUMMARY
        try:
            table = json.loads(path.read_text(encoding="utf-8"))
            self._rows: dict[str, int] = {name: int(n) for name, n in table["rows"].items()}
            self._owner: dict[str, str] = {name: str(owner) for name, owner in table["modules"].items()}
        except (OSError, ValueError, KeyError, AttributeError):
            raise CheckpointError(f"{path} is not a capture summary.", "Run `soloist capture` first.") from None
        self._shard = read_shard(directory / HESSIANS)
        self._kept: dict[str, Hessian] = {}

    def hessian(self, module: str) -> Hessian | None:
        owner = self._owner.get(module)
        if owner is None:
            return None
        if owner not in self._kept:
            matrix = tensor_info(self._shard, owner).view().clone().to(self._device)
            hessian = Hessian(0)
            hessian.matrix, hessian.rows = matrix, self._rows[owner]
            self._kept = {owner: hessian}
        return self._kept[owner]


def save_hessians(directory: Path, hessians: Mapping[str, Hessian], extra: Mapping[str, object]) -> None:
    """Write module -> Hessian (shared objects once) and a summary with `extra`. Raises CheckpointError for NaN."""
    owners: dict[int, str] = {}
    modules: dict[str, str] = {}
    tensors: dict[str, torch.Tensor] = {}
    rows: dict[str, int] = {}
    for module, hessian in hessians.items():
        if not bool(torch.isfinite(hessian.matrix).all()):
            raise CheckpointError(f"The inputs captured for {module} are not finite.", "Check the model and DTYPE.")
        owner = owners.setdefault(id(hessian), module)
        modules[module] = owner
        tensors.setdefault(owner, hessian.matrix.cpu())
        rows[owner] = hessian.rows
    directory.mkdir(parents=True, exist_ok=True)
    write_file_atomic(directory / HESSIANS, tensors)
    summary = {"rows": rows, "modules": modules, **extra}
    write_text_atomic(directory / SUMMARY, json.dumps(summary, indent=1) + "\n")


class Streamed:
    """Hessians of decoder layers and head over calibration texts.

    Layer i sees the activations of the layers before it as they were quantised: `finished(module)` returns a
    module of the result, or None if it did not change.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        texts: Sequence[Sequence[int]],
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        self.checkpoint, self.texts = checkpoint, texts
        self.device, self.dtype = device, dtype
        self.finished: Callable[[str], Weight | None] = lambda module: None
        self._streams: Streams | None = None
        self._layer: dict[str, Hessian] = {}
        self._watched = -1

    def _at(self, depth: int) -> Streams:
        if self._streams is None:
            self._streams = Streams(self.checkpoint, self.texts, self.device, self.dtype)
        while self._streams.depth < depth:
            prefix = f"layers.{self._streams.depth}."
            names = [name for name in self.checkpoint.modules if name.startswith(prefix)]
            changed = {name: weight for name in names if (weight := self.finished(name)) is not None}
            self._streams.advance(Overlay(self.checkpoint, changed))
        return self._streams

    def hessian(self, module: str) -> Hessian | None:
        if module == "lm_head":
            streams = self._at(self.checkpoint.config.num_layers)
            hessian = Hessian(self.checkpoint.config.hidden_size, self.device)
            for rows in streams.hidden():
                hessian.add(rows)
            return hessian
        if not module.startswith("layers.") or self.checkpoint.kind != "target":
            return None
        depth = int(module.split(".")[1])
        if depth != self._watched:
            self._layer, self._watched = self._at(depth).watch(), depth
        return self._layer.get(module)
