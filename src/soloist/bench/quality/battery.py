"""Questions with one right answer, in JSON Lines.

Each line: {"id", "kind", "prompt" or "messages", "answer", "match"}. `match` is how the answer is compared:
`number` (GSM8K's way: the last number of the reply; a reference may end in `#### 42`), `exact` (whole reply, outer
white space aside), `contains` (case ignored), `choice` (the first single letter A-J).
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from soloist.bench.client import Answer
from soloist.bench.run import GREEDY, Context, in_cohorts
from soloist.errors import UserError

MATCHES = ("number", "exact", "contains", "choice")
_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")


@dataclass(frozen=True)
class Question:
    """One question. `messages` is what is sent."""

    id: str
    kind: str
    messages: tuple[dict[str, Any], ...]
    answer: str
    match: str


def questions(path: Path | None = None) -> list[Question]:
    """The questions of a file, or the small battery that ships. Raises UserError naming the line at fault."""
    if path is None:
        text = (resources.files("soloist.bench") / "prompts" / "battery.jsonl").read_text(encoding="utf-8")
    elif path.is_file():
        text = path.read_text(encoding="utf-8")
    else:
        raise UserError(f"{path} does not exist.", "Give a JSON Lines file (docs/quality.md).")
    found = []
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            messages = row.get("messages") or [
                {"role": "user", "content": row["prompt"] if "prompt" in row else row["question"]}
            ]
            match = row.get("match", "number")
            if match not in MATCHES:
                raise ValueError(f"match {match!r} is none of {', '.join(MATCHES)}")
            found.append(
                Question(
                    str(row.get("id", number)), str(row.get("kind", "all")), tuple(messages), str(row["answer"]), match
                )
            )
        except (json.JSONDecodeError, KeyError, ValueError, AttributeError) as error:
            raise UserError(f"{path or 'battery.jsonl'}, line {number}: {error}.", "See docs/quality.md.") from None
    if not found:
        raise UserError(f"{path} has no questions.", "Give at least one line.")
    return found


def right(question: Question, reply: str) -> bool:
    """Whether a reply counts as correct."""
    reply, wanted = reply.strip(), question.answer.strip()
    if question.match == "exact":
        return reply == wanted
    if question.match == "contains":
        return wanted.lower() in reply.lower()
    if question.match == "choice":
        found = re.search(r"\b([A-J])\b", reply)
        return found is not None and found[1] == wanted
    return last_number(reply) == last_number(wanted.split("####")[-1])


def last_number(text: str) -> float | None:
    """The last number written in a text, thousands separators dropped."""
    found = _NUMBER.findall(text)
    return float(found[-1].replace(",", "")) if found else None


async def ask(context: Context, chosen: Sequence[Question], max_tokens: int, cohort: int = 4) -> list[Answer]:
    """Greedy answers to all questions, `cohort` at a time."""
    sends = [
        (lambda q=q: context.chat(list(q.messages), max_tokens=max_tokens, **GREEDY)) for q in chosen
    ]  # fmt: skip
    return (await in_cohorts(sends, cohort, context.tick)).answers
