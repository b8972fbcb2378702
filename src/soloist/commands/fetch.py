"""soloist fetch: models and drafters from the Hub or a local mirror."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(add_completion=False)


@app.command()
def fetch(
    name: Annotated[
        str | None, typer.Argument(help="A recipe, or OWNER/NAME on the Hub. Without: list recipes.")
    ] = None,
    into: Annotated[Path, typer.Option(help="Directory that receives OWNER/NAME/.")] = Path("models"),
    revision: Annotated[
        str | None, typer.Option(help="Branch, tag or commit. Default: the recipe's, else main.")
    ] = None,
    origin: Annotated[
        Path | None, typer.Option("--from", help="Copy from a local directory that holds OWNER/NAME/ instead.")
    ] = None,
    drafter: Annotated[bool, typer.Option(help="Fetch the recipe's drafter too.")] = True,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would be fetched, and stop.")] = False,
) -> None:
    """Fetch a model and its drafter, checking sizes and free space; run it again to resume."""
    from soloist import progress
    from soloist.prepare import fetch as room

    if name is None:
        for known, recipe in room.recipes().items():
            print(f"{known:22} {recipe['about']}")
        return
    source = room.Hub() if origin is None else room.Mirror(origin)
    items = room.plan(room.resolve(name, revision, drafter), source, into)
    for item in items:
        state = (
            "complete" if not item.missing else f"{item.bytes_missing / 1e9:.2f} of {item.nbytes / 1e9:.2f} GB missing"
        )
        print(f"{item.role}: {item.repo} -> {item.directory} ({len(item.files)} files, {state})")
        if dry_run:
            for file in item.missing:
                print(f"  {file.size:>14,}  {file.name}")
    if dry_run:
        room.check_space(items, into)
        return
    with progress.bar("Fetching") as shown:
        room.fetch(items, source, into, shown)
    if name in room.recipes():
        print("Next:")
        for line in room.next_steps(name, {item.role: item.directory for item in items}):
            print(f"  {line}")
