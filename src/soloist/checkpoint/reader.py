"""Opening a model directory: everything that can be wrong is found from headers, then weights are read on demand.

`open_checkpoint` parses config.json, the index, every shard header (with its size check), and looks for the
tokenizer and the chat template; it resolves name prefixes and checks the shape of every tensor the config
implies. Only then can a `Checkpoint` exist. Reading maps the files and copies each tensor once.
What can go wrong: names the config does not imply are ignored (and listed in `unused`); a checkpoint whose
MTP tensors are absent is served without them (`has_mtp` is False and `notes` says so).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import torch

from soloist.checkpoint import formats
from soloist.checkpoint.config import DrafterConfig, ModelConfig, read_drafter_config, read_model_config
from soloist.checkpoint.formats import StoredModule, resolve
from soloist.checkpoint.formats.stored import check_finite
from soloist.checkpoint.layout import (
    VISION_PREFIXES,
    Layout,
    canonical,
    drafter_layout,
    fused_parent,
    merged,
    mtp_layout,
    part_of,
    target_layout,
)
from soloist.checkpoint.shards import BESIDE, TensorInfo, read_beside, read_directory
from soloist.checkpoint.sidecars import check_draft_ids, check_tokenizer, draft_ids, find_template
from soloist.errors import CheckpointError
from soloist.ops.linear import DenseWeight, QuantizedWeight, Weight

Kind = Literal["target", "drafter"]
DRAFT_HEAD = "mtp.draft_lm_head"
SAMPLED, FARTHEST = 16, 0.3
"""Rows compared, and a relative distance that no 4-bit rounding reaches."""


@dataclass(frozen=True)
class PartSummary:
    """One row of the load report: modules of a part that share a form. `bits` counts a code, not its scales."""

    part: str
    form: str
    bits: int
    group: int
    modules: int
    parameters: int
    nbytes: int


class Checkpoint:
    """A checked model directory. Names are canonical (no model prefix); see `layout` for the list."""

    def __init__(
        self,
        directory: Path,
        kind: Kind,
        config: ModelConfig | DrafterConfig,
        tensors: Mapping[str, TensorInfo],
        modules: Mapping[str, StoredModule],
        layout: Layout,
        notes: Sequence[str],
        visual: Mapping[str, TensorInfo] | None = None,
    ) -> None:
        self.directory = directory
        self.kind = kind
        self._config = config
        self.tensors = tensors
        self.modules = modules
        self.layout = layout
        self.notes = tuple(notes)
        self.visual = dict(visual or {})
        """The vision tower's tensors by their names inside it (`blocks.0.norm1.weight`); empty for text models."""

    @property
    def config(self) -> ModelConfig:
        """The target's shapes; a drafter's are `drafter_config`."""
        if not isinstance(self._config, ModelConfig):
            raise CheckpointError(f"{self.directory} is a drafter, not a target model.", "Point MODEL at a target.")
        return self._config

    @property
    def drafter_config(self) -> DrafterConfig:
        if not isinstance(self._config, DrafterConfig):
            raise CheckpointError(f"{self.directory} is not a DFlash2 drafter.", "Point DRAFTER at a drafter.")
        return self._config

    @property
    def has_mtp(self) -> bool:
        """True if the MTP module is complete."""
        return "mtp.fc" in self.modules

    @property
    def has_draft_head(self) -> bool:
        """True if a truncated head for drafting (`mtp.draft_lm_head` and its id list) is there."""
        return DRAFT_HEAD in self.modules

    @property
    def has_template(self) -> bool:
        return find_template(self.directory) is not None

    def has(self, name: str) -> bool:
        """Is this canonical tensor (`norm.weight`) or module (`layers.0.mlp.up_proj`) stored?"""
        return name in self.tensors or name in self.modules

    def tensor(self, name: str) -> torch.Tensor:
        """A copy of one tensor in its stored dtype. `X.weight` of a quantised module X is dequantised to fp32."""
        info = self.tensors.get(name)
        if info is not None:
            tensor = info.view().clone()
            check_finite(name, info, tensor)
            return tensor
        module = name.removesuffix(".weight")
        if name.endswith(".weight") and module in self.modules:
            return self.weight(module).dequantize()
        raise CheckpointError(f"{self.directory} has no tensor {name}.", "Download the checkpoint again.")

    def weight(self, module: str, copy: bool = True) -> Weight:
        """The weight of a linear module; `lm_head` of a tied checkpoint is its embedding.

        `copy=False` leaves it on the mapped file's pages where the format allows, for reading a few rows or once.
        """
        if module == "lm_head" and module not in self.modules and self.config.tied:
            module = "embed_tokens"
        return formats.load(self._stored(module), copy)

    def borrowed(self, module: str) -> QuantizedWeight | None:
        """A quantised `weight`, checked like it, on the mapped file's pages where its format allows.

        For who copies it at once. None for a dense one.
        """
        if module == "lm_head" and module not in self.modules and self.config.tied:
            module = "embed_tokens"
        stored = self._stored(module)
        if stored.dense:
            return None
        formats.check(stored)
        weight = formats.load(stored, copy=False)
        assert isinstance(weight, QuantizedWeight)
        return weight

    def _stored(self, module: str) -> StoredModule:
        if module not in self.modules:
            raise CheckpointError(f"{self.directory} has no module {module}.", "Download the checkpoint again.")
        return self.modules[module]

    def fused(self, modules: Sequence[str]) -> Weight | tuple[Weight, ...]:
        """Rows of several modules with the same input, stacked: q|k|v, gate|up, qkv|z|b|a.

        One weight where the forms agree (all dense in one dtype; or the same bits, group, symmetry and scale
        dtype), else the tuple of the single weights in the order given.
        """
        for module in modules:
            formats.check(self._stored(module))
        fused = fuse([formats.load(self._stored(module), copy=False) for module in modules])
        return tuple(self.weight(module) for module in modules) if isinstance(fused, tuple) else fused

    def nbytes(self) -> dict[str, int]:
        """In-memory bytes per part, from headers. A tied head is counted once, under `embed`."""
        return {part: sum(row.nbytes for row in self.summary() if row.part == part) for part in self.parts}

    @property
    def parts(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(row.part for row in self.summary()))

    def summary(self) -> tuple[PartSummary, ...]:
        """Per part and form: modules, bits, group, parameters, bytes; from headers alone."""
        rows: dict[tuple[str, str, int, int], list[tuple[int, int]]] = {}
        for name, stored in self.modules.items():
            key = (self._part(name), stored.form, stored.bits, stored.group)
            rows.setdefault(key, []).append((stored.shape[0] * stored.shape[1], stored.nbytes))
        for name in self.layout.tensors:
            info = self.tensors[name]
            key = (self._part(name), "dense", info.dtype.itemsize * 8, 0)
            rows.setdefault(key, []).append((info.numel, info.nbytes))
        return tuple(
            PartSummary(*key, len(sizes), sum(p for p, _ in sizes), sum(b for _, b in sizes))
            for key, sizes in rows.items()
        )

    def _part(self, name: str) -> str:
        return "drafter" if self.kind == "drafter" else part_of(name)

    def draft_vocab(self) -> torch.Tensor:
        """Token ids int64 [N] of the draft head's rows, ascending. Raises CheckpointError if it has none."""
        if not self.has_draft_head:
            raise CheckpointError(f"{self.directory} has no draft head.", "Run `soloist draft-vocab` to make one.")
        return draft_ids(self.directory, self.tensors)

    def fingerprint(self) -> str:
        """Hex digest over config, headers, sizes and a few pages of every file: equal weights, equal print."""
        return self._fingerprint

    @cached_property
    def _fingerprint(self) -> str:
        digest = hashlib.sha256()
        digest.update(json.dumps(json.loads((self.directory / "config.json").read_text()), sort_keys=True).encode())
        for shard in sorted({info.shard for info in self.tensors.values()}, key=lambda shard: shard.path.name):
            digest.update(f"{shard.path.name} {shard.size} {shard.data_start}".encode())
            digest.update(json.dumps(shard.header, sort_keys=True).encode())
            with shard.path.open("rb") as handle:
                for i in range(16):
                    handle.seek(shard.data_start + (shard.size - shard.data_start) * i // 16)
                    digest.update(handle.read(4096))
        return digest.hexdigest()


def fuse(weights: Sequence[Weight]) -> Weight | tuple[Weight, ...]:
    """Stack the rows of weights [N_i, K] whose forms agree, else return them as a tuple."""
    biases = [weight.bias for weight in weights]
    if any((bias is None) != (biases[0] is None) for bias in biases):
        return tuple(weights)
    bias = None if biases[0] is None else torch.cat([bias for bias in biases if bias is not None])
    dense = [weight for weight in weights if isinstance(weight, DenseWeight)]
    if len(dense) == len(weights) and len({weight.weight.dtype for weight in dense}) == 1:
        return DenseWeight(torch.cat([weight.weight for weight in dense]), bias)
    packed = [weight for weight in weights if isinstance(weight, QuantizedWeight)]
    forms = {(w.bits, w.group, w.zeros is None, w.scales.dtype, w.shape[1]) for w in packed}
    if len(packed) == len(weights) and len(forms) == 1:
        zeros = [weight.zeros for weight in packed if weight.zeros is not None]
        return QuantizedWeight(
            torch.cat([weight.codes for weight in packed]),
            torch.cat([weight.scales for weight in packed]),
            torch.cat(zeros) if zeros else None,
            packed[0].bits,
            packed[0].group,
            (sum(weight.shape[0] for weight in packed), packed[0].shape[1]),
            bias,
        )
    return tuple(weights)


def _canonical_tensors(directory: Path, kind: Kind, stored: Mapping[str, TensorInfo]) -> dict[str, TensorInfo]:
    tensors: dict[str, TensorInfo] = {}
    for name, info in stored.items():
        known = canonical(name) if kind == "target" else name.removeprefix("model.")
        if known is None:
            continue
        if known in tensors:
            raise CheckpointError(
                f"{directory}: {tensors[known].name} and {name} are the same tensor under two prefixes.",
                "Keep one of the two names.",
            )
        tensors[known] = info
    return tensors


def _prefer(tensors: Mapping[str, TensorInfo], beside: Mapping[str, TensorInfo]) -> dict[str, TensorInfo]:
    """Canonical tensors, with every module that `soloist.safetensors` holds taken from there alone."""
    replaced = {name.rpartition(".")[0] for name in beside}
    return {name: info for name, info in tensors.items() if name.rpartition(".")[0] not in replaced} | dict(beside)


def _check_beside(modules: Mapping[str, StoredModule], tensors: Mapping[str, TensorInfo]) -> None:
    """Refuse an embedding that is not the quantised form of the dense one: a few rows of both are compared."""
    stored, original = modules["embed_tokens"], tensors.get("embed_tokens.weight")
    if not stored.beside or original is None:
        return
    ids = torch.arange(0, stored.shape[0], max(1, stored.shape[0] // SAMPLED))
    dense = original.view()[ids].float()
    distance = float((formats.load(stored, copy=False).rows(ids) - dense).norm())
    if not distance <= FARTHEST * float(dense.norm()):
        raise CheckpointError(
            f"{original.shard.path.parent / BESIDE} holds the embedding of another checkpoint.",
            "Remove the file, or run `soloist quantize` again.",
        )


def _visual(stored: Mapping[str, TensorInfo]) -> dict[str, TensorInfo]:
    found: dict[str, TensorInfo] = {}
    for name, info in stored.items():
        prefix = next((p for p in VISION_PREFIXES if name.startswith(p)), None)
        if prefix is not None:
            found[name.removeprefix(prefix)] = info
    return found


def _grouped(tensors: Mapping[str, TensorInfo]) -> dict[str, dict[str, TensorInfo]]:
    groups: dict[str, dict[str, TensorInfo]] = {}
    for name, info in tensors.items():
        module, _, suffix = name.rpartition(".")
        groups.setdefault(module, {})[suffix] = info
    return groups


def _find_modules(
    directory: Path, layout: Layout, tensors: Mapping[str, TensorInfo], quantization: Mapping[str, Any]
) -> dict[str, StoredModule]:
    """Detect every linear of the layout, looking into fused matrices (qkv_proj, gate_up_proj, ...) too."""
    groups = _grouped(tensors)
    modules: dict[str, StoredModule] = {}
    for module, shape in layout.linears.items():
        biased = module in layout.biased
        parent, siblings = fused_parent(module)
        if groups.get(module) or not groups.get(parent):
            if not groups.get(module):
                raise CheckpointError(f"{directory}: {module}.weight is missing.", "Download the checkpoint again.")
            modules[module] = formats.detect(module, shape, groups[module], biased, quantization)
            continue
        heights = [layout.linears[sibling][0] for sibling in siblings]
        start = sum(heights[: siblings.index(module)])
        rows = (start, start + shape[0])
        modules[module] = formats.detect(module, shape, groups[parent], biased, quantization, rows, sum(heights))
    return modules


def open_checkpoint(
    directory: str | Path,
    kind: Kind = "target",
    *,
    need_tokenizer: bool = True,
    need_template: bool = True,
    beside: bool = True,
) -> Checkpoint:
    """Check a model directory from its headers and return it ready to be read.

    `need_tokenizer` and `need_template` apply to targets; commands that never render text pass False.
    `beside=False` leaves `soloist.safetensors` unread: the checkpoint as every other reader sees it.
    Raises CheckpointError (file and remedy) for anything missing, damaged, misshapen or unsupported.
    """
    directory = Path(directory)
    if not directory.is_dir():
        raise CheckpointError(f"{directory} is not a directory.", "Point MODEL at a Hugging Face model directory.")
    config = read_model_config(directory) if kind == "target" else read_drafter_config(directory)
    if kind == "target":
        if need_tokenizer:
            check_tokenizer(directory)
        if need_template and find_template(directory) is None:
            raise CheckpointError(
                f"{directory} has no chat template (chat_template.jinja or tokenizer_config.json).",
                "Copy chat_template.jinja from the original model's repository.",
            )
    stored = read_directory(directory)
    standard = _canonical_tensors(directory, kind, stored)
    tensors = _prefer(standard, read_beside(directory)) if beside else standard
    notes: list[str] = []
    if isinstance(config, ModelConfig):
        layout = target_layout(config)
        layout = _with_mtp(directory, config, layout, tensors, notes)
        if config.tied and any(name.startswith("lm_head.") for name in tensors):
            notes.append("lm_head is stored but the config ties it to embed_tokens; the stored head is not used")
    else:
        layout = drafter_layout(config)
    quantization = config.quantization or {}
    resolve.check(quantization, directory / "config.json")
    modules = _find_modules(directory, layout, tensors, quantization)
    if kind == "target":
        _check_beside(modules, standard)
    found_bits = {name: None if module.dense else module.bits for name, module in modules.items() if not module.beside}
    notes += resolve.disagreements(quantization, found_bits)
    for name, wanted in layout.tensors.items():
        info = tensors.get(name)
        if info is None:
            raise CheckpointError(f"{directory}: {name} is missing.", "Download the checkpoint again.")
        if info.shape != wanted or not info.dtype.is_floating_point:
            raise CheckpointError(
                f"{info.shard.path}: {name} is {list(info.shape)} {str(info.dtype).removeprefix('torch.')}, "
                f"the config implies {list(wanted)} in a float type.",
                "config.json and weights belong to different models; download both again.",
            )
    return Checkpoint(directory, kind, config, tensors, modules, layout, notes, _visual(stored))


def _with_mtp(
    directory: Path, config: ModelConfig, layout: Layout, tensors: Mapping[str, TensorInfo], notes: list[str]
) -> Layout:
    stored = [name for name in tensors if name.startswith("mtp.")]
    if not config.mtp_layers:
        if stored:
            notes.append("mtp.* tensors are stored but mtp_num_hidden_layers is 0; they are not used")
        return layout
    if not stored:
        notes.append("the config announces an MTP module but its tensors are absent: drafting with it is off")
        return layout
    mtp = mtp_layout(config)
    packed = tensors.get(f"{DRAFT_HEAD}.weight_packed") or tensors.get(f"{DRAFT_HEAD}.weight")
    if packed is not None:
        mtp.linears[DRAFT_HEAD] = (packed.shape[0], config.hidden_size)
        check_draft_ids(directory, draft_ids(directory, tensors), packed.shape[0], config.vocab_size)
    return merged((layout, mtp))
