"""`soloist doctor --self-check`: E1, E2 and E3 with the user's model, knobs and card, through the real engine.

Greedy answers with their log-probabilities are compared bit for bit: drafted with not drafted (E1), in company with
alone (E2), resumed from the prefix cache with cold (E3). The engine is built twice, with the user's knobs and without
drafting.
"""

from __future__ import annotations

import dataclasses
import queue
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from soloist.checks.base import Subject, Verdict, check, fail, ok, verdict, warn
from soloist.errors import SoloistError
from soloist.settings import Settings

TOKENS = 96
TEXTS = (
    "The old lighthouse keeper wrote in his diary every evening. On the first day of spring he noted that",
    "def merge(left, right):\n    result = []\n    while left and right:\n        if left[0] < right[0]:\n            ",
    "Monday: open the gate, read the meter, sign the book.\nTuesday: open the gate, read the meter, sign the book.\n"
    "Wednesday: open the gate, read the meter, sign the book.\nThursday:",
    "Q: What is the capital of Denmark?\nA: Copenhagen.\nQ: And what is the largest lake of Denmark called?\nA:",
)
LEAD = "These notes were found in a drawer of the harbour office and are given here as they stand. " * 8


@dataclass(frozen=True)
class Run:
    """One answer: ids, raw log-probabilities (compared as they are), reused prompt tokens, drafts accepted."""

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    cached: int
    accepted: int


@dataclass(frozen=True)
class Experiment:
    """All answers of one self-check, in the order of TEXTS."""

    alone: list[Run]
    company: list[Run]
    warm: list[Run]
    plain: list[Run]
    drafted: bool


def measure(settings: Settings) -> Experiment:
    """Build, run and compare nothing yet. Raises what building or a request raises."""
    from soloist.engine.build import build_engine, model_directory
    from soloist.engine.selfcheck import forget_checks
    from soloist.server.tokenizer import Tokenizer

    forget_checks()  # what a start measured earlier does not speak for this one
    tokenizer = Tokenizer.load(model_directory(settings.model))
    prompts = [tokenizer.encode(LEAD + text) for text in TEXTS]
    # Nothing of this is to reach the user's session directory, and idle settling would only make it slower.
    quiet = dataclasses.replace(settings, session_dir="none", settle=False)
    engine = build_engine(quiet)
    try:
        alone = [_run(engine, [prompt], f"alone-{n}")[0] for n, prompt in enumerate(prompts)]
        company = _run(engine, prompts, "company")
        warm = [_run(engine, [prompt], f"alone-{n}")[0] for n, prompt in enumerate(prompts)]
    finally:
        engine.close()
    engine = build_engine(dataclasses.replace(quiet, spec="none", lookup=False))
    try:
        plain = [_run(engine, [prompt], f"plain-{n}")[0] for n, prompt in enumerate(prompts)]
    finally:
        engine.close()
    return Experiment(alone, company, warm, plain, any(r.accepted for r in [*alone, *company]))


def _run(engine: Any, prompts: Sequence[list[int]], salt: str) -> list[Run]:
    """Submit prompts together; prompts of one salt share the prefix cache with each other and with nobody else."""
    from soloist.engine.request import Event, Request
    from soloist.sampling.params import SamplingParams

    params = SamplingParams(max_tokens=TOKENS, temperature=0.0, logprobs=0)
    started: list[tuple[Request, queue.SimpleQueue[Event]]] = []
    for n, prompt in enumerate(prompts):
        events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        own = salt if len(prompts) == 1 else f"{salt}-{n}"
        request = Request(list(prompt), params, events.put, eos_ids=engine.eos_ids, cache_salt=own)
        started.append((request, events))
    for request, _ in started:
        engine.submit(request)
    return [_collect(request, events) for request, events in started]


def _collect(request: Any, events: Any) -> Run:
    tokens: list[int] = []
    logprobs: list[float] = []
    while True:
        event = events.get(timeout=600)
        if event.error is not None:
            raise event.error
        tokens += event.tokens
        logprobs += [entry.logprob for entry in event.logprobs or ()]
        if event.finish_reason is not None:
            return Run(tuple(tokens), tuple(logprobs), request.stats.cached_tokens, request.stats.accepted)


def difference(a: Sequence[Run], b: Sequence[Run]) -> str | None:
    """The first place where two lists of runs part, or None when they are bit-identical."""
    for n, (x, y) in enumerate(zip(a, b, strict=True)):
        for at, (left, right) in enumerate(zip(x.tokens, y.tokens, strict=False)):
            if left != right:
                return f"text {n + 1}: token {at} is {left} and {right}"
        if len(x.tokens) != len(y.tokens):
            return f"text {n + 1}: {len(x.tokens)} and {len(y.tokens)} tokens"
        for at, (p, q) in enumerate(zip(x.logprobs, y.logprobs, strict=True)):
            if p != q:
                return f"text {n + 1}: log-probability {at} differs by {abs(p - q):.2g}"
    return None


@check(
    "contracts",
    "E1, E2, E3 (--self-check)",
    "Greedy text and log-probabilities must not depend on speculation (E1), on other requests (E2) or on the prefix "
    "cache (E3). The check takes about two minutes on a card, less with a small model.",
    e1=ok("E1 holds: drafting changed no bit of {count} tokens ({accepted} drafts accepted)"),
    e1_idle=ok("E1: nothing was drafted with these knobs"),
    e1_broken=fail("E1 is broken: {where}.", "Use SPEC=none LOOKUP=0 and report it with `--debug-bundle`."),
    e2=ok("E2 holds: company changed no bit"),
    e2_broken=fail("E2 is broken: {where}.", "Use MAX_SEQS=1 and report it with `--debug-bundle`."),
    e3=ok("E3 holds: resuming {cached} cached tokens changed no bit"),
    e3_idle=warn("E3: nothing was reused from the prefix cache.", "Expected with PREFIX_CACHE=0 only."),
    e3_broken=fail("E3 is broken: {where}.", "Use PREFIX_CACHE=0 and report it with `--debug-bundle`."),
    stopped=fail("The engine could not run the self-check: {message}", "{remedy}"),
)
def contracts(subject: Subject) -> Iterator[Verdict]:
    try:
        got = measure(subject.settings)
    except SoloistError as error:
        yield verdict("stopped", message=str(error), remedy=getattr(error, "remedy", "") or "See the log above.")
        return
    count = sum(len(r.tokens) for r in got.alone)
    where = difference(got.alone, got.plain)
    if where:
        yield verdict("e1_broken", where=where)
    else:
        yield verdict("e1" if got.drafted else "e1_idle", count=count, accepted=sum(r.accepted for r in got.alone))
    where = difference(got.alone, got.company)
    yield verdict("e2_broken", where=where) if where else verdict("e2")
    where, cached = difference(got.alone, got.warm), sum(r.cached for r in got.warm)
    if where:
        yield verdict("e3_broken", where=where)
    else:
        yield verdict("e3" if cached else "e3_idle", cached=cached)


SELF_CHECKS = (contracts,)
