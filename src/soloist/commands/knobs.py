"""soloist knobs: the table of knobs."""

from __future__ import annotations

from typing import Annotated

import typer

from soloist.settings import KNOBS, Settings, from_process

app = typer.Typer(add_completion=False)


@app.command()
def knobs(
    as_markdown: Annotated[bool, typer.Option("--markdown", help="Print the documentation page instead.")] = False,
) -> None:
    """List every knob: its default, its values, and what this shell and .env set it to."""
    if as_markdown:
        print(markdown(), end="")
        return
    _print(from_process())


def markdown() -> str:
    """docs/knobs.md: one table per group."""
    parts = [
        "# Knobs\n",
        "Written by `make docs` from `src/soloist/settings.py`.\n",
        "A knob is an environment variable (`MAX_LEN=8192 soloist serve`), a line in `.env`, or a flag",
        "(`--max-len 8192`); MODEL is the argument of `soloist serve`. A flag wins over the environment, the",
        "environment over `.env`. Empty means unset. What is not valid is refused with the nearest valid value.",
    ]
    group = ""
    for knob in KNOBS.values():
        if knob.group != group:
            group = knob.group
            parts += [f"\n## {group}\n", "| knob | default | values | what it does |", "|---|---|---|---|"]
        values = knob.values.replace("|", "\\|")
        default = f"`{knob.show(knob.default)}`" if knob.show(knob.default) else ""
        parts.append(f"| `{knob.env}` | {default} | {values} | {knob.help} |")
    return "\n".join(parts) + "\n"


def _print(settings: Settings) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading in ("knob", "default", "values", "now", "what it does"):
        table.add_column(heading, overflow="fold")
    group = ""
    for name, knob in KNOBS.items():
        if knob.group != group:
            group = knob.group
            table.add_section()
            table.add_row(f"[bold]{group}[/bold]")
        now = "set" if knob.secret else knob.show(getattr(settings, name))
        source = f"{now} ({settings.origins[name]})" if settings.given(name) else ""
        table.add_row(knob.env, knob.show(knob.default), knob.values, source, knob.help)
    console = Console()
    console.print(table)
    for note in settings.notes:
        console.print(note, style="yellow")
