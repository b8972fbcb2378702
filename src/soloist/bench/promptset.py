"""The prompts that ship with the benchmark, read from the files beside this one.

`prompts/chat.json` is a list of `{"id", "kind", "text"}`; a file of the same form can be given with --prompts.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from soloist.errors import UserError


@dataclass(frozen=True)
class Prompt:
    """One user message. `kind` groups results (english, danish, code, ...)."""

    id: str
    kind: str
    text: str


def chat_prompts(path: Path | None = None) -> list[Prompt]:
    """The eight chat prompts of our own, or those of `path`. Raises UserError for a file of another form."""
    if path is None:
        text = (resources.files("soloist.bench") / "prompts" / "chat.json").read_text(encoding="utf-8")
    else:
        try:
            text = path.read_text(encoding="utf-8")
        except OSError as error:
            raise UserError(f"{path} cannot be read ({error.strerror}).", "Give a JSON file of prompts.") from None
    try:
        prompts = [Prompt(str(p["id"]), str(p["kind"]), str(p["text"])) for p in json.loads(text)]
    except (json.JSONDecodeError, KeyError, TypeError) as error:
        raise UserError(
            f"{path} is not a list of objects with id, kind and text ({error}).", "See docs/benchmarks.md for the form."
        ) from None
    if not prompts:
        raise UserError(f"{path} holds no prompts.", "Give at least one.")
    return prompts
