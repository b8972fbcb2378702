"""Needle in a haystack: one fact at a depth of a long document, asked for at the end.

The file is JSON: {"needles": [{"needle", "question", "answer", "opening"}], "haystack": optional path of a text}.
`opening` is how the reply begins; when given it is put into the assistant's turn (`continue_final_message`), which lets
a model that is too small to follow instructions show whether it still reaches the fact. Without a haystack,
generated sentences are used.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from soloist.bench.client import Answer
from soloist.bench.document_text import prose_of_tokens
from soloist.bench.run import GREEDY, Context
from soloist.errors import UserError


@dataclass(frozen=True)
class Needle:
    """A fact and how it is asked for."""

    needle: str
    question: str
    answer: str
    opening: str = ""


@dataclass(frozen=True)
class Find:
    """One placement and whether the fact came back."""

    tokens: int
    depth: float
    prompt_tokens: int | None
    found: bool
    reply: str
    error: str | None = None


def needles(path: Path | None = None) -> tuple[list[Needle], str | None]:
    """(needles, haystack text or None) of a file, or the ones that ship. Raises UserError for another form."""
    if path is None:
        text, base = (resources.files("soloist.bench") / "prompts" / "needle.json").read_text(encoding="utf-8"), None
    elif path.is_file():
        text, base = path.read_text(encoding="utf-8"), path.parent
    else:
        raise UserError(f"{path} does not exist.", "Give a needle file (docs/quality.md).")
    try:
        data: dict[str, Any] = json.loads(text)
        found = [Needle(n["needle"], n["question"], str(n["answer"]), n.get("opening", "")) for n in data["needles"]]
        hay = (base / data["haystack"]).read_text(encoding="utf-8") if base and data.get("haystack") else None
    except (json.JSONDecodeError, KeyError, TypeError, OSError) as error:
        raise UserError(f"{path} is not a needle file ({error}).", "See docs/quality.md.") from None
    return found, hay


def place(hay: str, needle: str, depth: float) -> str:
    """The haystack with the needle as a line of its own at `depth` (0 = top, 1 = end), at the nearest line end."""
    lines = hay.split("\n")
    at = round(depth * len(lines))
    return "\n".join([*lines[:at], needle, *lines[at:]])


async def find(context: Context, needle: Needle, hay: str | None, tokens: int, depth: float, max_tokens: int) -> Find:
    """Ask once, greedily."""
    text = await prose_of_tokens(context.client, tokens, seed=tokens) if hay is None else hay[: tokens * 4]
    messages = [{"role": "user", "content": f"{place(text, needle.needle, depth)}\n\n{needle.question}"}]
    fields: dict[str, Any] = dict(GREEDY)
    if needle.opening:
        messages.append({"role": "assistant", "content": needle.opening})
        fields |= {"continue_final_message": True, "add_generation_prompt": False}
    answer: Answer = await context.chat(messages, max_tokens=max_tokens, **fields)
    context.tick(f"needle at {depth:.0%} of {tokens}")
    found = needle.answer.lower() in answer.text.lower()
    return Find(tokens, depth, answer.prompt_tokens, found, answer.text[:80], answer.error)
