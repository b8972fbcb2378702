"""soloist doctor: is everything in place, and what to do if not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from collections.abc import Sequence

    from soloist.checks.base import Finding

app = typer.Typer(add_completion=False)
COLOURS = {"PASS": "green", "WARN": "yellow", "FAIL": "red"}


@app.command()
def doctor(
    model: Annotated[str | None, typer.Argument(help="Model directory to look at; default: the MODEL knob.")] = None,
    drafter: Annotated[str | None, typer.Option(help="Drafter directory; default: the DRAFTER knob.")] = None,
    spec: Annotated[str | None, typer.Option(help="Drafter kind; default: the SPEC knob.")] = None,
    port: Annotated[str | None, typer.Option(help="Port; default: the PORT knob.")] = None,
    server: Annotated[bool, typer.Option("--server", help="Look at a running server instead.")] = False,
    url: Annotated[str | None, typer.Option(help="With --server: its address; default: HOST and PORT.")] = None,
    self_check: Annotated[
        bool, typer.Option("--self-check", help="Also run E1, E2 and E3 with your model (about two minutes).")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the findings as JSON.")] = False,
    debug_bundle: Annotated[
        bool, typer.Option("--debug-bundle", help="Write a ZIP with settings, versions and findings, without keys.")
    ] = False,
    request: Annotated[
        Path | None, typer.Option(help="With --debug-bundle: JSON body of a request that goes wrong, sent again.")
    ] = None,
    as_markdown: Annotated[bool, typer.Option("--markdown", help="Print the troubleshooting page.")] = False,
) -> None:
    """Check install, card, model directory, drafter, knobs, port and disk; each problem comes with its remedy.

    Exit code 0: nothing failed; 1: something did.
    """
    from soloist import doctor as room
    from soloist.checks.contracts import SELF_CHECKS
    from soloist.checks.live import SERVER_CHECKS

    if as_markdown:
        print(room.markdown(), end="")
        return
    flags = {"model": model, "drafter": drafter, "spec": spec, "port": port}
    subject = room.this_machine({k: v for k, v in flags.items() if v is not None}, url)
    checks = [*(SERVER_CHECKS if server or url else room.CHECKS), *(SELF_CHECKS if self_check else ())]
    findings = room.examine(subject, checks)
    if as_json:
        print(json.dumps([f.as_dict() for f in findings], indent=1, ensure_ascii=False))
    else:
        _show(findings)
    if debug_bundle:
        from soloist.checks.bundle import default_name, write_bundle

        out = default_name()
        names = write_bundle(subject, findings, out, request)
        typer.echo(f"{out}: {', '.join(names)}", err=as_json)
    raise typer.Exit(room.exit_code(findings))


def _show(findings: Sequence[Finding]) -> None:
    from rich.console import Console
    from rich.markup import escape

    console = Console(highlight=False)
    width = max(len(f.check) for f in findings)
    for f in findings:
        colour = COLOURS[f.status.value]
        console.print(f"[{colour}]{f.status.value}[/{colour}]  {f.check:<{width}}  {escape(f.summary)}", soft_wrap=True)
        if f.remedy:
            console.print(f"      {'':<{width}}  -> {escape(f.remedy)}", soft_wrap=True)
    counts = {s: sum(f.status.value == s for f in findings) for s in COLOURS}
    console.print("  ".join(f"{n} {s}" for s, n in counts.items() if n), style="bold")
