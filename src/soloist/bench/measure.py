"""What is computed from answers: rates, acceptance, spread. Every formula of the tables stands here."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from soloist.bench.client import Answer
from soloist.bench.prometheus import Samples, counter_delta


@dataclass(frozen=True)
class Spread:
    """Mean and extremes of one figure over repeats."""

    mean: float
    low: float
    high: float
    count: int

    @classmethod
    def of(cls, values: Iterable[float | None]) -> Spread | None:
        """Over the values that are known; None when none is."""
        known = [v for v in values if v is not None and math.isfinite(v)]
        return cls(sum(known) / len(known), min(known), max(known), len(known)) if known else None


def mean(values: Iterable[float | None]) -> float | None:
    spread = Spread.of(values)
    return spread.mean if spread else None


def percentile(values: Sequence[float], share: float) -> float | None:
    """The smallest value that at least `share` (0..1) of the values do not exceed."""
    if not values:
        return None
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def decode_rate(concurrency: int, answers: Sequence[Answer]) -> float | None:
    """Decode tokens per second of a cohort: C x 1000 / mean TPOT in ms."""
    tpot = mean(a.tpot_ms for a in answers)
    return concurrency * 1000.0 / tpot if tpot else None


def end_to_end_rate(answers: Sequence[Answer], wall_s: float) -> float | None:
    """Output tokens over the wall time of the whole cohort, prefill included."""
    if wall_s <= 0 or any(a.completion_tokens is None for a in answers):
        return None
    return sum(a.completion_tokens or 0 for a in answers) / wall_s


@dataclass(frozen=True)
class Speculation:
    """Verify steps and what their drafts came to. `per_position[j]` = share of steps that accepted draft j."""

    steps: int
    drafted: int
    accepted: int
    per_position: tuple[float, ...]

    @property
    def tokens_per_step(self) -> float | None:
        """1 + accepted / steps: the bonus token counts, the prefill's first token does not."""
        return 1.0 + self.accepted / self.steps if self.steps else None

    @property
    def rows_per_step(self) -> float | None:
        """Rows a request puts up in a verify step: its drafts and the anchor."""
        return 1.0 + self.drafted / self.steps if self.steps else None


def speculation_of(answers: Sequence[Answer]) -> Speculation | None:
    """Summed over the requests that report it; None when none does."""
    parts = [a.speculation for a in answers if a.speculation]
    if not parts:
        return None
    histogram: list[int] = []
    for part in parts:
        counts = part.get("acceptance_histogram") or []
        histogram += [0] * (len(counts) - len(histogram))
        for j, n in enumerate(counts):
            histogram[j] += n
    steps = sum(int(p.get("num_spec_steps") or 0) for p in parts)
    return Speculation(
        steps=steps,
        drafted=sum(int(p.get("num_draft_tokens") or 0) for p in parts),
        accepted=sum(int(p.get("num_accepted_draft_tokens") or 0) for p in parts),
        per_position=tuple(sum(histogram[j:]) / steps for j in range(1, len(histogram))) if steps else (),
    )


def speculation_between(before: Samples | None, after: Samples | None) -> Speculation | None:
    """The same from the server's counters, for a server that reports acceptance only there."""
    steps = counter_delta(before, after, "vllm:spec_decode_num_drafts_total")
    if not steps or after is None:
        return None
    name = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
    start = before.by_label(name, "position") if before else {}
    positions = sorted(after.by_label(name, "position").items(), key=lambda item: int(item[0]))
    return Speculation(
        steps=int(steps),
        drafted=int(counter_delta(before, after, "vllm:spec_decode_num_draft_tokens_total") or 0),
        accepted=int(counter_delta(before, after, "vllm:spec_decode_num_accepted_tokens_total") or 0),
        per_position=tuple((value - start.get(label, 0.0)) / steps for label, value in positions),
    )
