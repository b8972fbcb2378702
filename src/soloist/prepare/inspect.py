"""`soloist inspect`: what a directory holds, from its headers, and what the fast path still lacks."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from soloist.checkpoint.reader import Checkpoint, PartSummary, open_checkpoint
from soloist.prepare.recipe import OUTPUTS


@dataclass(frozen=True)
class Missing:
    """Something the fast path would use, and why."""

    what: str
    why: str


@dataclass(frozen=True)
class Inspection:
    """Everything `soloist inspect` prints."""

    directory: str
    kind: Literal["target", "drafter"]
    shape: Mapping[str, str]
    parameters: int
    nbytes: int
    parts: tuple[PartSummary, ...]
    notes: tuple[str, ...]
    missing: tuple[Missing, ...]
    commands: tuple[str, ...]

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def kind_of(directory: Path) -> Literal["target", "drafter"]:
    """Target or drafter, by config.json alone; the directory's name never matters."""
    try:
        config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return "target"  # open_checkpoint says what is wrong with it
    return "drafter" if isinstance(config, dict) and "dflash_config" in config else "target"


def inspect(directory: Path) -> Inspection:
    """Look at a model directory without reading weights. Raises CheckpointError as serving it would."""
    kind = kind_of(directory)
    checkpoint = open_checkpoint(directory, kind, need_template=False)
    summary = tuple(checkpoint.summary())
    notes = list(checkpoint.notes)
    if kind == "target" and not checkpoint.has_template:
        notes.append("no chat template: serving it needs chat_template.jinja")
    shape = _target_shape(checkpoint) if kind == "target" else _drafter_shape(checkpoint)
    return Inspection(
        str(directory),
        kind,
        shape,
        sum(row.parameters for row in summary),
        sum(row.nbytes for row in summary),
        summary,
        tuple(notes),
        *_missing(checkpoint),
    )


def _target_shape(checkpoint: Checkpoint) -> dict[str, str]:
    c = checkpoint.config
    full, linear = len(c.attention_layers), len(c.linear_layers)
    return {
        "architecture": "Qwen3.5 family, dense",
        "layers": f"{c.num_layers}: {linear} Gated DeltaNet, {full} full attention",
        "hidden": f"{c.hidden_size}, MLP {c.intermediate_size}",
        "attention": f"{c.num_heads} heads x {c.head_dim}, {c.num_kv_heads} KV heads, rotary over {c.rope_dim}",
        "DeltaNet": f"{c.linear_key_heads} key heads x {c.linear_key_dim}, {c.linear_value_heads} value heads x "
        f"{c.linear_value_dim}",
        "vocabulary": f"{c.vocab_size}, embedding {'tied to the head' if c.tied else 'and head apart'}",
        "context": str(c.max_position),
        "MTP module": "yes" if checkpoint.has_mtp else "no",
        "draft vocabulary": str(checkpoint.modules["mtp.draft_lm_head"].shape[0])
        if checkpoint.has_draft_head
        else "no",
        "vision tower": "in the files, not loaded" if c.vision else "no",
    }


def _drafter_shape(checkpoint: Checkpoint) -> dict[str, str]:
    c = checkpoint.drafter_config
    return {
        "architecture": "DFlash2 block drafter",
        "layers": f"{c.num_layers}, hidden {c.hidden_size}, MLP {c.intermediate_size}",
        "attention": f"{c.num_heads} heads x {c.head_dim}, {c.num_kv_heads} KV heads, window {c.window}",
        "block": f"{c.block_size} rows, taps after layers {', '.join(map(str, c.tap_layers))}",
        "selector": f"rank {c.selector_rank} over the top {c.selector_top_k}",
        "vocabulary": str(c.vocab_size),
    }


