"""A measured run as data: what was asked, on what, and the tables and plots that came out.

The JSON of a run holds everything its printed table and plot hold, so that `soloist bench report` can render
any number of runs again without the server.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from soloist.bench.measure import Spread
from soloist.errors import UserError

FORMAT = "soloist-bench/1"
ABSENT = "n/a"
"""Printed where a server does not report a figure."""


@dataclass(frozen=True)
class Column:
    """One column: key into the rows, header with the unit, digits after the point (None: print as text)."""

    key: str
    header: str
    digits: int | None = None


@dataclass
class Table:
    """Rows are dictionaries; a figure may be a number, a `Spread` (over repeats), text, or None (absent)."""

    title: str
    columns: list[Column]
    rows: list[dict[str, Any]] = field(default_factory=list)

    def cell(self, row: dict[str, Any], column: Column) -> str:
        return format_cell(row.get(column.key), column.digits)

    def markdown(self) -> str:
        """GitHub table; numbers are aligned right."""
        head = "| " + " | ".join(c.header for c in self.columns) + " |"
        rule = "|" + "|".join("---" if c.digits is None else "---:" for c in self.columns) + "|"
        body = ["| " + " | ".join(self.cell(r, c).replace("|", "\\|") for c in self.columns) + " |" for r in self.rows]
        return "\n".join([f"**{self.title}**", "", head, rule, *body])


def format_cell(value: Any, digits: int | None) -> str:
    """Text of one figure: `12.3`, `12.3 ± 0.4` (half the range over repeats), or `n/a`."""
    if isinstance(value, dict) and "mean" in value:
        value = Spread(**value)
    if value is None:
        return ABSENT
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, Spread):
        text = f"{value.mean:.{digits or 0}f}"
        return text if value.count < 2 else f"{text} ± {(value.high - value.low) / 2:.{digits or 0}f}"
    if isinstance(value, (int, float)) and digits is not None:
        return f"{value:.{digits}f}"
    if isinstance(value, (list, tuple)):
        return " ".join(format_cell(v, digits) for v in value)
    return str(value)


@dataclass
class Series:
    """One line or one group of bars. `error` holds [low, high] per point when repeats were made."""

    label: str
    x: list[Any]
    y: list[float | None]
    error: list[list[float]] | None = None


@dataclass
class Panel:
    """One pair of axes of the plot."""

    title: str
    x_label: str
    y_label: str
    kind: Literal["line", "bar"]
    series: list[Series] = field(default_factory=list)


@dataclass
class Result:
    """One run of one scenario."""

    scenario: str
    tables: list[Table] = field(default_factory=list)
    panels: list[Panel] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    settings: dict[str, Any] = field(default_factory=dict)
    details: dict[str, Any] = field(default_factory=dict)
    about: dict[str, Any] = field(default_factory=dict)

    @property
    def passed(self) -> bool:
        return not self.failures

    def write(self, path: Path) -> None:
        """Write the run as JSON, whole or not at all."""
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_name(path.name + ".part")
        document = {"format": FORMAT, **asdict(self)}
        part.write_text(json.dumps(document, indent=1, ensure_ascii=False, default=str) + "\n", encoding="utf-8")
        part.replace(path)

    @classmethod
    def read(cls, path: Path) -> Result:
        """Read a run back. Raises UserError for a file that is not one."""
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise UserError(f"{path} does not exist.", "Give files that `soloist bench` wrote.") from None
        except (UnicodeDecodeError, json.JSONDecodeError) as error:
            raise UserError(f"{path} is not JSON ({error}).", "Give files that `soloist bench` wrote.") from None
        if not isinstance(data, dict) or data.pop("format", None) != FORMAT:
            raise UserError(f"{path} is not a {FORMAT} document.", "Give files that `soloist bench` wrote.")
        data["tables"] = [
            Table(t["title"], [Column(**c) for c in t["columns"]], [_revive(r) for r in t["rows"]])
            for t in data["tables"]
        ]
        data["panels"] = [Panel(**{**p, "series": [Series(**s) for s in p["series"]]}) for p in data["panels"]]
        return cls(**data)


def _revive(row: dict[str, Any]) -> dict[str, Any]:
    """Turn the mappings that were `Spread`s back into them."""
    return {k: Spread(**v) if isinstance(v, dict) and set(v) == SPREAD_KEYS else v for k, v in row.items()}


SPREAD_KEYS = {"mean", "low", "high", "count"}


def series_of(label: str, x: Sequence[Any], values: Sequence[Any]) -> Series:
    """A series from cells that may be numbers, spreads or None."""
    y = [v.mean if isinstance(v, Spread) else v for v in values]
    repeated = any(isinstance(v, Spread) and v.count > 1 for v in values)
    error = [[v.low, v.high] if isinstance(v, Spread) else [0.0, 0.0] for v in values] if repeated else None
    return Series(label, list(x), y, error)
