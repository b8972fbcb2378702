"""soloist quantize: a smaller checkpoint in compressed-tensors form."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(add_completion=False)


@app.command()
def quantize(
    directory: Annotated[Path, typer.Argument(help="Model or drafter directory.")],
    out: Annotated[Path, typer.Option(help="Directory to write; must not exist.")],
    part: Annotated[
        list[str],
        typer.Option(help="PART=int4|int8[:rtn|gptq] with PART body, lm_head, embed, mtp or drafter; repeat it."),
    ],
    group: Annotated[int, typer.Option(help="Inputs that share a scale.", min=1)] = 128,
    capture: Annotated[
        Path | None, typer.Option(help="Calibration for gptq: a directory of `soloist capture`.")
    ] = None,
    text: Annotated[
        Path | None, typer.Option(help="Calibration for gptq of body and lm_head: text, or JSON lines.")
    ] = None,
    evaluate: Annotated[
        Path | None, typer.Option(help="Measure perplexity and KL divergence before and after on this text.")
    ] = None,
    tokens: Annotated[int, typer.Option(help="Tokens to take from --text.", min=64)] = 131072,
    evaluate_tokens: Annotated[int, typer.Option(help="Tokens to take from --evaluate.", min=64)] = 8192,
    length: Annotated[int, typer.Option(help="Longest piece of text in tokens.", min=64)] = 2048,
    damping: Annotated[float, typer.Option(help="GPTQ: share of the mean diagonal added to it.", min=0)] = 0.01,
    search: Annotated[bool, typer.Option(help="GPTQ: search each group's scale for the least error.")] = True,
    single_file: Annotated[bool, typer.Option("--single-file", help="Write one model.safetensors.")] = False,
    compact: Annotated[
        bool,
        typer.Option("--compact", help="Replace a quantised embedding's original, which vLLM and transformers need."),
    ] = False,
    device: Annotated[str, typer.Option(help="Where GPTQ computes: auto, cpu or cuda.")] = "auto",
) -> None:
    """Quantise parts of a checkpoint, round to nearest or GPTQ, one layer in memory at a time.

    Parts that are quantised in another format are converted to compressed-tensors without loss. A quantised embedding
    is written beside the dense one, so that vLLM and transformers load the result too. Run the same command again to
    resume.
    """
    from soloist.prepare import run_quantize as room

    request = room.Request(
        directory=directory,
        out=out,
        parts=tuple(part),
        group=group,
        capture=capture,
        text=text,
        evaluate=evaluate,
        tokens=tokens,
        evaluate_tokens=evaluate_tokens,
        length=length,
        damping=damping,
        search=search,
        single_file=single_file,
        compact=compact,
        device=device,
    )
    room.run(request)
