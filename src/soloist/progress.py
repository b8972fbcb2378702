"""How a long start-up says how far it is: a callable, with a form for people and a form for a parent process.

`progress(stage, fraction)`: a stage is a few words ("reading weights"), the fraction of the whole start-up done so
far goes from 0 to 1 and never back.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TextIO

Progress = Callable[[str, float], None]

MARK = "@progress"


def silent(stage: str, fraction: float) -> None:
    """A progress nobody watches."""


def lines(stream: TextIO) -> Progress:
    """One line of text per report, for a parent process: see `parse`."""

    def report(stage: str, fraction: float) -> None:
        print(f"{MARK} {fraction:.3f} {stage}", file=stream, flush=True)

    return report


def parse(line: str) -> tuple[str, float] | None:
    """(stage, fraction) of a line written by `lines`, or None for any other line."""
    mark, _, rest = line.strip().partition(" ")
    number, _, stage = rest.partition(" ")
    if mark != MARK:
        return None
    try:
        return stage, min(max(float(number), 0.0), 1.0)
    except ValueError:
        return None


@contextmanager
def bar(title: str) -> Iterator[Progress]:
    """A progress bar on stderr, gone at fraction 1 or at the end of the block; plain lines without a terminal."""
    if not sys.stderr.isatty():
        yield _plain(title)
        return

    from rich.console import Console
    from rich.progress import BarColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Display

    columns = (TextColumn("{task.fields[title]}"), BarColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    display = Display(*columns, console=Console(stderr=True), transient=True)
    task = display.add_task("starting", total=1.0, title=title)

    def show(stage: str, fraction: float) -> None:
        display.update(task, description=stage, completed=fraction)
        if fraction >= 1:
            display.stop()

    with display:
        yield show


def _plain(title: str) -> Progress:
    shown: list[str] = []

    def say(stage: str, fraction: float) -> None:
        if stage not in shown:
            shown.append(stage)
            print(f"{title}: {stage}", file=sys.stderr, flush=True)

    return say
