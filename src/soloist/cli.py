"""The `soloist` command: finds the subcommands and turns errors into exit codes.

A subcommand is a module in `soloist/commands/`; dropping a file there registers it. Exit code 2: something the
user can fix (the message and its remedy are on stderr); 1: anything else.
"""

from __future__ import annotations

import sys
from difflib import get_close_matches
from importlib import import_module
from pkgutil import iter_modules
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

import soloist.commands
from soloist.errors import SoloistError, UserError


class Commands(TyperGroup):
    """Imports a command's module when the command is asked for, and not before."""

    def list_commands(self, ctx: Any) -> list[str]:
        names = (m.name for m in iter_modules(soloist.commands.__path__))
        return sorted(n.replace("_", "-") for n in names if not n.startswith("_"))

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in self.list_commands(ctx):
            return None
        module = import_module(f"soloist.commands.{cmd_name.replace('-', '_')}")
        command = typer.main.get_command(module.app)
        command.name = cmd_name
        return command

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        close = get_close_matches(args[0], self.list_commands(ctx), n=1)
        if args[0] not in self.list_commands(ctx) and close:
            _complain(f"There is no command {args[0]}.", f"Did you mean soloist {close[0]}?")
            raise typer.Exit(2)
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except UserError as error:
            _complain(error.message, error.remedy)
            raise typer.Exit(2) from None
        except SoloistError as error:
            _complain(str(error), "")
            raise typer.Exit(1) from None


app = typer.Typer(
    cls=Commands,
    no_args_is_help=True,
    add_completion=False,
    help="Serve one person from one card, exactly and fast. Start with: soloist chat",
)


def _version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        print(version("soloist"))
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    pass


def _complain(message: str, remedy: str) -> None:
    print(f"soloist: {message}", file=sys.stderr)
    if remedy:
        print(f"         {remedy}", file=sys.stderr)


def main() -> None:
    """Entry point of the console script."""
    app()
