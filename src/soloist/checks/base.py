"""The form of a check: a subject, its possible outcomes with their remedies, and a function that picks one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property
from pathlib import Path
from typing import Any

from soloist.errors import SettingError, UserError
from soloist.settings import Settings, read_dotenv, resolve


class Status(Enum):
    """FAIL: will not work. WARN: works, but slower, less safely or not as meant. PASS: fine."""

    PASS = "PASS"
    WARN = "WARN"
    FAIL = "FAIL"


@dataclass(frozen=True)
class Outcome:
    """What is said when a check ends this way. Texts may hold `{names}` filled in by the check."""

    status: Status
    says: str
    remedy: str = ""


@dataclass(frozen=True)
class Finding:
    """One line of the doctor's report."""

    check: str
    outcome: str
    status: Status
    summary: str
    remedy: str = ""

    def as_dict(self) -> dict[str, str]:
        return {
            "check": self.check,
            "outcome": self.outcome,
            "status": self.status.value,
            "summary": self.summary,
            "remedy": self.remedy,
        }


@dataclass
class Subject:
    """The installation under examination. Tests give other sources and other tool outputs than this machine's.

    `run_tool(arguments)` returns a tool's output, or None when it is absent or fails. `server_url` is the live
    server to look at; by default the one on HOST and PORT.
    """

    flags: Mapping[str, str | None] = field(default_factory=dict)
    environ: Mapping[str, str] = field(default_factory=dict)
    directory: Path = Path(".")
    run_tool: Callable[[list[str]], str | None] = lambda _: None
    server_url: str | None = None

    @cached_property
    def settings_fault(self) -> UserError | None:
        """What is wrong with the knobs, or None."""
        try:
            self._resolve()
        except UserError as error:
            return error
        return None

    @cached_property
    def settings(self) -> Settings:
        """The knobs; where they are at fault, the flags alone, so that the other checks can still look."""
        if self.settings_fault is None:
            return self._resolve()
        try:
            return resolve(self.flags, {}, {})
        except SettingError:
            return resolve({}, {}, {})

    def _resolve(self) -> Settings:
        return resolve(self.flags, self.environ, read_dotenv(self.directory / ".env"))

    @cached_property
    def model_directory(self) -> Path:
        if self.settings.model == "demo":
            from soloist.demo import path

            return path()
        return Path(self.settings.model).expanduser()


@dataclass(frozen=True)
class Verdict:
    """Which outcome, and the values for its texts."""

    outcome: str
    values: Mapping[str, Any] = field(default_factory=dict)


def verdict(outcome: str, **values: Any) -> Verdict:
    return Verdict(outcome, values)


Judge = Callable[[Subject], Iterator[Verdict]]


@dataclass(frozen=True)
class Check:
    """One subject the doctor looks at. `about` is its paragraph in the documentation."""

    name: str
    title: str
    about: str
    outcomes: Mapping[str, Outcome]
    judge: Judge

    def examine(self, subject: Subject) -> list[Finding]:
        """Findings, at least one. A check that breaks is itself a finding, never the end of the report."""
        try:
            verdicts = list(self.judge(subject))
        except Exception as error:  # the report must go on; the fault is printed
            return [
                Finding(self.name, "broke", Status.FAIL, f"The check itself broke ({type(error).__name__}: {error}).",
                        "Run `soloist doctor --debug-bundle` and report it.")
            ]  # fmt: skip
        return [self._finding(v) for v in verdicts]

    def _finding(self, given: Verdict) -> Finding:
        outcome = self.outcomes[given.outcome]
        says, remedy = outcome.says.format(**given.values), outcome.remedy.format(**given.values)
        return Finding(self.name, given.outcome, outcome.status, says, remedy)


def check(name: str, title: str, about: str, **outcomes: Outcome) -> Callable[[Judge], Check]:
    """Decorator: the function, which yields verdicts, becomes a Check."""

    def register(judge: Judge) -> Check:
        return Check(name, title, about, outcomes, judge)

    return register


def ok(says: str) -> Outcome:
    return Outcome(Status.PASS, says)


def warn(says: str, remedy: str) -> Outcome:
    return Outcome(Status.WARN, says, remedy)


def fail(says: str, remedy: str) -> Outcome:
    return Outcome(Status.FAIL, says, remedy)
