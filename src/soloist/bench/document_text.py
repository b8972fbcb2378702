"""A made-up operations handbook of any length, with shell commands to copy and facts to find.

The text is a function of (lines, seed): sections with a heading, prose, a code fence with commands, and one
fact per section. Nothing in it comes from anywhere, so no model has seen it.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from soloist.bench.client import Client

PLACES = ("harbour", "mill", "orchard", "quarry", "lighthouse", "bakery", "ferry", "library", "workshop", "station")
PARTS = ("pump", "gate", "sensor", "archive", "camera", "boiler", "ledger", "mirror", "queue", "meter")
VERBS = ("check", "drain", "restart", "rotate", "seal", "compare", "label", "export", "restore", "measure")
PEOPLE = ("Anna", "Tom", "Mia", "Sam", "Lily", "Peter", "Clara", "Max", "Emma", "Noah", "Oliver", "Ida")
DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")


@dataclass
class Document:
    """The text, its lines, and what a correct answer must contain."""

    text: str
    commands: list[str] = field(default_factory=list)
    facts: list[tuple[str, str]] = field(default_factory=list)

    @property
    def lines(self) -> list[str]:
        return self.text.split("\n")

    def head(self, count: int) -> str:
        """The first `count` lines, as the copy task must reproduce them."""
        return "\n".join(self.lines[:count])


def make_document(characters: int, seed: int = 0) -> Document:
    """A document of at least `characters` characters; whole sections only, so the last one is never cut."""
    rng = random.Random(f"handbook-{seed}")
    document = Document("")
    parts: list[str] = [f"# Handbook {rng.randrange(1000, 9999)}: care of the {rng.choice(PLACES)} systems", ""]
    number = 0
    size = 0
    while size < characters or number == 0:
        number += 1
        section = _section(rng, number, document)
        parts += section
        size += sum(len(line) + 1 for line in section)
    document.text = "\n".join(parts).rstrip("\n")
    return document


def _section(rng: random.Random, number: int, document: Document) -> list[str]:
    place, part, verb = rng.choice(PLACES), rng.choice(PARTS), rng.choice(VERBS)
    person, day = rng.choice(PEOPLE), rng.choice(DAYS)
    unit = f"{place}-{part}-{rng.randrange(10, 99)}"
    code = f"{rng.randrange(1000, 9999)}"
    commands = [
        f"systemctl --user stop {unit}.service",
        f"{part}ctl {verb} --unit {unit} --level {rng.randrange(1, 9)} --wait {rng.randrange(5, 90)}s",
        f"cp -a /srv/{place}/{part}.conf /srv/{place}/backup/{part}-{rng.randrange(1, 366):03d}.conf",
        f"systemctl --user start {unit}.service",
    ][: rng.randrange(2, 5)]
    document.commands += commands
    document.facts.append((f"the release code of {unit}", code))
    return [
        f"## {number}. How to {verb} the {part} of the {place}",
        "",
        f"{person} looks after {unit}. The work is done on a {day}, when the {place} is quiet, and takes about",
        f"{rng.randrange(6, 55)} minutes. The release code of {unit} is {code}. Before the first step, tell the",
        f"people on duty; afterwards, write the reading of the {part} into the book and sign it.",
        "",
        "```sh",
        *commands,
        "```",
        "",
    ]


def tasks(document: Document, copy_lines: int) -> list[tuple[str, str]]:
    """The six tasks: (name, instruction). The document itself goes before the instruction."""
    question, _ = document.facts[len(document.facts) // 2]
    what = "text" if copy_lines >= len(document.lines) else f"first {copy_lines} lines of the text"
    return [
        ("copy", f"Repeat the {what} above exactly."),
        ("commands", "List every shell command of the document, one per line, exactly as written and in order."),
        ("shorten", "Rewrite the document at a third of its length. Keep every command exactly as it is."),
        ("quote", "Quote the three most important sentences word for word and explain each in two sentences."),
        ("summary", "Summarise the document in ten sentences of your own."),
        ("answer", f"What is {question}? Answer with the code and the sentence it stands in."),
    ]


def copied_prefix(expected: str, answer: str) -> int:
    """Characters of `expected` that the answer reproduces without an error, from its first line on.

    A leading code fence or blank lines that models like to add are not counted as errors.
    """
    body = answer.lstrip("\n")
    if body.startswith("```") and not expected.startswith("```"):
        body = body.split("\n", 1)[-1]
    matched = 0
    for a, b in zip(expected, body, strict=False):
        if a != b:
            break
        matched += 1
    return matched


SUBJECTS = (
    "My brother",
    "The baker",
    "An old sailor",
    "Our teacher",
    "The postman",
    "A tired dog",
    "My aunt",
    "The miller",
)
ACTIONS = (
    "mended the gate with a piece of wire", "counted the shells twice", "told a story about the war",
    "carried wet wood to the stove", "looked for the lost key", "sang a song nobody knew", "drank cold tea",
    "wrote a letter to the king", "painted the boat green",
)  # fmt: skip
ENDS = (
    "before the rain began", "while the children slept", "on the way to the river", "under the apple tree",
    "when the lamps were lit", "in the middle of the market", "because the winter was long",
)  # fmt: skip


def make_prose(characters: int, seed: int = 0) -> str:
    """Plain sentences, one a line, none twice before all have been used: hay for needles."""
    rng = random.Random(f"prose-{seed}")
    sentences = [f"{s} {a} {e}." for s in SUBJECTS for a in ACTIONS for e in ENDS]
    rng.shuffle(sentences)
    lines: list[str] = []
    size = 0
    while size < characters:
        lines.append(sentences[len(lines) % len(sentences)])
        size += len(lines[-1]) + 1
    return "\n".join(lines)


CHARACTERS_PER_TOKEN = 3.6
"""Used where a server has no `/tokenize`; this text is rich in digits and names."""


async def document_of_tokens(client: Client, tokens: int, seed: int = 0) -> Document:
    """A document of about `tokens` tokens by the server's own tokenizer (within one section)."""
    return make_document(int(tokens * await _ratio(client, make_document(4000, seed=-1).text)), seed)


async def prose_of_tokens(client: Client, tokens: int, seed: int = 0) -> str:
    """`make_prose` of about `tokens` tokens (within one sentence)."""
    return make_prose(int(tokens * await _ratio(client, make_prose(4000, seed=-1))), seed)


async def _ratio(client: Client, sample: str) -> float:
    """Characters per token of a text on this server."""
    counted = await client.count_tokens(sample)
    return len(sample) / counted if counted else CHARACTERS_PER_TOKEN