def _missing(checkpoint: Checkpoint) -> tuple[tuple[Missing, ...], tuple[str, ...]]:
    """What the fast path lacks, and the commands that make it, in order."""
    found: list[Missing] = []
    parts: list[str] = []

    def want(module: str, part: str, form: str, what: str, why: str) -> None:
        stored = checkpoint.modules.get(module)
        if stored is not None and stored.dense:
            found.append(Missing(what, why))
            parts.append(f"{part}={form}")

    if checkpoint.kind == "drafter":
        want("layers.0.mlp.up_proj", "drafter", "int4:gptq", "a 4-bit drafter", "it is read once per step")
    else:
        want("layers.0.mlp.up_proj", "body", "int4:gptq", "a 4-bit body", "every step reads all of it")
        head = "embed_tokens" if checkpoint.config.tied else "lm_head"
        want(head, "lm_head", "int4:gptq", "a 4-bit head", "every verify row and every draft reads it")
        want("embed_tokens", "embed", "int8", "an 8-bit embedding", "memory only: its rows are gathered")
        want("mtp.fc", "mtp", "int4:gptq", "a 4-bit MTP module", "it runs once per drafted token")
    vocabulary = checkpoint.kind == "target" and checkpoint.has_mtp and not checkpoint.has_draft_head
    if vocabulary:
        found.append(Missing("a draft vocabulary", "drafts read a head cut to it"))
    return tuple(found), _commands(checkpoint, parts, vocabulary)


def _commands(checkpoint: Checkpoint, parts: Sequence[str], vocabulary: bool) -> tuple[str, ...]:
    """Commands to be run as they stand; only the target of a drafter that lies alone has to be filled in."""
    here = checkpoint.directory.resolve()
    captured, result = (str(here.with_name(here.name + ending)) for ending in ("-capture", "-fast"))
    gptq = [part for part in parts if "gptq" in part]
    commands: list[list[str]] = []
    if gptq or vocabulary:
        model = [str(here)]
        if checkpoint.kind == "drafter":
            inside = (here.parent / "config.json").exists() and kind_of(here.parent) == "target"
            model = [str(here.parent) if inside else "TARGET", "--drafter", str(here)]
        wanted = [part for part in ("lm_head", "mtp", "drafter") if any(f"{part}=" in text for text in gptq)]
        wanted = wanted or ["lm_head"]
        commands.append(["capture", *model, *_flags("--part", wanted), "--out", captured])
    if parts:
        calibration = ["--capture", captured] if any("body" not in part for part in gptq) else []
        if any("body" in part for part in gptq):
            calibration += ["--text", f"{captured}/{OUTPUTS}"]
        commands.append(["quantize", str(here), *_flags("--part", parts), *calibration, "--out", result])
    if vocabulary:
        commands.append(["draft-vocab", result if parts else str(here), "--capture", captured])
    return tuple(shlex.join(["soloist", *command]) for command in commands)


def _flags(name: str, values: Sequence[str]) -> list[str]:
    return [word for value in values for word in (name, value)]


def plan_text(inspection: Inspection) -> list[str]:
    """The inspection as lines of text: shape, table of parts, notes, what is missing."""
    lines = [f"{name:18} {value}" for name, value in inspection.shape.items()]
    lines += ["", f"{'part':12} {'form':16} {'bits':>4} {'group':>6} {'tensors':>8} {'parameters':>15} {'MiB':>10}"]
    for row in inspection.parts:
        group = row.group or "-"
        lines.append(
            f"{row.part:12} {row.form:16} {row.bits:4} {group:>6} {row.modules:8} {row.parameters:15,} "
            f"{row.nbytes / 2**20:10.1f}"
        )
    lines.append(
        f"{'all':12} {'':16} {'':4} {'':6} {sum(row.modules for row in inspection.parts):8} "
        f"{inspection.parameters:15,} {inspection.nbytes / 2**20:10.1f}"
    )
    lines += ["", *(f"note: {note}" for note in inspection.notes)] if inspection.notes else []
    if inspection.missing:
        lines += ["", "What the fast path would add:"]
        lines += [f"  {missing.what}: {missing.why}" for missing in inspection.missing]
        lines += ["Made by:", *(f"  {command}" for command in inspection.commands)]
    return lines
