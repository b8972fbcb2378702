"""soloist chat: talk to a model in the terminal."""

from __future__ import annotations

from typing import Annotated

import typer

from soloist.commands._flags import takes_knobs
from soloist.settings import Settings

app = typer.Typer(add_completion=False)


@app.command()
@takes_knobs()
def chat(
    settings: Settings,
    model: Annotated[str | None, typer.Argument(help="Model to serve when no server is running yet.")] = None,
    url: Annotated[str | None, typer.Option(help="Talk to this server instead of the one on PORT.")] = None,
    system: Annotated[str, typer.Option(help="System message.", show_default=False)] = "",
    start: Annotated[bool, typer.Option(help="Start a server when none answers.")] = True,
) -> None:
    """Chat with the server on PORT, or start one for the length of the chat. A question on stdin is answered once."""
    from soloist.chat.loop import chat as run

    run(settings, url=url, system=system, may_start=start)
