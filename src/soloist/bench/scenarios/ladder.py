"""`ladder`: one to eight long prompts at a time; where does the aggregate stop growing?"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from soloist.bench.client import Client
from soloist.bench.document_text import document_of_tokens
from soloist.bench.measure import Speculation, Spread, decode_rate, mean, speculation_of
from soloist.bench.result import Column, Panel, Result, Table, series_of
from soloist.bench.run import GREEDY, Batch, Context, Send, salt, salted, together

SATURATED = 1.10
"""A rung that multiplies the best aggregate so far by less than this adds nothing."""

COLUMNS = [
    Column("streams", "streams", 0),
    Column("per_stream", "tok/s per stream", 1),
    Column("aggregate", "tok/s, all", 1),
    Column("ttft", "TTFT ms", 0),
    Column("step_ms", "ms per forward", 2),
    Column("rows", "rows per forward", 1),
    Column("tokens_per_step", "tokens/step", 2),
    Column("residents", "residents", 0),
    Column("prompt_tokens", "prompt tokens", 0),
    Column("cached", "of them cached", 0),
]


async def run(
    context: Context,
    *,
    rungs: Sequence[int] = (1, 2, 3, 4, 5, 6, 7, 8),
    prompt_tokens: int = 4096,
    max_tokens: int = 256,
    shared: bool = False,
) -> Result:
    """Climb. Every prompt starts with a word no cache has seen, unless `shared` gives all of them the same text."""
    result = Result(
        "ladder",
        settings={"rungs": list(rungs), "prompt_tokens": prompt_tokens, "max_tokens": max_tokens, "shared": shared},
    )
    documents = [(await document_of_tokens(context.client, prompt_tokens, seed)).text for seed in range(max(rungs))]
    await context.warm()
    table = Table("One shared prompt" if shared else "Distinct long prompts, nothing cached", COLUMNS)
    common = salt()
    for streams in rungs:
        batches, peaks = [], []
        for _ in range(context.repeats):
            sends = [
                _send(context, documents[0] if shared else documents[n], common if shared else salt(), max_tokens)
                for n in range(streams)
            ]
            batch, peak = await _watched(context, sends)
            batches.append(batch)
            peaks.append(peak)
            result.failures += [f"{streams} streams: {e}" for e in batch.errors]
        table.rows.append(_row(streams, batches, peaks))
    result.tables = [table]
    knee = saturation([(r["streams"], r["aggregate"]) for r in table.rows])
    result.notes.append(
        f"The aggregate stops growing by {SATURATED - 1:.0%} or more after {knee} streams."
        if knee
        else "The aggregate still grows at the last rung."
    )
    result.panels = _panels(table)
    return result


def _send(context: Context, document: str, word: str, max_tokens: int) -> Send:
    text = salted(f"{document}\n\nWrite a commentary on the document above, section by section.", word)
    return lambda: context.chat(text, max_tokens=max_tokens, min_tokens=max_tokens, ignore_eos=True, **GREEDY)


async def _watched(context: Context, sends: Sequence[Send]) -> tuple[Batch, float | None]:
    """Run a rung while reading how many requests the server decodes at the same time."""
    peak: list[float] = []
    watcher = asyncio.create_task(_watch(context.client, peak))
    try:
        batch = await together(sends, context.tick)
    finally:
        watcher.cancel()
    return batch, max(peak, default=None)


async def _watch(client: Client, peak: list[float]) -> None:
    while True:
        samples = await client.metrics()
        running = samples.total("vllm:num_requests_running") if samples else None
        if running is None:
            return
        peak.append(running)
        await asyncio.sleep(0.5)


def _row(streams: int, batches: Sequence[Batch], peaks: Sequence[float | None]) -> dict[str, Any]:
    specs = [speculation_of(b.answers) for b in batches]
    rates = [decode_rate(streams, b.answers) for b in batches]
    first = batches[0].answers
    return {
        "streams": streams,
        "per_stream": Spread.of(r / streams if r else None for r in rates),
        "aggregate": Spread.of(rates),
        "ttft": Spread.of(mean(a.ttft_ms for a in b.answers) for b in batches),
        "step_ms": Spread.of(step_ms(b) for b in batches),
        "rows": Spread.of(_rows(s, streams) for s in specs),
        "tokens_per_step": Spread.of(s.tokens_per_step if s else None for s in specs),
        "residents": Spread.of(peaks),
        "prompt_tokens": mean(a.prompt_tokens for a in first),
        "cached": mean(a.cached_tokens for a in first),
    }


def step_ms(batch: Batch) -> float | None:
    """Milliseconds of one forward: a request's decode time over its steps, averaged; None without step counts."""
    values = []
    for answer in batch.answers:
        spec = answer.speculation
        if not spec or not spec.get("num_spec_steps") or answer.ttft_ms is None:
            return None
        values.append((answer.total_ms - answer.ttft_ms) / spec["num_spec_steps"])
    return mean(values)


def _rows(spec: Speculation | None, streams: int) -> float | None:
    return spec.rows_per_step * streams if spec and spec.rows_per_step else None


def saturation(points: Sequence[tuple[int, Spread | None]]) -> int | None:
    """The last number of streams that raised the best aggregate by a tenth; None when the last rung still did."""
    best, at, last = 0.0, None, None
    for streams, aggregate in points:
        if aggregate is None:
            continue
        last = streams
        if aggregate.mean >= best * SATURATED:
            best, at = aggregate.mean, streams
    return None if at == last else at


def _panels(table: Table) -> list[Panel]:
    x = [r["streams"] for r in table.rows]

    def panel(title: str, unit: str, *keys: tuple[str, str]) -> Panel:
        return Panel(title, "streams", unit, "line", [series_of(n, x, [r[k] for r in table.rows]) for k, n in keys])

    panels = [
        panel("Decode rate", "tok/s", ("aggregate", "all streams"), ("per_stream", "each stream")),
        panel("Time to first token", "ms", ("ttft", "mean")),
        panel("Forward", "ms", ("step_ms", "ms per forward")),
    ]
    return [p for p in panels if any(v is not None for s in p.series for v in s.y)]
