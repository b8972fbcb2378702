"""soloist inspect: what a checkpoint is."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(add_completion=False)


@app.command()
def inspect(
    directory: Annotated[Path, typer.Argument(help="Model or drafter directory, or `demo`.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Architecture, parameters, bits per part, and what the fast path lacks with the command that makes it.

    Reads headers only.
    """
    from soloist.prepare import inspect as room

    if str(directory) == "demo" and not directory.exists():
        from soloist.demo import path

        directory = path()
    found = room.inspect(directory)
    if as_json:
        print(json.dumps(found.as_dict(), indent=1, ensure_ascii=False))
    else:
        print(f"{directory}: {found.kind}, {found.parameters:,} parameters, {found.nbytes / 2**20:,.1f} MiB")
        print("\n".join(room.plan_text(found)))
