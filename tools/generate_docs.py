"""Write the pages that come from code (knobs, commands, troubleshooting) and from data (tables between the marks of
`tools/figures.py`); `--check` only says whether they are current.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import figures
import typer
from typer.core import TyperGroup

from soloist import doctor
from soloist.cli import app
from soloist.commands.knobs import markdown
from soloist.settings import KNOBS

DOCS = Path(__file__).resolve().parent.parent / "docs"


FLAGS = {k.flag for k in KNOBS.values()}


def commands_page() -> str:
    """Every command with its usage and its own options, from the same objects as `--help`."""
    root = typer.main.get_command(app)
    parts = ["# Commands", "Written by `make docs`; `soloist COMMAND --help` says the same."]
    _describe(root, root.context_class(root, info_name="soloist"), parts)
    return "\n\n".join(parts) + "\n"


def _describe(command: Any, context: Any, parts: list[str]) -> None:
    if context.parent is not None:
        parts.append(f"{'#' * (context.command_path.count(' ') + 1)} {context.command_path}")
        parts.append(f"    {' '.join([context.command_path, *command.collect_usage_pieces(context)])}")
        parts.append(" ".join((command.help or "").split()))
        own = [p for p in command.params if not getattr(p, "hidden", False) and not FLAGS & set(p.opts)]
        rows = [f"| `{', '.join(p.opts + p.secondary_opts)}` | {p.help or ''} |" for p in own if p.name != "help"]
        if rows:
            parts.append("\n".join(["| | |", "|---|---|", *rows]))
        if any(FLAGS & set(p.opts) for p in command.params):
            parts.append("Every [knob](knobs.md) this command uses is a flag as well.")
    if isinstance(command, TyperGroup):
        for name in command.list_commands(context):
            child = command.get_command(context, name)
            _describe(child, child.context_class(child, info_name=name, parent=context), parts)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="exit with 1 if a page is out of date")
    check = parser.parse_args().check
    pages = {
        DOCS / "knobs.md": markdown(),
        DOCS / "commands.md": commands_page(),
        DOCS / "troubleshooting.md": doctor.markdown(),
    }
    for page in (DOCS.parent / "README.md", *sorted(DOCS.glob("*.md"))):
        if page not in pages and figures.BLOCK.search(text := page.read_text(encoding="utf-8")):
            pages[page] = figures.fill(text)
    stale = []
    for page, text in pages.items():
        if page.exists() and page.read_text(encoding="utf-8") == text:
            continue
        stale.append(page.name)
        if not check:
            page.write_text(text, encoding="utf-8")
    if check and stale:
        print(f"out of date: {', '.join(stale)}; run `make docs`", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
