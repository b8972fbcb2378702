"""`soak`: the same mixed requests at the same time, round after round, for as long as asked.

Every round must give the texts of the first, every request must finish, and pages and memory must come back.
One client per round hangs up in the middle of its answer. Any deviation makes the run fail.
"""

from __future__ import annotations

import asyncio
import hashlib
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from soloist.bench.client import Answer
from soloist.bench.document_text import Document, make_document
from soloist.bench.prometheus import Samples
from soloist.bench.promptset import Prompt
from soloist.bench.result import Column, Panel, Result, Series, Table
from soloist.bench.run import GREEDY, Context, Send, together
from soloist.bench.scenarios.smoke import SCHEMA, TOOL

IDLE_S = 60.0
HANG_UP_S = 0.4
MEMORY_SLACK = 64 * 2**20  # bytes; allocators keep some freed memory
MEMORY_GROWTH = 0.03
_THINKING_OFF = {"chat_template_kwargs": {"enable_thinking": False}}
PAGE_GAUGES = ("soloist:pages_used",)
SLOT_GAUGES = ("soloist:slots_used",)
SETTLING_GAUGES = ("soloist:turns_settling",)
MEMORY_GAUGES = ("process_resident_memory_bytes",)

COLUMNS = [
    Column("round", "round", 0),
    Column("requests", "requests", 0),
    Column("same", "same text", 0),
    Column("seconds", "s", 1),
    Column("tokens", "tokens", 0),
    Column("gap", "worst gap ms", 0),
    Column("pages", "pages used", 0),
    Column("cache", "KV in use %", 1),
    Column("memory", "memory MiB", 0),
]


@dataclass
class Round:
    """What one round left behind."""

    number: int
    answers: list[Answer]
    seconds: float
    different: list[str] = field(default_factory=list)
    pages: float | None = None
    cache: float | None = None
    memory: float | None = None


async def run(
    context: Context,
    prompts: Sequence[Prompt],
    *,
    rounds: int | None = None,
    minutes: float | None = None,
    streams: int = 8,
    max_tokens: int = 200,
    features: bool = True,
    document_characters: int = 3000,
    hang_up: bool = True,
) -> Result:
    """Soak until `rounds` are done or `minutes` have passed, at least two rounds."""
    result = Result(
        "soak", settings={"rounds": rounds, "minutes": minutes, "streams": streams, "max_tokens": max_tokens}
    )
    work = _work(context, jobs(prompts, streams, make_document(document_characters, seed=7), features), max_tokens)
    await context.warm()
    first: dict[str, str] = {}
    history: list[Round] = []
    start = time.perf_counter()
    while len(history) < 2 or _more(len(history), time.perf_counter() - start, rounds, minutes):
        history.append(await _round(context, work, len(history) + 1, first, hang_up))
        context.tick(f"round {len(history)}")
        last = history[-1]
        result.failures += [f"round {last.number}: {text}" for text in last.different]
        if len(result.failures) > 20:
            result.notes.append("Stopped early: more than twenty failures.")
            break
    result.failures += leaks(history)
    result.tables = [Table("Soak", COLUMNS, [_row(r) for r in history])]
    result.details["texts"] = {name: hashlib.sha256(text.encode()).hexdigest()[:16] for name, text in first.items()}
    result.panels = _panels(history)
    return result


def _more(done: int, elapsed_s: float, rounds: int | None, minutes: float | None) -> bool:
    if rounds is None and minutes is None:
        return done < 10
    return (rounds is not None and done < rounds) or (minutes is not None and elapsed_s < minutes * 60)


@dataclass(frozen=True)
class Job:
    """One request, the same in every round."""

    name: str
    text: str
    fields: dict[str, Any]


def jobs(prompts: Sequence[Prompt], streams: int, document: Document, features: bool) -> list[Job]:
    """Copies and prose in turn, greedy and seeded; with `features` also thinking, a JSON schema and a tool call."""
    copy = f"Repeat the following text exactly:\n\n{document.text[:1200]}"
    seeded = {"temperature": 0.8}
    schema = {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA, "strict": True}}
    kinds: list[tuple[str, str | None, dict[str, Any]]] = [
        ("copy-greedy", copy, GREEDY),
        ("prose-greedy", None, GREEDY),
        ("copy-seeded", copy, seeded),
        ("prose-seeded", None, seeded),
    ]
    if features:
        kinds += [
            ("json", "Invent a person. Answer in JSON.", {**GREEDY, "response_format": schema, **_THINKING_OFF}),
            ("tool", "What is the weather in Oslo?", {**GREEDY, "tools": [TOOL], "tool_choice": "required"}),
            ("thinking", None, {**seeded, "chat_template_kwargs": {"enable_thinking": True}}),
            ("logprobs", None, {**GREEDY, "logprobs": True, "top_logprobs": 2}),
        ]
    made = []
    for n in range(streams):
        kind, text, fields = kinds[n % len(kinds)]
        own = {"seed": 1000 + n} if fields.get("temperature") else {}
        made.append(Job(f"{n}-{kind}", text or prompts[n % len(prompts)].text, {**fields, **own}))
    return made


def _work(context: Context, chosen: Sequence[Job], max_tokens: int) -> list[tuple[str, Send]]:
    def send(job: Job) -> Send:
        return lambda: context.chat(job.text, max_tokens=max_tokens, **job.fields)

    return [(job.name, send(job)) for job in chosen]


