"""How many draft rows a request puts up in its next step. One controller per request, from its own evidence only.

`SaturatedRule`: the short block, until two steps in a row emitted at least a full short block while a lookup match had
more to give; then the long block, held for `sticky` further steps. `GainRule`: the number of rows that maximises
expected accepted tokens per millisecond, from survival estimates and a step-cost table measured at start-up.

What can go wrong: under rejection sampling the row count must not depend on the value of a drawn draft. Both rules see
lengths, finished steps and survival estimates only; the estimates of drawn nodes depend on their depth alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from soloist.errors import SettingError


class BlockRule(Protocol):
    """Asked once per step, after the previous step's result is known."""

    def drafts(self, survival: Sequence[float], emitted: int) -> bool:
        """Whether running the drafter is worth its time. Asked before `limit`.

        survival  belongs to what is at hand without it
        emitted   tokens the step before emitted; 0 before the first
        """

    def limit(self, survival: Sequence[float], has_tail: bool, emitted: int, context: int, drafted: bool) -> int:
        """Draft rows to put up.

        survival  estimates of the nodes at hand, in the order they would be taken
        has_tail  a lookup match fills positions beyond the drafter's block
        emitted   tokens the step before emitted; 0 before the first
        context   tokens known so far
        drafted   whether the drafter ran for this proposal
        """


@dataclass(frozen=True)
class SaturatedConfig:
    """Knobs of the two-saturated-steps rule; lengths are draft rows.

    short      the drafter's block
    long       the long block
    adaptive   False = always the long block
    sticky     steps the long block is held after its evidence drops
    cheap_ctx  contexts up to this many tokens always get the long block; 0 = off
    """

    short: int
    long: int
    adaptive: bool = True
    sticky: int = 3
    cheap_ctx: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.short <= self.long or self.sticky < 0 or self.cheap_ctx < 0:
            raise SettingError(
                f"Blocks of {self.short} to {self.long} rows with a hold of {self.sticky} are impossible.",
                "Set 0 <= short <= long and a hold of 0 or more.",
            )


class SaturatedRule:
    """Long blocks while a copy is running: entered after two saturated steps, left after `sticky` others."""

    def __init__(self, config: SaturatedConfig) -> None:
        self.config = config
        self._before = False
        self._hold = 0

    def drafts(self, survival: Sequence[float], emitted: int) -> bool:
        return True

    def limit(self, survival: Sequence[float], has_tail: bool, emitted: int, context: int, drafted: bool) -> int:
        c = self.config
        if not c.adaptive or c.short == c.long:
            return c.long
        if emitted == 0:
            return c.short
        if context <= c.cheap_ctx:
            return c.long
        saturated = has_tail and emitted >= 1 + c.short
        if saturated and self._before:
            self._hold, rows = c.sticky, c.long
        elif self._hold > 0:
            self._hold, rows = self._hold - 1, c.long
        else:
            rows = c.short
        self._before = saturated
        return rows


@dataclass(frozen=True)
class StepCost:
    """Milliseconds of one step. `rows[n]` is a verify of n rows (index 0 unused), `draft` one drafter run."""

    rows: tuple[float, ...]
    draft: float = 0.0

    def __post_init__(self) -> None:
        if len(self.rows) < 2 or min(self.rows[1:]) <= 0 or self.draft < 0:
            raise SettingError("A step-cost table needs positive milliseconds for 1 row and up.", "Measure it again.")

    def verify(self, rows: int) -> float:
        """Cost of `rows` rows; beyond the table, grown by its mean slope."""
        last = len(self.rows) - 1
        if rows <= last:
            return self.rows[rows]
        slope = (self.rows[last] - self.rows[1]) / max(last - 1, 1)
        return self.rows[last] + slope * (rows - last)


class GainRule:
    """The row count with the best expected tokens per millisecond, and whether drafting pays at all.

    What survival promised is set against what drafted steps then emitted, all of them together: single nodes are
    calibrated too, but in a text that drafts badly that takes a dozen steps in every bucket of evidence, and each of
    them costs a drafter run.

    probe  after this many steps without the drafter, run it once to see whether it would pay now; every probe that
           says no doubles the wait, up to `patience` steps
    keep   weight of the past in the running estimate of a drafted step's rate
    trust  tokens that promises are believed for before the first outcome
    memory factor on old promises and outcomes per drafted step
    """

    def __init__(
        self,
        cost: StepCost,
        long: int,
        probe: int = 24,
        patience: int = 192,
        keep: float = 0.6,
        trust: float = 12.0,
        memory: float = 0.95,
    ) -> None:
        self.cost = cost
        self.long = long
        self.probe = probe
        self.patience = patience
        self.keep = keep
        self.trust = trust
        self.memory = memory
        self._promised = self._emitted = 0.0
        self._open: float | None = None  # what the step in flight was promised to emit, if the drafter ran for it
        self._wait = probe
        self._drafted_rate: float | None = None
        self._skipped = 0
        self._probing = False

    def _best(self, survival: Sequence[float], draft: float) -> tuple[float, int]:
        """(tokens per ms, rows) of the best prefix of the nodes."""
        best, rows, expected = 1.0 / (self.cost.verify(1) + draft), 0, 1.0
        for n, alive in enumerate(survival[: self.long], 1):
            expected += alive
            rate = expected / (self.cost.verify(n + 1) + draft)
            if rate > best:
                best, rows = rate, n
        return best, rows

    def drafts(self, survival: Sequence[float], emitted: int) -> bool:
        self._learn(emitted)
        if self._drafted_rate is None or self._drafted_rate * self._honesty >= self._best(survival, 0.0)[0]:
            self._wait = self.probe
            return True
        self._skipped += 1
        self._probing = self._skipped > self._wait
        if self._probing:
            self._wait = min(2 * self._wait, self.patience)
        return self._probing

    @property
    def _honesty(self) -> float:
        """Tokens that drafted steps emitted over what they were expected to."""
        return (self._emitted + self.trust) / (self._promised + self.trust)

    def _learn(self, emitted: int) -> None:
        if self._open is not None:
            self._promised = self.memory * self._promised + self._open
            self._emitted = self.memory * self._emitted + emitted
            self._open = None

    def limit(self, survival: Sequence[float], has_tail: bool, emitted: int, context: int, drafted: bool) -> int:
        rate, rows = self._best(survival, self.cost.draft if drafted else 0.0)
        if drafted:
            self._open = 1.0 + sum(survival[:rows])
            # What was known before a pause is stale: a probe replaces it.
            old = rate if self._probing or self._drafted_rate is None else self._drafted_rate
            self._drafted_rate = self.keep * old + (1 - self.keep) * rate
            self._probing, self._skipped = False, 0
        return rows
