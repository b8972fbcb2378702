"""What the command line says about a run, whatever the scenario. Imports nothing heavy: `soloist --help` reads it."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass
class Options:
    """The options that every scenario shares."""

    url: str
    model: str | None = None
    key: str | None = None
    out: Path = Path("benchmarks/results")
    name: str | None = None
    plot: bool = True
    repeats: int = 1
    warm_up: int = 2
    thinking: bool | None = None
    serve: str | None = None
    fields: dict[str, Any] = field(default_factory=dict)

    @property
    def request_fields(self) -> dict[str, Any]:
        if self.thinking is None:
            return dict(self.fields)
        return {"chat_template_kwargs": {"enable_thinking": self.thinking}, **self.fields}
