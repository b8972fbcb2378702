"""soloist serve: the OpenAI-compatible server."""

from __future__ import annotations

import os
import signal
import threading
from typing import Annotated, Literal

import typer

from soloist import progress
from soloist.commands._flags import takes_knobs
from soloist.errors import SettingError
from soloist.settings import Settings

app = typer.Typer(add_completion=False)


@app.command()
@takes_knobs()
def serve(
    settings: Settings,
    model: Annotated[str | None, typer.Argument(help="Model directory, or `demo` for the bundled model.")] = None,
    engine: Annotated[
        Literal["soloist", "vllm"], typer.Option(help="vllm: hand the model and the knobs to vLLM's server.")
    ] = "soloist",
    tensor_parallel: Annotated[int, typer.Option(min=1, help="Cards to split the model over (vllm only).")] = 1,
    vllm: Annotated[str | None, typer.Option(help="Path of the vllm command, if not beside this one.")] = None,
    vllm_args: Annotated[str, typer.Option(help="More options for vLLM, as one text.")] = "",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print vLLM's command and stop (vllm only).")] = False,
    progress_fd: Annotated[int | None, typer.Option(hidden=True)] = None,
) -> None:
    """Serve a model over HTTP until interrupted. Every knob is a flag, an environment variable or a line in .env."""
    if engine == "vllm":
        from soloist.scaleout.launch import hand_over

        return hand_over(settings, tensor_parallel, vllm, vllm_args, dry_run)
    if tensor_parallel > 1 or vllm or vllm_args or dry_run:
        raise SettingError("--tensor-parallel, --vllm, --vllm-args and --dry-run belong to vLLM.", "Add --engine vllm.")
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
