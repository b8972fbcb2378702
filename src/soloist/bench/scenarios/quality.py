"""`quality`: perplexity, exact match, needles and divergence, with the speed of the same requests beside them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from soloist.bench.client import Client
from soloist.bench.measure import decode_rate, mean, speculation_of
from soloist.bench.quality import battery, divergence, needle, perplexity
from soloist.bench.result import Column, Panel, Result, Series, Table
from soloist.bench.run import Context
from soloist.errors import UserError

PARTS = ("perplexity", "battery", "needle", "divergence")


@dataclass
class Sources:
    """Files to use instead of the small ones that ship, and the sizes to try."""

    texts: Path | None = None
    battery: Path | None = None
    needle: Path | None = None
    lengths: Sequence[int] = (500, 1000)
    depths: Sequence[float] = (0.1, 0.5, 0.9)
    max_tokens: int = 96
    parts: Sequence[str] = field(default_factory=lambda: PARTS[:3])


async def run(context: Context, sources: Sources, other: Client | None = None) -> Result:
    """Measure the chosen parts. Divergence needs `other`, the server to compare with."""
    unknown = sorted(set(sources.parts) - set(PARTS))
    if unknown:
        raise UserError(f"Unknown part {unknown[0]!r}.", f"Parts are {', '.join(PARTS)}.")
    result = Result("quality", settings={k: v for k, v in asdict(sources).items() if v is not None})
    summary: dict[str, Any] = {}
    await context.warm()
    if "perplexity" in sources.parts:
        await _perplexity(context, sources, result, summary)
    if "battery" in sources.parts:
        await _battery(context, sources, result, summary)
    if "needle" in sources.parts:
        await _needle(context, sources, result, summary)
    if "divergence" in sources.parts or other is not None:
        if other is None:
            raise UserError("Divergence compares two servers.", "Give --against URL.")
        await _divergence(context, sources, other, result, summary)
    result.tables.insert(0, Table("Quality and speed", _SUMMARY, [summary]))
    return result


_SUMMARY = [
    Column("perplexity", "perplexity", 3),
    Column("bits_per_byte", "bits/byte", 4),
    Column("exact", "exact match %", 1),
    Column("needles", "needles found %", 1),
    Column("kl", "KL to other, nats", 5),
    Column("same_top", "same top token %", 2),
    Column("decode", "decode tok/s, C1", 1),
    Column("tokens_per_step", "tokens/step", 2),
]


async def _perplexity(context: Context, sources: Sources, result: Result, summary: dict[str, Any]) -> None:
    scores = await perplexity.by_kind(context.client, perplexity.texts(sources.texts))
    columns = [
        Column("kind", "kind"),
        Column("perplexity", "perplexity", 3),
        Column("bits_per_byte", "bits/byte", 4),
        Column("tokens", "tokens", 0),
    ]
    rows = [
        {"kind": k, "perplexity": s.perplexity, "bits_per_byte": s.bits_per_byte, "tokens": s.tokens}
        for k, s in scores.items()
    ]
    total = sum(list(scores.values())[1:], start=next(iter(scores.values())))
    summary |= {"perplexity": total.perplexity, "bits_per_byte": total.bits_per_byte}
    result.tables.append(Table("Perplexity by kind of text", columns, rows))
    values: list[float | None] = [s.perplexity for s in scores.values()]
    result.panels.append(Panel("Perplexity", "", "perplexity", "bar", [Series("perplexity", list(scores), values)]))
    context.tick("perplexity")


async def _battery(context: Context, sources: Sources, result: Result, summary: dict[str, Any]) -> None:
    chosen = battery.questions(sources.battery)
    answers = await battery.ask(context, chosen, sources.max_tokens, cohort=1)
    result.failures += [f"{q.id}: {a.error}" for q, a in zip(chosen, answers, strict=True) if a.error]
    marks = [battery.right(q, a.text) for q, a in zip(chosen, answers, strict=True)]
    rows: list[dict[str, Any]] = []
    for kind in dict.fromkeys(q.kind for q in chosen):
        picked = [m for q, m in zip(chosen, marks, strict=True) if q.kind == kind]
        rows.append({"kind": kind, "right": sum(picked), "of": len(picked), "share": 100 * sum(picked) / len(picked)})
    columns = [Column("kind", "kind"), Column("right", "right", 0), Column("of", "of", 0), Column("share", "%", 1)]
    result.tables.append(Table("Exact match", columns, rows))
    shares: list[float | None] = [r["share"] for r in rows]
    result.panels.append(Panel("Exact match", "", "%", "bar", [Series("right", [r["kind"] for r in rows], shares)]))
    result.details["wrong"] = {
        q.id: a.text[:120] for q, a, m in zip(chosen, answers, marks, strict=True) if not m
    }  # fmt: skip
    spec = speculation_of(answers)
    summary |= {
        "exact": 100 * sum(marks) / len(marks),
        "decode": decode_rate(1, answers),
        "tokens_per_step": spec.tokens_per_step if spec else None,
    }


async def _needle(context: Context, sources: Sources, result: Result, summary: dict[str, Any]) -> None:
    chosen, hay = needle.needles(sources.needle)
    finds: list[needle.Find] = []
    for tokens in sources.lengths:
        for depth in sources.depths:
            for item in chosen:
                finds.append(await needle.find(context, item, hay, tokens, depth, max_tokens=24))
    result.failures += [f"needle at {f.depth:.0%} of {f.tokens}: {f.error}" for f in finds if f.error]
    columns = [Column("tokens", "length", 0), Column("prompt_tokens", "prompt tokens", 0)]
    columns += [Column(f"d{depth}", f"depth {depth:.0%}") for depth in sources.depths]
    rows = []
    for tokens in sources.lengths:
        at = [f for f in finds if f.tokens == tokens]
        row: dict[str, Any] = {"tokens": tokens, "prompt_tokens": mean(f.prompt_tokens for f in at)}
        for depth in sources.depths:
            here = [f.found for f in at if f.depth == depth]
            row[f"d{depth}"] = f"{sum(here)}/{len(here)}"
        rows.append(row)
    result.tables.append(Table("Needle in a haystack", columns, rows))
    result.details["missed"] = [asdict(f) for f in finds if not f.found]
    summary["needles"] = 100 * sum(f.found for f in finds) / len(finds)


async def _divergence(
    context: Context, sources: Sources, other: Client, result: Result, summary: dict[str, Any]
) -> None:
    found = await divergence.compare(context.client, other, perplexity.texts(sources.texts))
    row = {**asdict(found), "same_top": 100 * found.same_top}
    columns = [
        Column("mean", "mean KL, nats", 6),
        Column("p99", "p99", 5),
        Column("worst", "worst", 4),
        Column("same_top", "same top token %", 2),
        Column("positions", "positions", 0),
    ]
    result.tables.append(Table(f"Divergence from {other.model}", columns, [row]))
    result.notes.append("Divergence is a lower bound: tokens outside both servers' top lists count as one.")
    summary |= {"kl": found.mean, "same_top": 100 * found.same_top}
    context.tick("divergence")
