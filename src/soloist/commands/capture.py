"""soloist capture: calibration and token counts from the model's own answers."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from soloist.commands._flags import takes_knobs
from soloist.settings import Settings

app = typer.Typer(add_completion=False)


@app.command()
@takes_knobs(("drafter", "spec", "draft_tokens", "max_len", "max_seqs", "device", "dtype", "threads"))
def capture(
    settings: Settings,
    model: Annotated[str | None, typer.Argument(help="Model directory, or `demo`.")] = None,
    *,
    out: Annotated[Path, typer.Option(help="Directory to write.")],
    prompts: Annotated[
        Path | None,
        typer.Option(
            help="One prompt per line, or JSON lines with text, messages or ids. Default: 180 that come with Soloist; "
            "prompts like your own calibrate better."
        ),
    ] = None,
    part: Annotated[
        list[str] | None, typer.Option(help="lm_head, mtp or drafter; repeat it. Default: head and what drafts.")
    ] = None,
    tokens: Annotated[int, typer.Option(help="Longest answer in tokens.", min=1)] = 512,
    temperature: Annotated[float | None, typer.Option(help="Default: the model's sampling defaults.", min=0)] = None,
    thinking: Annotated[bool | None, typer.Option(help="Ask for thinking on or off. Default: the template's.")] = None,
    seed: Annotated[int, typer.Option(help="Seed of the first batch of answers.")] = 0,
) -> None:
    """Answer prompts with the serving engine and keep Hessians (for GPTQ), the answers and the token counts."""
    from soloist.prepare import run_capture as room

    room.run(settings, prompts, out, part or [], tokens, temperature, thinking, seed)
