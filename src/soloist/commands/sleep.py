"""soloist sleep: give the running server's card back until somebody asks again."""

from __future__ import annotations

from typing import Annotated

import typer

app = typer.Typer(add_completion=False)

Url = Annotated[str | None, typer.Option(help="Server to speak to. Default: this machine's HOST and PORT.")]
Key = Annotated[str | None, typer.Option(help="API key. Default: the API_KEY knob.")]


@app.command()
def sleep(url: Url = None, key: Key = None) -> None:
    """Give the card of the running server back; the next request, or `soloist wake`, takes it again.

    Sessions stay: in host memory, and on disk where SESSION_DIR keeps them. IDLE_RELEASE_MIN does this by itself.
    """
    from soloist.commands._server import post

    print(post("/sleep", url, key)["state"])
