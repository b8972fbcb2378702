"""How a long start-up says how far it is: a callable, with a form for people and a form for a parent process.

`progress(what, done, total)`: `what` names the part under way ("layers"), done and total count within that part.
The last report is `progress(READY, 1, 1)`, once requests are accepted.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TextIO

Progress = Callable[[str, int, int], None]

READY = "ready"
MARK = "@progress"


def silent(what: str, done: int, total: int) -> None:
    """A progress nobody watches."""


def lines(stream: TextIO) -> Progress:
    """One line of text per report, for a parent process: see `parse`."""

    def report(what: str, done: int, total: int) -> None:
        print(MARK, done, total, what, file=stream, flush=True)

    return report


def parse(line: str) -> tuple[str, int, int] | None:
    """The arguments of the report that `lines` wrote, or None for any other line."""
    parts = line.strip().split(" ", 3)
    if len(parts) != 4 or parts[0] != MARK or not (parts[1].isdecimal() and parts[2].isdecimal()):
        return None
    return parts[3], int(parts[1]), int(parts[2])


@contextmanager
def bar(title: str) -> Iterator[Progress]:
    """A progress bar on stderr, gone at READY or at the end of the block; plain lines where stderr is no terminal."""
    if not sys.stderr.isatty():
        yield _plain(title)
        return

    from rich.console import Console
    from rich.progress import BarColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Display

    columns = (TextColumn("{task.fields[title]}"), BarColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    display = Display(*columns, console=Console(stderr=True), transient=True)
    task = display.add_task("starting", total=None, title=title)

    def show(what: str, done: int, total: int) -> None:
        display.update(task, description=what, completed=done, total=total)
        if what == READY:
            display.stop()

    with display:
        yield show


def _plain(title: str) -> Progress:
    shown: set[str] = set()

    def say(what: str, done: int, total: int) -> None:
        if what not in shown:
            shown.add(what)
            print(f"{title}: {what}", file=sys.stderr, flush=True)

    return say
