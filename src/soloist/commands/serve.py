"""soloist serve: the OpenAI-compatible server."""

from __future__ import annotations

import os
import signal
import threading
from typing import Annotated

import typer

from soloist import progress
from soloist.commands._flags import takes_knobs
from soloist.settings import Settings

app = typer.Typer(add_completion=False)


@app.command()
@takes_knobs()
def serve(
    settings: Settings,
    model: Annotated[str | None, typer.Argument(help="Model directory, or `demo` for the bundled model.")] = None,
    progress_fd: Annotated[int | None, typer.Option(hidden=True)] = None,
) -> None:
    """Serve a model over HTTP until interrupted. Every knob is a flag, an environment variable or a line in .env."""
    from soloist.server.main import run

    if progress_fd is None:
        with progress.bar(f"Loading {settings.model}") as shown:
            run(settings, shown)
    else:
        threading.Thread(target=_end_with_parent, name="parent-watch", daemon=True).start()
        with open(progress_fd, "w") as pipe:
            run(settings, progress.lines(pipe))


def _end_with_parent() -> None:
    """The parent holds the other end of stdin: when that closes, however the parent ended, so does this server."""
    # Not sys.stdin: its lock, held by a blocked thread, would abort the interpreter's exit.
    while os.read(0, 4096):
        pass
    os.kill(os.getpid(), signal.SIGTERM)
