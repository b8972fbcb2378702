"""Between the command line and a scenario: the client, the progress bar, what is printed and what is written."""

from __future__ import annotations

import asyncio
import re
import signal
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table as RichTable

from soloist.bench.client import Client
from soloist.bench.machine import command_line, describe_run
from soloist.bench.options import Options
from soloist.bench.plots import draw, require_matplotlib
from soloist.bench.result import Result
from soloist.bench.run import Context
from soloist.bench.serving import OwnServer
from soloist.errors import UserError

PIPE_WIDTH = 160
Scenario = Callable[[Context], Awaitable[Result]]


def execute(options: Options, scenario: Scenario, title: str, total: int | None) -> int:
    """Run a scenario and report it; returns the exit code: 0, or 1 when something it checks failed."""
    if options.plot:
        require_matplotlib()
    console = Console() if sys.stdout.isatty() else Console(width=PIPE_WIDTH)
    try:
        result = asyncio.run(_measure(options, scenario, title, total, console))
    except asyncio.CancelledError:
        raise UserError("The benchmark was ended before it was complete.", "Run it again.") from None
    show(result, console)
    for path in write(result, options):
        console.print(f"[dim]written: {path}[/dim]")
    return 0 if result.passed else 1


async def _measure(options: Options, scenario: Scenario, title: str, total: int | None, console: Console) -> Result:
    running = asyncio.current_task()
    if running is not None:  # a supervisor's SIGTERM must not leave a server of ours behind
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, running.cancel)
    server = OwnServer(options.serve, options.url, options.out / "server.log") if options.serve else None
    try:  # from here on, so that one that is still starting is ended too
        if server is not None:
            console.print(f"[dim]server answered after {await server.start():.1f} s[/dim]")
        async with Client(options.url, model=options.model, key=options.key) as client:
            with _progress() as progress:
                task = progress.add_task(title, total=total, last="")

                def tick(text: str) -> None:
                    progress.update(task, advance=1, last=text)

                context = Context(client, options.repeats, options.warm_up, options.request_fields, tick, server)
                result = await scenario(context)
                progress.update(task, completed=total or progress.tasks[task].completed)
            result.about = await describe_run(client, command_line())
            if client.refused:
                result.notes.append(f"The server refused and did not get: {', '.join(client.refused)}.")
    finally:
        if server is not None:
            await server.stop()
    return result


def _progress() -> Progress:
    return Progress(
        SpinnerColumn(),
        TextColumn("[bold]{task.description}"),
        BarColumn(bar_width=30),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("[dim]{task.fields[last]}"),
        console=Console(stderr=True),
        transient=True,
    )


def show(result: Result, console: Console) -> None:
    """Print tables, notes and failures."""
    server = result.about.get("server", {})
    facts = [server.get("model"), server.get("url"), result.about.get("commit")]
    console.print(f"\n[bold]{result.scenario}[/bold]  [dim]{escape('  '.join(str(f) for f in facts if f))}[/dim]")
    for table in result.tables:
        shown = RichTable(title=table.title, title_justify="left", header_style="bold", title_style="")
        for column in table.columns:
            shown.add_column(column.header, justify="left" if column.digits is None else "right", overflow="fold")
        for row in table.rows:
            shown.add_row(*(escape(table.cell(row, column)) for column in table.columns))
        console.print(shown)
    for note in result.notes:
        console.print(f"[dim]{escape(note)}[/dim]")
    for failure in result.failures:
        console.print(f"[red]FAIL[/red] {escape(failure)}")


def write(result: Result, options: Options) -> list[Path]:
    """Write the JSON, and the PNG beside it; returns both paths."""
    name = options.name or f"{result.scenario}-{slug(str(result.about.get('server', {}).get('model', 'model')))}"
    data = options.out / f"{name}.json"
    result.write(data)
    if not options.plot or not result.panels:
        return [data]
    picture = data.with_suffix(".png")
    model = str(result.about.get("server", {}).get("model", ""))
    draw(result.panels, picture, title=f"{result.scenario}, {model.rstrip('/').split('/')[-1]}", footer=footer(result))
    return [data, picture]


def slug(text: str) -> str:
    """A file name part: letters, digits, dots and dashes."""
    return re.sub(r"[^A-Za-z0-9.]+", "-", text.rstrip("/").split("/")[-1]).strip("-").lower() or "model"


def footer(result: Result) -> str:
    """The line under a plot: machine, server, commit, date."""
    about = result.about
    machine, server = about.get("machine", {}), about.get("server", {})
    cards = ", ".join(g.get("name", "?") for g in machine.get("gpus", []))
    where = cards or f"{machine.get('cpu', '?')}, {machine.get('cores', '?')} cores"
    who = " ".join(str(server[k]) for k in ("owned_by", "version") if server.get(k))
    return "  |  ".join(
        str(x) for x in (where, who, about.get("commit"), str(about.get("taken", ""))[:10]) if x
    )  # fmt: skip
