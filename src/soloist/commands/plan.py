"""soloist plan: what fits on a card, from the checkpoint's headers, without loading anything."""

from __future__ import annotations

import json
import re
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from soloist.commands._flags import takes_knobs
from soloist.errors import SettingError
from soloist.settings import Settings

if TYPE_CHECKING:
    from soloist.checkpoint.reader import Checkpoint
    from soloist.planner import Plan, Saving

app = typer.Typer(add_completion=False)

KNOBS = (
    "spec", "drafter", "ctx", "kv_format", "kv_format_v", "state_dtype", "dtype", "max_seqs", "verify_rows",
    "reserve_mb", "vision", "vision_offload", "vision_max_images", "vision_max_pixels",
)  # fmt: skip
UNITS = {"": 1 << 30, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
DEFAULT_CARD = "24GB"


def parse_size(text: str, name: str) -> int:
    """ "24GB", "1.3 GiB", "300MB" or "24" (gigabytes) in bytes. Cards are named in units of 1024."""
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([MGT]?)(?:i?B)?\s*", text, re.IGNORECASE)
    if found is None:
        raise SettingError(f"{name} {text!r} is not a size.", f"Write it like {name} 24GB or {name} 300MB.")
    return int(float(found[1]) * UNITS[found[2].upper()])


@app.command()
@takes_knobs(KNOBS)
def plan(
    settings: Settings,
    model: Annotated[str | None, typer.Argument(help="Model directory, or `demo` for the bundled model.")] = None,
    card: Annotated[str | None, typer.Option(help="Size of the card; default: the card of this machine.")] = None,
    used: Annotated[str | None, typer.Option(help="What other programs hold; default: what they hold now.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    engine: Annotated[
        Literal["soloist", "vllm"], typer.Option(help="vllm: estimate for `serve --engine vllm`.")
    ] = "soloist",
    tensor_parallel: Annotated[int, typer.Option(min=1, help="Cards to split over (vllm only).")] = 1,
) -> None:
    """Weights, slots, reserve, pool tokens, residents per context, and which knob buys what."""
    from soloist import planner
    from soloist.checkpoint.reader import open_checkpoint
    from soloist.engine.build import model_directory
    from soloist.engine.capacity import choices, drafter_of

    checkpoint = open_checkpoint(model_directory(settings.model), need_tokenizer=False, need_template=False)
    if engine == "vllm":
        return _plan_vllm(settings, checkpoint, _card(card, used), tensor_parallel, as_json)
    dtype = "bfloat16" if settings.dtype == "auto" else settings.dtype
    chosen = choices(settings, checkpoint, dtype)
    drafter, drafter_bytes = drafter_of(settings, checkpoint, chosen)
    size, taken = _card(card, used)
    given = checkpoint.config, checkpoint.nbytes(), chosen
    result = planner.plan(*given, card=size, used=taken, drafter=drafter, drafter_bytes=drafter_bytes)
    gains = planner.savings(*given, card=size, used=taken, drafter=drafter, drafter_bytes=drafter_bytes)
    if as_json:
        residents = {str(context): result.residents(context) for context in planner.CONTEXTS}
        table = asdict(result) | {"residents": residents, "savings": [asdict(gain) for gain in gains]}
        print(json.dumps(table, indent=1))
    else:
        _print(settings.model, result, gains, chosen.kv_format)
    if not result.fits:
        raise typer.Exit(2)


def _plan_vllm(settings: Settings, checkpoint: Checkpoint, card: tuple[int, int], cards: int, as_json: bool) -> None:
    """What the same directory and knobs need on vLLM, which refuses here what it would refuse there."""
    from soloist.planner import CONTEXTS
    from soloist.scaleout.launch import command
    from soloist.scaleout.plan import estimate, report

    argv = command(settings, checkpoint.directory, device="cuda", tensor_parallel=cards).argv
    kv = argv[argv.index("--kv-cache-dtype") + 1]
    spec = json.loads(argv[argv.index("--speculative-config") + 1]) if "--speculative-config" in argv else {}
    made = estimate(
        checkpoint.config,
        sum(checkpoint.nbytes().values()),
        card=card[0],
        used=card[1],
        cards=cards,
        kv=kv,
        state=settings.state_dtype,
        drafts=int(spec.get("num_speculative_tokens", 0)),
    )
    if as_json:
        residents = {str(context): made.residents(context) for context in CONTEXTS}
        print(json.dumps({**asdict(made), "longest": made.longest(), "residents": residents}, indent=1))
    else:
        print(report(made, CONTEXTS))
    if not made.fits:
        raise typer.Exit(2)


def _card(card: str | None, used: str | None) -> tuple[int, int]:
    """Card size and what is taken on it, from the options or from the card of this machine."""
    size = parse_size(card, "--card") if card else 0
    taken = parse_size(used, "--used") if used else 0
    if card and used:
        return size, taken
    import torch

    if not torch.cuda.is_available():
        return size or parse_size(DEFAULT_CARD, "--card"), taken
    from soloist.planner import CONTEXT, DRIVER

    free, total = torch.cuda.mem_get_info()
    if not card:
        size = total + DRIVER
    return size, taken if used else max(0, total - free - CONTEXT)


def _print(name: str, result: Plan, gains: list[Saving], kv_format: str) -> None:
    from rich.console import Console
    from rich.table import Table

    from soloist.planner import CONTEXTS

    def table(*headings: str) -> Table:
        made = Table(box=None, pad_edge=False, header_style="bold")
        for i, heading in enumerate(headings):
            made.add_column(heading, justify="right" if i else "left", overflow="fold")
        return made

    def gib(size: int) -> str:
        return f"{size / 2**30:.2f}"

    console = Console()
    sizes = table("on the card", "GiB", "")
    sizes.columns[2].justify = "left"
    sizes.add_row("card", gib(result.card), name)
    sizes.add_row("used by others", gib(result.used), "")
    for item in result.items:
        sizes.add_row(item.name, gib(item.nbytes), item.why)
    sizes.add_row("[bold]left for KV[/bold]", gib(result.pool_bytes), f"{result.token_bytes:,} B a token ({kv_format})")
    console.print(sizes)
    console.print()
    if not result.fits:
        console.print(f"It does not fit: {gib(-result.pool_bytes)} GiB are missing.", style="bold")
    else:
        fit = table("pool tokens", "longest context", *(f"at {context:,}" for context in CONTEXTS))
        residents = (str(result.residents(context)) for context in CONTEXTS)
        fit.add_row(f"{result.pool_tokens:,}", f"{result.max_context:,}", *residents)
        console.print(fit)
    if gains:
        console.print()
        buys = table("knob", "pool tokens", "more")
        for gain in gains:
            buys.add_row(gain.knob, f"{gain.pool_tokens:,}", f"{gain.gained:+,}")
        console.print(buys)
