"""The options that the scenarios of `soloist bench` share: a command that takes `Options` gets them as flags."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from soloist.bench.options import Options
from soloist.settings import from_process

# In the order in which --help shows them: name -> (annotation, default).
SHARED: dict[str, tuple[Any, Any]] = {
    "url": (
        Annotated[str | None, typer.Option(help="Server under test. Default: this machine's HOST and PORT.")],
        None,
    ),
    "model": (
        Annotated[str | None, typer.Option(help="Model name to ask for. Default: the first the server lists.")],
        None,
    ),
    "key": (Annotated[str | None, typer.Option(help="API key. Default: the API_KEY knob.")], None),
    "out": (
        Annotated[Path, typer.Option(help="Directory for the JSON and the plot.")],
        Path("benchmarks/results"),
    ),
    "name": (Annotated[str | None, typer.Option(help="File name without ending. Default: scenario and model.")], None),
    "plot": (
        Annotated[bool, typer.Option("--plot/--no-plot", help="Draw a PNG beside the JSON (needs matplotlib).")],
        True,
    ),
    "serve": (
        Annotated[
            str | None,
            typer.Option(help='Start this command first and stop it afterwards, such as "soloist serve demo".'),
        ],
        None,
    ),
    "repeat": (
        Annotated[int, typer.Option("--repeat", min=1, help="Measure this many times and print the spread.")],
        1,
    ),
    "warm_up": (Annotated[int, typer.Option(min=0, help="Requests before the clock starts.")], 2),
    "thinking": (
        Annotated[
            bool | None,
            typer.Option("--thinking/--no-thinking", help="Ask for thinking on or off. Default: the template's."),
        ],
        None,
    ),
}


def takes_options(
    *, without: tuple[str, ...] = (), **defaults: Any
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Decorator for a scenario's command, whose first parameter is the `Options` that the shared flags make.

    `without` names flags the scenario has no use for; `defaults` replaces a flag's default.
    """

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        own = list(inspect.signature(command, eval_str=True).parameters.values())[1:]
        flags = [
            inspect.Parameter(
                name, inspect.Parameter.KEYWORD_ONLY, default=defaults.get(name, default), annotation=annotation
            )
            for name, (annotation, default) in SHARED.items()
            if name not in without
        ]

        def run(**given: Any) -> None:
            shared = {flag.name: given.pop(flag.name) for flag in flags}
            command(_options(**shared), **given)

        parameters = [*flags, *(p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in own)]
        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {p.name: p.annotation for p in parameters}
        run.__name__, run.__doc__ = command.__name__, command.__doc__
        return run

    return decorate


def _options(
    url: str | None,
    model: str | None,
    key: str | None,
    out: Path,
    name: str | None,
    serve: str | None,
    plot: bool = False,
    repeat: int = 1,
    warm_up: int = 0,
    thinking: bool | None = None,
) -> Options:
    from soloist.bench.options import Options

    settings = from_process()
    return Options(
        url=url or settings.url,
        model=model,
        key=key or (settings.api_key[0] if settings.api_key else None),
        out=out,
        name=name,
        plot=plot,
        repeats=repeat,
        warm_up=warm_up,
        thinking=thinking,
        serve=serve,
    )
