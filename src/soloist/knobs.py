"""How a knob is declared, named, parsed and refused. `settings.py` holds the knobs themselves.

A knob is a dataclass field made by `knob(...)`: its annotation is its type, its upper-case name its environment
variable, its dashed name its flag. Texts are parsed by the annotation, which may be int, float, bool, str, Path,
tuple[str, ...] (comma-separated), a Literal of words, or a union of these with None.

What can go wrong: a knob's plain name may be taken in someone's environment by another program. Empty values mean
unset, and every refusal says where the value came from.
"""

from __future__ import annotations

import dataclasses
import difflib
import types
import typing
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from soloist.errors import SettingError

Origin = Literal["default", ".env", "environment", "flag"]

TRUE = ("1", "true", "yes", "on")
FALSE = ("0", "false", "no", "off")


def knob(
    default: Any,
    help: str,
    *,
    group: str,
    low: float | None = None,
    high: float | None = None,
    secret: bool = False,
) -> Any:
    """Declare a knob as a dataclass field. `low` and `high` bound a number, both inclusive; secrets are not printed."""
    described = {"help": help, "group": group, "low": low, "high": high, "secret": secret}
    return dataclasses.field(default=default, metadata=described, repr=not secret)


@dataclass(frozen=True)
class Knob:
    """One declared knob: everything the command line, the documentation and the parser need to know."""

    name: str
    kind: Any
    default: Any
    help: str
    group: str
    low: float | None
    high: float | None
    secret: bool

    @property
    def env(self) -> str:
        return self.name.upper()

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")

    @property
    def kinds(self) -> tuple[Any, ...]:
        """The members of the annotation, None left out."""
        union = typing.get_origin(self.kind) in (typing.Union, types.UnionType)
        members = typing.get_args(self.kind) if union else (self.kind,)
        return tuple(m for m in members if m is not type(None))

    @property
    def words(self) -> tuple[str, ...]:
        """The words a Literal allows; empty when there is none."""
        return tuple(w for k in self.kinds if typing.get_origin(k) is Literal for w in typing.get_args(k))

    @property
    def values(self) -> str:
        """The legal values in a few words, for help texts and refusals."""
        parts = list(self.words)
        for kind in self.kinds:
            if kind in (int, float):
                parts.append(self._range(kind))
            elif kind is bool:
                parts.append("0 or 1")
            elif kind is str:
                parts.append("text")
            elif kind is Path:
                parts.append("a path")
            elif typing.get_origin(kind) is tuple:
                parts.append("comma-separated")
        return " | ".join(parts)

    def _range(self, kind: type) -> str:
        noun = "an integer" if kind is int else "a number"
        if self.low is not None and self.high is not None:
            return f"{self.low}..{self.high}"
        if self.low is not None:
            return f"{noun} of at least {self.low}"
        return noun if self.high is None else f"{noun} of at most {self.high}"

    def show(self, value: Any) -> str:
        """The text that `parse` turns into `value`; empty for what counts as unset."""
        if value is None or value == ():
            return ""
        if isinstance(value, bool):
            return "1" if value else "0"
        return ",".join(value) if isinstance(value, tuple) else str(value)

    def parse(self, text: str, origin: Origin) -> Any:
        """The value `text` stands for. Raises SettingError with the nearest valid value in its remedy."""
        text = text.strip()
        if text.lower() in self.words:
            return text.lower()
        for kind in self.kinds:
            if kind is bool and text.lower() in TRUE + FALSE:
                return text.lower() in TRUE
            if kind in (int, float):
                number = _number(text, kind)
                if number is not None:
                    return self._bounded(number, origin)
            if kind is str:
                return text
            if kind is Path:
                return Path(text).expanduser()
            if typing.get_origin(kind) is tuple:
                return tuple(part.strip() for part in text.split(",") if part.strip())
        raise SettingError(
            f"{self.given(text, origin)} is not valid; {self.env} takes {self.values}.", self._nearest(text)
        )

    def _bounded(self, number: float, origin: Origin) -> float:
        low, high = self.low, self.high
        if (low is not None and number < low) or (high is not None and number > high):
            nearest = low if low is not None and number < low else high
            raise SettingError(
                f"{self.given(str(number), origin)} is out of range; {self.env} takes {self.values}.",
                f"The nearest valid value is {self.env}={nearest}.",
            )
        return number

    def _nearest(self, text: str) -> str:
        close = difflib.get_close_matches(text.lower(), self.words, n=1, cutoff=0.4)
        if close:
            return f"Did you mean {self.env}={close[0]}?"
        return (
            f"The default is {self.env}={self.show(self.default)}." if self.show(self.default) else "Or leave it out."
        )

    def given(self, text: str, origin: Origin) -> str:
        """How the user wrote it: `--port 0` or `PORT=0 (.env)`."""
        return f"{self.flag} {text}" if origin == "flag" else f"{self.env}={text} ({origin})"


def _number(text: str, kind: type) -> int | float | None:
    try:
        number = kind(text)
    except ValueError:
        return None
    return number if number - number == 0 else None  # inf and nan are not settings


def table(settings: type) -> dict[str, Knob]:
    """The knobs declared on a dataclass, by field name, in order of declaration."""
    hints = typing.get_type_hints(settings)
    return {
        f.name: Knob(name=f.name, kind=hints[f.name], default=f.default, **f.metadata)
        for f in dataclasses.fields(settings)
        if "help" in f.metadata
    }


def lookalike(name: str, knobs: Iterable[Knob]) -> Knob | None:
    """The knob that `name` is probably a slip of: one edit away, two for names of eight letters or more."""
    best: tuple[int, Knob] | None = None
    for candidate in knobs:
        allowed = 2 if len(candidate.env) >= 8 else 1 if len(candidate.env) >= 4 else 0
        distance = edit_distance(name.upper(), candidate.env, allowed)
        if distance <= allowed and (best is None or distance < best[0]):
            best = (distance, candidate)
    return best[1] if best else None


def edit_distance(a: str, b: str, limit: int) -> int:
    """Insertions, deletions, substitutions and swaps of neighbours between two words; limit + 1 when above `limit`."""
    if abs(len(a) - len(b)) > limit:
        return limit + 1
    before: list[int] = []
    row = list(range(len(b) + 1))
    for i, x in enumerate(a, 1):
        older, before, row = before, row, [i] + [0] * len(b)
        for j, y in enumerate(b, 1):
            row[j] = min(before[j] + 1, row[j - 1] + 1, before[j - 1] + (x != y))
            if i > 1 and j > 1 and x == b[j - 2] and a[i - 2] == y:
                row[j] = min(row[j], older[j - 2] + 1)
    return min(row[-1], limit + 1)
