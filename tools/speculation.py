"""Tokens per step of the bundled demo, per drafter, setting and kind of text.

    PYTHONPATH=src:tests python tools/speculation.py --out benchmarks/cpu/speculation.json

The texts are decoded once through the engine, greedy and at T=1 (coupled, fixed seed). They do not depend on how they
were speculated (contracts E1 and E4), so every setting is then replayed against them: its sources propose, the walk
accepts what the text says, the features come from one prefill. Tokens per step are those of the engine; time is not
measured here. Texts are within the 2,048 tokens the demo was trained on, except the summary of 3k tokens, which shows
mechanics and not quality.
"""

from __future__ import annotations

import argparse
import json
import queue
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from drafting.prompts import CHAT, PASSAGE, ask, tokenizer
from soloist import demo
from soloist.bench.document_text import make_prose
from soloist.bench.machine import machine, versions
from soloist.checkpoint.reader import open_checkpoint
from soloist.drafting.proposal import Proposal
from soloist.engine.build import build_engine
from soloist.engine.drafters import build_speculation
from soloist.engine.engine import Engine
from soloist.engine.request import Event, Request
from soloist.engine.speculation import SettledRows, Speculation
from soloist.models.step import prefill_step
from soloist.sampling.params import SamplingParams
from soloist.sampling.verify import Verdict
from soloist.settings import Settings, resolve

BASE = {"model": "demo", "prefix_cache": "0", "settle": "0", "block_rule": "saturated", "max_seqs": "8"}
SETTINGS: dict[str, dict[str, str]] = {
    "lookup": {"spec": "none"},
    "mtp chain of 4": {"spec": "mtp", "lookup": "0", "tree": "0"},
    "mtp tree": {"spec": "mtp", "lookup": "0"},
    "mtp chain + lookup": {"spec": "mtp", "tree": "0"},
    "mtp tree + lookup": {"spec": "mtp"},
    "dflash2 chain of 7": {"spec": "dflash2", "lookup": "0", "tree": "0"},
    "dflash2 tree": {"spec": "dflash2", "lookup": "0"},
    "dflash2 chain of 7 + lookup": {"spec": "dflash2", "tree": "0"},
    "dflash2 chain of 15 + lookup": {"spec": "dflash2", "tree": "0", "dflash_tokens": "15"},
    "dflash2 tree + lookup": {"spec": "dflash2"},
}
NAMES = (
    *("Anna", "Tom", "Mia", "Sam", "Lily", "Peter", "Clara", "Max", "Emma", "Noah"),
    *("Oliver", "Ida", "Paul", "Nina", "Karl", "Eva", "Hugo", "Rosa", "Finn", "Lena"),
)
CITIES = ("Paris", "Rome", "Berlin", "Oslo", "London", "Madrid", "Vienna", "Prague", "Lisbon", "Dublin")
COPIED = 640  # tokens of the listing that are copied
MODES = {"greedy": {"temperature": 0.0}, "T=1": {"temperature": 1.0, "seed": 5}}


@dataclass(frozen=True)
class Task:
    prompts: list[list[int]]
    tokens: int


def listing(rows: int, seed: int) -> str:
    """Lines of name, city, number: text the demo copies without an error."""
    rng = random.Random(seed)
    return "\n".join(f"{rng.choice(NAMES)},{rng.choice(CITIES)},{rng.randrange(1000)}" for _ in range(rows))


def tasks() -> dict[str, Task]:
    """Prompts by kind of text. The 3k-token document is longer than anything the demo was trained on."""
    document = make_prose(11_000, seed=2)
    return {
        "chat": Task([ask(text) for text in CHAT], 96),
        "copying": Task([ask("Repeat the following text exactly:\n\n" + listing(75, seed=3))], COPIED + 1),
        "editing": Task([ask("Repeat the following text, but write guard for keeper:\n\n" + PASSAGE)], 96),
        "quoting": Task([ask("Quote two sentences of the following text:\n\n" + PASSAGE)], 96),
        "summarising 3k tokens": Task([ask("Summarise the following text:\n\n" + document)], 64),
    }


def decode(engine: Engine, prompts: Sequence[list[int]], tokens: int, params: dict[str, Any]) -> list[Request]:
    """All prompts at once; raises what a request raised."""
    box: queue.Queue[Event] = queue.Queue()
    made = SamplingParams(max_tokens=tokens, stop_ids=engine.eos_ids, **params)
    requests = [Request(list(p), made, box.put) for p in prompts]
    for request in requests:
        engine.submit(request)
    left = len(requests)
    while left:
        event = box.get()
        if event.error is not None:
            raise event.error
        left -= event.finish_reason is not None
    return requests


