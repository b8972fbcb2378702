"""`prefill`: prompt tokens per second over lengths and concurrency, nothing cached, one token answered."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from soloist.bench.document_text import document_of_tokens
from soloist.bench.measure import Spread, mean
from soloist.bench.result import Column, Panel, Result, Series, Table, series_of
from soloist.bench.run import GREEDY, Batch, Context, Send, salt, salted, together

COLUMNS = [
    Column("length", "asked tokens", 0),
    Column("streams", "C", 0),
    Column("prompt_tokens", "prompt tokens", 0),
    Column("cached", "of them cached", 0),
    Column("ttft", "TTFT ms", 0),
    Column("rate", "prompt tok/s", 0),
]


async def run(
    context: Context, *, lengths: Sequence[int] = (512, 2048, 8192), cohorts: Sequence[int] = (1, 4)
) -> Result:
    """Measure. The rate counts uncached prompt tokens of the cohort over the time until its last first token."""
    result = Result("prefill", settings={"lengths": list(lengths), "cohorts": list(cohorts)})
    table = Table("Prefill", COLUMNS)
    await context.warm()
    for length in lengths:
        documents = [(await document_of_tokens(context.client, length, seed)).text for seed in range(max(cohorts))]
        for streams in cohorts:
            batches = []
            for _ in range(context.repeats):
                sends = [_send(context, documents[n]) for n in range(streams)]
                batches.append(await together(sends, context.tick))
                result.failures += [f"{length} tokens x {streams}: {e}" for e in batches[-1].errors]
            table.rows.append(_row(length, streams, batches))
    result.tables = [table]
    result.panels = [
        Panel("Prefill rate", "prompt tokens", "tok/s", "line", [_series(table, c, "rate") for c in cohorts]),
        Panel("Time to first token", "prompt tokens", "ms", "line", [_series(table, c, "ttft") for c in cohorts]),
    ]
    return result


def _series(table: Table, streams: int, key: str) -> Series:
    rows = [r for r in table.rows if r["streams"] == streams]
    return series_of(f"C{streams}", [r["length"] for r in rows], [r[key] for r in rows])


def _send(context: Context, document: str) -> Send:
    text = salted(document, salt())
    return lambda: context.chat(text, max_tokens=1, **GREEDY)


def rate(batch: Batch) -> float | None:
    """Uncached prompt tokens per second; cached tokens that a server does not report count as none."""
    if any(a.prompt_tokens is None or a.ttft_ms is None for a in batch.answers):
        return None
    tokens = sum((a.prompt_tokens or 0) - (a.cached_tokens or 0) for a in batch.answers)
    return tokens / (max(a.ttft_ms or 0.0 for a in batch.answers) / 1e3)


def _row(length: int, streams: int, batches: Sequence[Batch]) -> dict[str, Any]:
    first = batches[0].answers
    return {
        "length": length,
        "streams": streams,
        "prompt_tokens": mean(a.prompt_tokens for a in first),
        "cached": mean(a.cached_tokens for a in first),
        "ttft": Spread.of(mean(a.ttft_ms for a in b.answers) for b in batches),
        "rate": Spread.of(rate(b) for b in batches),
    }
