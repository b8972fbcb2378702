"""soloist wake: have a sleeping server take its card again, before the first request has to wait for it."""

from __future__ import annotations

import typer

from soloist.commands.sleep import Key, Url

app = typer.Typer(add_completion=False)


@app.command()
def wake(url: Url = None, key: Key = None) -> None:
    """Have a sleeping server take its card again; returns when requests can run."""
    from soloist.commands._server import post

    print(post("/wake_up", url, key)["state"])
