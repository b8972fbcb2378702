"""Files beside the weights: tokenizer, chat template, and the id list of a truncated draft head."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import torch

from soloist.checkpoint.shards import TensorInfo
from soloist.errors import CheckpointError


def find_template(directory: Path) -> str | None:
    """The chat template's text: `chat_template.jinja`, else the key of tokenizer_config.json, else None."""
    file = directory / "chat_template.jinja"
    if file.exists():
        return file.read_text(encoding="utf-8")
    settings = directory / "tokenizer_config.json"
    if not settings.exists():
        return None
    try:
        template = json.loads(settings.read_text(encoding="utf-8")).get("chat_template")
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise CheckpointError(f"{settings} is not valid JSON ({error}).", "Download the file again.") from None
    if isinstance(template, list):  # named templates, an older transformers form
        named = {entry.get("name"): entry.get("template") for entry in template}
        template = named.get("default")
    return template


def check_tokenizer(directory: Path) -> None:
    """Refuse a directory without a usable tokenizer.json: other loaders go on with an empty vocabulary."""
    path = directory / "tokenizer.json"
    if not path.exists():
        raise CheckpointError(f"{directory} has no tokenizer.json.", "Copy it from the original model's repository.")
    try:
        model = json.loads(path.read_text(encoding="utf-8"))["model"]
        vocabulary = model["vocab"]
    except (UnicodeDecodeError, json.JSONDecodeError, KeyError, TypeError):
        raise CheckpointError(f"{path} is not a tokenizer file.", "Download the file again.") from None
    if not vocabulary:
        raise CheckpointError(f"{path} has an empty vocabulary.", "Download the file again.")


def draft_ids(directory: Path, tensors: Mapping[str, TensorInfo]) -> torch.Tensor:
    """The id list of a draft head: a tensor, a JSON array, or a tensor saved by torch (read without running it)."""
    if "mtp.draft_vocab_ids" in tensors:
        return tensors["mtp.draft_vocab_ids"].view().clone().long()
    listed = directory / "draft_vocab_ids.json"
    if listed.exists():
        try:
            return torch.tensor(json.loads(listed.read_text(encoding="utf-8")), dtype=torch.int64)
        except (ValueError, TypeError):
            raise CheckpointError(f"{listed} is not a JSON array of token ids.", "Write it again.") from None
    saved = directory / "mtp_draft_vocab_ids.pt"
    if saved.exists():
        return torch.as_tensor(torch.load(saved, weights_only=True)).long()
    raise CheckpointError(
        f"{directory} has a draft head but no id list (draft_vocab_ids.json).", "Run `soloist draft-vocab` again."
    )


def check_draft_ids(directory: Path, ids: torch.Tensor, rows: int, vocab: int) -> None:
    """Refuse a list that does not name each of the head's rows once, in order."""
    good = ids.ndim == 1 and len(ids) == rows and bool((ids[1:] > ids[:-1]).all())
    if not good or not len(ids) or int(ids[0]) < 0 or int(ids[-1]) >= vocab:
        raise CheckpointError(
            f"{directory}: the draft vocabulary must be {rows} ascending token ids below {vocab}.",
            "Run `soloist draft-vocab` again.",
        )