@dataclass
class Text:
    """One decoded text with the features of every token."""

    prompt: list[int]
    output: list[int]
    hidden: torch.Tensor
    taps: torch.Tensor

    @classmethod
    def of(cls, engine: Engine, request: Request, taps: Sequence[int]) -> Text:
        """`engine` must be closed: the prefill borrows its first slot and pages."""
        tokens = request.prompt + request.output
        memory = engine.memory
        memory.state.reset(0)
        step = prefill_step(tokens, 0, 0, list(range(1, 2 + len(tokens) // 64)))
        found = engine.model.forward(step, memory.caches, taps)
        assert found.taps is not None
        return cls(request.prompt, request.output, found.hidden[: len(tokens)], found.taps[: len(tokens)])


@dataclass
class Count:
    """What a setting made of its texts."""

    steps: int = 0
    tokens: int = 0
    drafted: int = 0
    accepted: int = 0
    lookup: int = 0

    def row(self) -> dict[str, float]:
        return {
            "tokens_per_step": round(self.tokens / self.steps, 2),
            "lookup_share": round(self.lookup / self.tokens, 3),
            "drafted_per_step": round(self.drafted / self.steps, 1),
            "accepted_per_step": round(self.accepted / self.steps, 2),
            "tokens": self.tokens,
        }


def walk(proposal: Proposal, following: Sequence[int]) -> Verdict:
    """What greedy or coupled verification accepts when the text goes on with `following`."""
    children = proposal.children()
    verdict, row = Verdict(), 0
    for token in following:
        node = next((c for c in children[row] if proposal.tokens[c] == token), -1)
        verdict.tokens.append(token)
        verdict.rows.append(row)
        verdict.nodes.append(node)
        verdict.sources.append(proposal.sources[node] if node >= 0 else "target")
        if node < 0:
            break
        row = node + 1
    return verdict


def replay(speculation: Speculation, text: Text, params: SamplingParams, rows: int, count: Count) -> None:
    """Decode one text by its proposals; the first token came from the prefill and is not counted."""
    request = Request(list(text.prompt), params, lambda event: None, seed=params.seed or 0)
    request.slot, request.pages = 0, list(range(1, 2 + (len(text.prompt) + len(text.output) + 64) // 64))
    request.mode = "greedy" if params.greedy else "coupled"

    def settle(start: int, following: Sequence[int]) -> None:
        stop = start + len(following)
        taps = text.taps[start:stop] if speculation.taps else None
        speculation.absorb([SettledRows(request, start, text.hidden[start:stop], taps, following)])

    settle(0, [*text.prompt[1:], text.output[0]])
    request.output.append(text.output[0])
    while left := text.output[len(request.output) :]:
        (proposal,) = speculation.propose([request], [min(rows - 1, len(left) - 1)])
        verdict = walk(proposal, left)
        speculation.observe(request, proposal, verdict)
        settle(request.length - 1, verdict.tokens)
        request.output += verdict.tokens
        count.steps += 1
        count.tokens += len(verdict.tokens)
        count.drafted += len(proposal)
        count.accepted += verdict.accepted
        count.lookup += verdict.sources.count("lookup")
    speculation.drop(request)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()

    def settings(knobs: dict[str, str]) -> Settings:
        return resolve({**BASE, "threads": str(args.threads), **knobs}, {}, {})

    engine = build_engine(settings({"spec": "dflash2"}))
    work = tasks()
    done = {
        (mode, kind): decode(engine, task.prompts, task.tokens, params)
        for mode, params in MODES.items()
        for kind, task in work.items()
    }
    taps = engine.speculation.taps
    engine.close()
    texts = {key: [Text.of(engine, request, taps) for request in requests] for key, requests in done.items()}
    copied = tokenizer().decode(done["greedy", "copying"][0].output[:COPIED])
    exact = listing(75, seed=3).startswith(copied.strip())
    print(json.dumps({"copied_tokens": COPIED, "copy_is_exact": exact}), flush=True)

    checkpoint = open_checkpoint(demo.path())
    table: dict[str, dict[str, dict[str, dict[str, float]]]] = {}
    for name, knobs in SETTINGS.items():
        chosen = settings(knobs)
        speculation = build_speculation(chosen, checkpoint, engine.model, engine.memory)
        for (mode, kind), several in texts.items():
            count = Count()
            for text in several:
                replay(speculation, text, SamplingParams(max_tokens=4096, **MODES[mode]), chosen.verify_rows, count)
            row = table.setdefault(mode, {}).setdefault(kind, {})[name] = count.row()
            print(f"{mode:7} {kind:22} {name:30} {row['tokens_per_step']:6.2f} {row['lookup_share']:5.0%}", flush=True)
    result = {
        "what": "tokens per step of the bundled demo by drafter, setting and kind of text",
        "command": "PYTHONPATH=src:tests python tools/speculation.py",
        "machine": machine(),
        "versions": versions(),
        "copied_tokens": COPIED,
        "copy_is_exact": exact,
        "table": table,
    }
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
