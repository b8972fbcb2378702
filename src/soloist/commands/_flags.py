"""Turns knobs into flags: a command that takes `Settings` gets one flag per knob it names."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterable
from typing import Annotated, Any

import typer

from soloist.settings import KNOBS, from_process


def takes_knobs(names: Iterable[str] = tuple(KNOBS)) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Decorator for a command whose first parameter is the resolved Settings.

    Knobs in `names` become flags whose texts `settings.resolve` parses (one parser, one wording for refusals). A
    parameter of the command with a knob's name stays as the command declares it, and feeds that knob when given.
    """

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        signature = inspect.signature(command, eval_str=True)
        own = list(signature.parameters.values())[1:]
        fed = {p.name for p in own if p.name in KNOBS}
        flags = [_option(n) for n in names if n not in fed]

        def run(**given: Any) -> None:
            texts = {f.name: given.pop(f.name) for f in flags}
            texts |= {n: given.pop(n) for n in fed}
            settings = from_process(texts)
            for note in settings.notes:
                print(f"soloist: {note}", file=sys.stderr)
            command(settings, **given)

        parameters = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in own] + flags
        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {p.name: p.annotation for p in parameters}
        run.__name__, run.__doc__ = command.__name__, command.__doc__
        return run

    return decorate


def _option(name: str) -> inspect.Parameter:
    knob = KNOBS[name]
    default = knob.show(knob.default)
    option = typer.Option(
        knob.flag,
        help=f"{knob.help} (default {default})" if default else knob.help,
        rich_help_panel=knob.group,
        metavar=knob.values.replace(" | ", "|"),
        show_default=False,
    )
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[str | None, option]
    )
