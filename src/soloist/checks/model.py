"""The model directory and the drafter: complete, readable, prepared for the fast path, matching each other."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from soloist.checkpoint.config import DrafterConfig, ModelConfig, read_drafter_config, read_model_config
from soloist.checks.base import Subject, Verdict, check, fail, ok, verdict, warn
from soloist.checks.card import cards, number
from soloist.errors import CheckpointError

WORTHWHILE = 0.02  # of the checkpoint's bytes: smaller parts are not worth quantising


@check(
    "model",
    "Model directory",
    "Everything that can be wrong with a checkpoint is found from its headers, before weights are read: a missing "
    "tokenizer, template, shard or tensor, a truncated file, a shape or an architecture that does not fit.",
    fine=ok("{name}: {parameters:.1f} M parameters, {size}, {form}"),
    broken=fail("{message}", "{remedy}"),
    note=warn("{message}", "Nothing, if this is meant; otherwise download the checkpoint again."),
)
def model(subject: Subject) -> Iterator[Verdict]:
    from soloist.checkpoint.reader import open_checkpoint

    directory = subject.model_directory
    try:
        opened = open_checkpoint(directory)
    except CheckpointError as error:
        yield verdict("broken", message=error.message, remedy=error.remedy or "See docs/checkpoints.md.")
        return
    rows = opened.summary()
    forms = sorted({r.form for r in rows})
    yield verdict(
        "fine",
        name=subject.settings.model,
        parameters=sum(r.parameters for r in rows) / 1e6,
        size=size_text(sum(r.nbytes for r in rows)),
        form=" and ".join(forms),
    )
    for note in opened.notes:
        yield verdict("note", message=note)


def size_text(count: float) -> str:
    """Bytes as MiB or GiB."""
    return f"{count / 2**30:.2f} GiB" if count >= 2**30 else f"{count / 2**20:.1f} MiB"


@check(
    "fast-path",
    "Prepared for the fast path",
    "On a card a step is the time to read the weights, so the head, the embeddings and the MTP module should be small "
    "too, and drafting should use a short vocabulary. This check matters on a card only.",
    fine=ok("body, head, embeddings and MTP are quantised, a draft vocabulary is there"),
    cpu=ok("on a CPU any form will do"),
    part=warn("{part} is stored in 16 bits ({size}); every step reads it.", "Run `{command}`."),
    draft_vocab=warn(
        "MTP drafts over the whole vocabulary of {vocab} tokens.",
        "Run `soloist draft-vocab {model}` to count a short one.",
    ),
    unread=ok("not looked at: the model directory cannot be opened"),
)
def fast_path(subject: Subject) -> Iterator[Verdict]:
    from soloist.checkpoint.reader import open_checkpoint

    if not cards(subject):
        yield verdict("cpu")
        return
    try:
        opened = open_checkpoint(subject.model_directory)
    except CheckpointError:
        yield verdict("unread")
        return
    found = []
    rows = opened.summary()
    total = sum(r.nbytes for r in rows)
    for row in rows:
        part = {"embed": "embed", "lm_head": "lm_head", "mtp": "mtp", "mlp": "body"}.get(row.part)
        if row.bits >= 16 and part and row.nbytes > WORTHWHILE * total:
            command = f"soloist quantize {subject.settings.model} --part {part}=int{8 if part == 'embed' else 4}"
            found.append(verdict("part", part=part, size=size_text(row.nbytes), command=command))
    if opened.has_mtp and not opened.has_draft_head and opened.config.vocab_size > 65536:
        found.append(verdict("draft_vocab", vocab=opened.config.vocab_size, model=subject.settings.model))
    yield from found or [verdict("fine")]


@check(
    "drafter",
    "Drafter",
    "A DFlash2 drafter belongs to one target: hidden size and vocabulary are equal, the layers it taps exist.",
    fine=ok("{name}: block {block}, taps layers {taps}"),
    none=ok("SPEC={spec}: no drafter directory is needed"),
    mtp=ok("the model's own MTP module drafts"),
    no_mtp=fail("SPEC=mtp, but the model has no MTP module.", "Use SPEC=none, or SPEC=dflash2 with DRAFTER."),
    missing=fail("SPEC=dflash2 needs a drafter directory; {directory} is none.", "Give DRAFTER, or use SPEC=mtp."),
    broken=fail("{message}", "{remedy}"),
    mismatch=fail(
        "The drafter at {directory} belongs to another model: {what}.", "Give the DRAFTER made for this model."
    ),
    unread=ok("not looked at: the model directory cannot be opened"),
)
def drafter(subject: Subject) -> Iterator[Verdict]:
    try:
        target = read_model_config(subject.model_directory)
    except CheckpointError:
        yield verdict("unread")
        return
    spec = subject.settings.spec
    directory = _drafter_directory(subject)
    if spec == "none":
        yield verdict("none", spec=spec)
    elif spec == "mtp" or (
        spec == "auto" and subject.settings.drafter == "auto" and (target.mtp_layers or not directory)
    ):
        yield verdict("mtp" if target.mtp_layers else "no_mtp" if spec == "mtp" else "none", spec=spec)
    elif directory is None or not directory.is_dir():
        yield verdict("missing", directory=directory or subject.model_directory / "dflash2")
    else:
        yield from _judge_drafter(directory, target)


def _drafter_directory(subject: Subject) -> Path | None:
    given = subject.settings.drafter
    if given != "auto":
        return Path(given).expanduser()
    inside = subject.model_directory / "dflash2"
    return inside if (inside / "config.json").is_file() else None


def _judge_drafter(directory: Path, target: ModelConfig) -> Iterator[Verdict]:
    from soloist.checkpoint.reader import open_checkpoint

    try:
        config = read_drafter_config(directory)
        what = _mismatch(config, target)
        if what:
            yield verdict("mismatch", directory=directory, what=what)
            return
        open_checkpoint(directory, "drafter")
    except CheckpointError as error:
        yield verdict("broken", message=error.message, remedy=error.remedy or "Download the drafter again.")
        return
    taps = " ".join(map(str, config.tap_layers))
    yield verdict("fine", name=directory.name, block=config.block_size, taps=taps)


def _mismatch(drafter: DrafterConfig, target: ModelConfig) -> str | None:
    if drafter.hidden_size != target.hidden_size:
        return f"hidden size {drafter.hidden_size}, the model has {target.hidden_size}"
    if drafter.vocab_size != target.vocab_size:
        return f"vocabulary {drafter.vocab_size}, the model has {target.vocab_size}"
    if max(drafter.tap_layers) >= target.num_layers:
        return f"taps layer {max(drafter.tap_layers)}, the model has {target.num_layers}"
    if drafter.mask_token_id >= target.vocab_size:
        return f"mask token {drafter.mask_token_id} is outside the vocabulary"
    return None


@check(
    "memory",
    "Memory for the weights",
    "Weights must fit the card, or on a CPU the host's free memory, with room for context beside them.",
    fine=ok("weights {need}, free {free}"),
    tight=warn("weights {need} of {free} free; little is left for context.", "`soloist plan {model}` shows what fits."),
    short=fail(
        "The weights need {need}, but only {free} is free.", "Use a smaller or a 4-bit checkpoint, or free memory."
    ),
    unknown=ok("not looked at"),
)
def memory(subject: Subject) -> Iterator[Verdict]:
    need = sum(f.stat().st_size for f in subject.model_directory.glob("*.safetensors"))
    free = _free_bytes(subject)
    if not need or free is None:
        yield verdict("unknown")
        return
    outcome = "short" if need > free else "tight" if need > 0.8 * free else "fine"
    yield verdict(outcome, need=size_text(need), free=size_text(free), model=subject.settings.model)


def _free_bytes(subject: Subject) -> float | None:
    found = cards(subject)
    if found and subject.settings.device != "cpu":
        return (number(found[0]["memory.free"]) or 0.0) * 2**20
    try:
        return float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES"))
    except (ValueError, OSError):
        return None