def said(answer: Answer) -> str:
    """Everything an answer said, for comparison: thinking, text, calls, and log-probabilities to the last bit.

    The last bit matters: a state that is slightly wrong after a resume seldom changes a greedy token at once.
    """
    calls = "".join(f"\n{c['name']}{c['arguments']}" for c in answer.tool_calls)
    return answer.reasoning + answer.text + calls + "".join(f"\n{value!r}" for value in answer.logprobs)


async def _round(
    context: Context, work: Sequence[tuple[str, Send]], number: int, first: dict[str, str], hang_up: bool
) -> Round:
    order = list(work)
    random.Random(number).shuffle(order)  # the same requests meet in another order in every round
    sends = [send for _, send in order]
    quitter = asyncio.create_task(_hang_up(context)) if hang_up else None
    batch = await together(sends)
    if quitter:
        await quitter
    this = Round(number, batch.answers, batch.wall_s)
    for (name, _), answer in zip(order, batch.answers, strict=True):
        if answer.error:
            this.different.append(f"{name}: {answer.error}")
        elif answer.finish_reason not in ("stop", "length", "tool_calls"):
            this.different.append(f"{name}: finish_reason {answer.finish_reason!r}")
        elif first.setdefault(name, said(answer)) != said(answer):
            this.different.append(f"{name}: {difference(first[name], said(answer))}")
    samples = await _idle(context, this)
    if samples is not None:
        this.pages = samples.first(*PAGE_GAUGES)
        usage = samples.total("vllm:kv_cache_usage_perc")
        this.cache = None if usage is None else usage * 100
        memory = samples.first(*MEMORY_GAUGES)
        this.memory = None if memory is None else memory / 2**20
    return this


async def _hang_up(context: Context) -> None:
    """Read a few tokens of a long answer, then close the connection."""
    task = asyncio.create_task(context.chat("Tell a very long story.", max_tokens=2000, ignore_eos=True, **GREEDY))
    await asyncio.sleep(HANG_UP_S)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def _idle(context: Context, this: Round) -> Samples | None:
    """Wait until the server has nothing running, then scrape; a server that never gets idle is a failure."""
    deadline = time.perf_counter() + IDLE_S
    while True:
        samples = await context.client.metrics()
        if samples is None:
            return None
        # Finished turns are settled one by one; between two of them no slot is held, yet pages are still missing.
        busy, slots = samples.first("vllm:num_requests_running"), samples.first(*SLOT_GAUGES)
        settling = samples.first(*SETTLING_GAUGES)
        if not busy and not slots and not settling:
            return samples
        if time.perf_counter() > deadline:
            what = f"{busy:.0f} requests run" if busy else f"{slots or 0:.0f} state slots are held"
            if settling and not busy:
                what = f"{settling:.0f} turns wait to be settled"
            this.different.append(f"{what} still {IDLE_S:.0f} s after the last answer")
            return samples
        await asyncio.sleep(0.1)


def difference(expected: str, got: str) -> str:
    """Where two texts part, with a few characters of both."""
    at = next((i for i, (a, b) in enumerate(zip(expected, got, strict=False)) if a != b), min(len(expected), len(got)))
    return f"answer differs at character {at}: {expected[at : at + 24]!r} became {got[at : at + 24]!r}"


def leaks(history: Sequence[Round]) -> list[str]:
    """Pages or memory that later rounds hold and earlier ones did not. The first round fills caches and is left out."""
    if len(history) < 3:
        return []
    later = history[1:]
    found = []
    pages = [r.pages for r in later if r.pages is not None]
    if pages and pages[-1] > max(pages[: max(1, len(pages) // 2)]):
        found.append(f"pages in use grew from {pages[0]:.0f} after round 2 to {pages[-1]:.0f}")
    memory = [r.memory * 2**20 for r in later if r.memory is not None]
    if len(memory) >= 2:
        half = max(1, len(memory) // 2)
        early, late = statistics.median(memory[:half]), statistics.median(memory[half:])
        if late - early > max(MEMORY_SLACK, MEMORY_GROWTH * early):
            found.append(
                f"memory grew from {early / 2**20:.0f} to {late / 2**20:.0f} MiB between the halves of the run"
            )
    return found


def _row(r: Round) -> dict[str, Any]:
    counts = [a.completion_tokens for a in r.answers]
    return {
        "round": r.number,
        "requests": len(r.answers),
        "same": len(r.answers) - len(r.different),
        "seconds": r.seconds,
        "tokens": None if None in counts else sum(c or 0 for c in counts),
        "gap": max((g for a in r.answers for g in a.gaps_ms), default=None),
        "pages": r.pages,
        "cache": r.cache,
        "memory": r.memory,
    }


def _panels(history: Sequence[Round]) -> list[Panel]:
    x = [r.number for r in history]
    panels = [
        Panel("Time per round", "round", "s", "line", [Series("round", x, [r.seconds for r in history])]),
        Panel("Memory", "round", "MiB", "line", [Series("resident", x, [r.memory for r in history])]),
        Panel("Pages", "round", "pages", "line", [Series("held when idle", x, [r.pages for r in history])]),
    ]
    return [p for p in panels if any(v is not None for s in p.series for v in s.y)]
