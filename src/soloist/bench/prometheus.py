"""The Prometheus text format, as far as a benchmark reads it: names, labels, values."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

_LINE = re.compile(r"^([a-zA-Z_:][a-zA-Z0-9_:]*)(?:\{(.*)\})?\s+(\S+)(?:\s+\d+)?$")
_LABEL = re.compile(r'([a-zA-Z_][a-zA-Z0-9_]*)="((?:[^"\\]|\\.)*)"')


@dataclass(frozen=True)
class Samples:
    """All samples of one scrape: {(name, sorted label pairs): value}."""

    values: dict[tuple[str, tuple[tuple[str, str], ...]], float]

    def total(self, name: str) -> float | None:
        """Sum of a metric over its label sets; None when the server does not export it."""
        found = [value for (key, _), value in self.values.items() if key == name]
        return sum(found) if found else None

    def by_label(self, name: str, label: str) -> dict[str, float]:
        """{label value: sum} of one metric."""
        out: dict[str, float] = {}
        for key, labels, value in self._items():
            if key == name and label in labels:
                out[labels[label]] = out.get(labels[label], 0.0) + value
        return out

    def first(self, *names: str) -> float | None:
        """The total of the first of several names that is exported."""
        return next((value for name in names if (value := self.total(name)) is not None), None)

    def _items(self) -> Iterator[tuple[str, dict[str, str], float]]:
        for (key, labels), value in self.values.items():
            yield key, dict(labels), value


def parse_metrics(text: str) -> Samples:
    """Parse an exposition. Lines that are not samples are skipped."""
    values: dict[tuple[str, tuple[tuple[str, str], ...]], float] = {}
    for line in text.splitlines():
        match = None if line.startswith("#") else _LINE.match(line.strip())
        if match:
            labels = tuple(sorted(_LABEL.findall(match[2] or "")))
            values[(match[1], labels)] = float(match[3])
    return Samples(values)


def counter_delta(before: Samples | None, after: Samples | None, name: str) -> float | None:
    """How much a counter grew between two scrapes; None when it is absent after them."""
    if after is None or (end := after.total(name)) is None:
        return None
    return end - ((before.total(name) if before else None) or 0.0)
