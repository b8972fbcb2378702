"""`single`: eight chat prompts in cohorts of 1, 2, 4 and 8, with the server's default sampling and greedily."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from soloist.bench.client import Answer
from soloist.bench.measure import (
    Speculation,
    Spread,
    decode_rate,
    end_to_end_rate,
    mean,
    percentile,
    speculation_between,
    speculation_of,
)
from soloist.bench.promptset import Prompt
from soloist.bench.result import Column, Panel, Result, Series, Table, series_of
from soloist.bench.run import GREEDY, Batch, Context, Send, in_cohorts

COHORTS = (1, 2, 4, 8)
MODES: dict[str, dict[str, Any]] = {"default": {}, "greedy": dict(GREEDY)}

COLUMNS = [
    Column("mode", "sampling"),
    Column("cohort", "C", 0),
    Column("decode", "decode tok/s", 1),
    Column("end_to_end", "end-to-end tok/s", 1),
    Column("tokens_per_step", "tokens/step", 2),
    Column("tpot", "TPOT ms", 2),
    Column("ttft", "TTFT ms", 0),
    Column("gap", "p99 gap ms", 0),
    Column("tokens", "tokens", 0),
    Column("per_position", "acceptance per position", 2),
]


def steps(prompts: int, repeats: int, cohorts: Sequence[int], modes: Sequence[str]) -> int:
    """How many requests the scenario sends, for the progress bar."""
    return prompts * repeats * len(cohorts) * len(modes)


async def run(
    context: Context,
    prompts: Sequence[Prompt],
    *,
    max_tokens: int = 1024,
    cohorts: Sequence[int] = COHORTS,
    modes: Sequence[str] = tuple(MODES),
) -> Result:
    """Measure. Rows are (sampling, cohort size); figures are means over repeats with their range."""
    result = Result("single", settings={"max_tokens": max_tokens, "cohorts": list(cohorts), "repeats": context.repeats})
    table = Table("Chat, eight prompts", COLUMNS)
    per_kind = Table("By kind of prompt, C1", [Column("mode", "sampling"), Column("kind", "kind"), *_KIND_COLUMNS])
    await context.warm()
    for mode in modes:
        for cohort in cohorts:
            batches: list[tuple[Batch, Speculation | None]] = []
            for _ in range(context.repeats):
                before = await context.client.metrics()
                batch = await in_cohorts(_sends(context, prompts, max_tokens, mode), cohort, context.tick)
                after = await context.client.metrics()
                batches.append((batch, speculation_of(batch.answers) or speculation_between(before, after)))
                result.failures += [f"{mode} C{cohort}: {e}" for e in batch.errors]
            table.rows.append(_row(mode, cohort, batches))
            if cohort == 1:
                per_kind.rows += _kind_rows(mode, prompts, [b.answers for b, _ in batches])
    result.tables = [table, per_kind] if per_kind.rows else [table]
    result.panels = _panels(table, modes)
    return result


def _sends(context: Context, prompts: Sequence[Prompt], max_tokens: int, mode: str) -> list[Send]:
    def send(prompt: Prompt) -> Send:
        return lambda: context.chat(prompt.text, max_tokens=max_tokens, **MODES[mode])

    return [send(p) for p in prompts]


def _row(mode: str, cohort: int, batches: Sequence[tuple[Batch, Speculation | None]]) -> dict[str, Any]:
    answers = [b.answers for b, _ in batches]
    last = batches[-1][1]
    return {
        "mode": mode,
        "cohort": cohort,
        "decode": Spread.of(decode_rate(cohort, a) for a in answers),
        "end_to_end": Spread.of(end_to_end_rate(b.answers, b.wall_s) for b, _ in batches),
        "tokens_per_step": Spread.of(s.tokens_per_step if s else None for _, s in batches),
        "tpot": Spread.of(mean(x.tpot_ms for x in a) for a in answers),
        "ttft": Spread.of(mean(x.ttft_ms for x in a) for a in answers),
        "gap": Spread.of(percentile([g for x in a for g in x.gaps_ms], 0.99) for a in answers),
        "tokens": Spread.of(_total(a) for a in answers),
        "per_position": list(last.per_position) if last and last.per_position else None,
    }


def _total(answers: Sequence[Answer]) -> int | None:
    counts = [a.completion_tokens for a in answers]
    return None if None in counts else sum(c or 0 for c in counts)


_KIND_COLUMNS = [
    Column("decode", "decode tok/s", 1),
    Column("tokens_per_step", "tokens/step", 2),
    Column("ttft", "TTFT ms", 0),
    Column("prompt_tokens", "prompt tokens", 0),
    Column("tokens", "answer tokens", 0),
]


def _kind_rows(mode: str, prompts: Sequence[Prompt], runs: Sequence[Sequence[Answer]]) -> list[dict[str, Any]]:
    rows = []
    for kind in dict.fromkeys(p.kind for p in prompts):
        picked = [[a for a, p in zip(run, prompts, strict=True) if p.kind == kind] for run in runs]
        specs = [speculation_of(a) for a in picked]
        rows.append(
            {
                "mode": mode,
                "kind": kind,
                "decode": Spread.of(decode_rate(1, a) for a in picked),
                "tokens_per_step": Spread.of(s.tokens_per_step if s else None for s in specs),
                "ttft": Spread.of(mean(x.ttft_ms for x in a) for a in picked),
                "prompt_tokens": Spread.of(mean(x.prompt_tokens for x in a) for a in picked[:1]),
                "tokens": Spread.of(mean(x.completion_tokens for x in a) for a in picked),
            }
        )
    return rows


def _panels(table: Table, modes: Sequence[str]) -> list[Panel]:
    def rows(mode: str) -> list[dict[str, Any]]:
        return [r for r in table.rows if r["mode"] == mode]

    def lines(title: str, unit: str, key: str) -> Panel:
        series = [series_of(m, [r["cohort"] for r in rows(m)], [r[key] for r in rows(m)]) for m in modes]
        return Panel(title, "requests at a time", unit, "line", series)

    acceptance = []
    for mode in modes:
        shares = next((r["per_position"] for r in rows(mode) if r["per_position"]), None)
        if shares:
            acceptance.append(Series(mode, list(range(1, len(shares) + 1)), list(shares)))
    panels = [
        lines("Decode rate", "tok/s, all streams", "decode"),
        lines("Time to first token", "ms", "ttft"),
        lines("Tokens per step", "tokens", "tokens_per_step"),
    ]
    if acceptance:
        panels.append(Panel("Acceptance per position", "draft position", "share of steps", "bar", acceptance))
    return [p for p in panels if any(v is not None for s in p.series for v in s.y)]
