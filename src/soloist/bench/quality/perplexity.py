"""Perplexity of given texts by kind, through the server's own log-probabilities of a prompt.

Texts are `*.txt` files; the name before the first `-` or `.` is the kind. A server is asked by `/v1/completions` with
`prompt_logprobs` 0, or, where it does not know that, with `echo` and `logprobs`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from soloist.bench.client import Client
from soloist.errors import UserError


@dataclass(frozen=True)
class Text:
    """One text to score."""

    name: str
    kind: str
    text: str


@dataclass(frozen=True)
class Score:
    """Summed negative log-likelihood in nats over `tokens` scored tokens of `size` bytes."""

    nats: float
    tokens: int
    size: int

    @property
    def perplexity(self) -> float:
        return math.exp(self.nats / self.tokens)

    @property
    def bits_per_byte(self) -> float:
        """Comparable between tokenizers, unlike perplexity."""
        return self.nats / math.log(2) / self.size

    def __add__(self, other: Score) -> Score:
        return Score(self.nats + other.nats, self.tokens + other.tokens, self.size + other.size)


def texts(directory: Path | None = None) -> list[Text]:
    """The texts of a directory, or the small ones that ship with the benchmark. Raises UserError when there is none."""
    root = resources.files("soloist.bench") / "prompts" / "perplexity" if directory is None else directory
    if directory is not None and not directory.is_dir():
        raise UserError(f"{directory} is not a directory.", "Give a directory of KIND-NAME.txt files.")
    found = sorted((f for f in root.iterdir() if f.name.endswith(".txt")), key=lambda f: f.name)
    if not found:
        raise UserError(f"{directory} has no .txt file.", "Give a directory of KIND-NAME.txt files.")
    return [Text(f.name, f.name.split(".")[0].split("-")[0], f.read_text(encoding="utf-8")) for f in found]


async def prompt_logprobs(client: Client, text: str | list[int], top: int = 0) -> list[dict[int, float]]:
    """Log-probabilities of every prompt token after the first: per position {token id: value}, its own id first.

    Raises UserError when the server offers `prompt_logprobs` not at all.
    """
    body = {"model": client.model, "prompt": text, "max_tokens": 1, "temperature": 0, "prompt_logprobs": top}
    status, reply = await client.post("/v1/completions", body)
    found = _find_prompt_logprobs(reply) if status == 200 else None
    if found is None:
        raise UserError(
            f"The server does not give prompt_logprobs (status {status}).",
            "Use a server that does, such as Soloist or vLLM.",
        )
    return [{int(k): float(v["logprob"]) for k, v in entry.items()} for entry in found if entry]


def _find_prompt_logprobs(reply: Any) -> list[dict[str, dict[str, Any]] | None] | None:
    choice = reply["choices"][0] if isinstance(reply, dict) and reply.get("choices") else {}
    return choice.get("prompt_logprobs") or (reply.get("prompt_logprobs") if isinstance(reply, dict) else None)


async def score(client: Client, text: str) -> Score:
    """Score one text: every token after the first. Raises UserError when the server reports no log-probabilities."""
    body = {"model": client.model, "prompt": text, "max_tokens": 1, "temperature": 0}
    status, reply = await client.post("/v1/completions", {**body, "prompt_logprobs": 0})
    found = _find_prompt_logprobs(reply) if status == 200 else None
    if found is not None:
        # The prompt's own token is the first entry of each position.
        values = [float(next(iter(entry.values()))["logprob"]) for entry in found if entry]
    else:
        values = await _echoed(client, body)
    return Score(-sum(values), len(values), len(text.encode()))


async def _echoed(client: Client, body: dict[str, Any]) -> list[float]:
    status, reply = await client.post("/v1/completions", {**body, "echo": True, "logprobs": 1})
    logprobs = reply["choices"][0].get("logprobs") if status == 200 and isinstance(reply, dict) else None
    if not logprobs or not logprobs.get("token_logprobs"):
        raise UserError(
            f"The server gives neither prompt_logprobs nor echo with logprobs (status {status}).",
            "Leave perplexity out with --only battery,needle.",
        )
    values = logprobs["token_logprobs"]
    generated = int((reply.get("usage") or {}).get("completion_tokens", 1))
    return [float(v) for v in values[: len(values) - generated] if v is not None]


def windows(text: str, characters: int) -> list[str]:
    """Cut a long text at paragraph or line ends into pieces of at most `characters`, so that each fits the context."""
    pieces: list[str] = []
    while len(text) > characters:
        cut = max(text.rfind("\n", 1, characters), text.rfind(" ", 1, characters))
        cut = cut if cut > 0 else characters
        pieces.append(text[:cut])
        text = text[cut:]
    return [*pieces, text] if text.strip() else pieces


async def by_kind(client: Client, chosen: Sequence[Text], characters: int = 4000) -> dict[str, Score]:
    """Kind -> summed score."""
    totals: dict[str, Score] = {}
    for item in chosen:
        for piece in windows(item.text, characters):
            got = await score(client, piece)
            totals[item.kind] = totals[item.kind] + got if item.kind in totals else got
    return totals
