"""soloist bench: tables and plots that anyone can reproduce, against any OpenAI-compatible server."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from soloist.bench.options import Options
from soloist.commands._bench_options import takes_options
from soloist.errors import UserError

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    help="Tables and plots that anyone can reproduce, against any OpenAI-compatible server.",
)

MaxTokens = Annotated[int, typer.Option(min=1, help="Longest answer in tokens.")]
PARTS = "perplexity,battery,needle"


def _finish(options: Options, scenario: Callable[[Any], Awaitable[Any]], title: str, total: int | None = None) -> None:
    from soloist.bench.console import execute

    raise typer.Exit(execute(options, scenario, title, total))


def numbers(text: str, what: str) -> list[int]:
    """`1,2,4` to [1, 2, 4]; a UserError names the option at fault."""
    try:
        found = [int(part) for part in text.split(",") if part.strip()]
    except ValueError:
        found = []
    if not found or min(found) < 1:
        raise UserError(f"{what} {text!r} is not a list of positive integers.", f"Write it like {what} 1,2,4.")
    return found


@app.command()
@takes_options()
def single(
    options: Options,
    max_tokens: MaxTokens = 1024,
    cohorts: Annotated[str, typer.Option(help="How many requests run together, comma-separated.")] = "1,2,4,8",
    sampling: Annotated[str, typer.Option(help="default, greedy, or both with a comma.")] = "default,greedy",
    prompts: Annotated[Path | None, typer.Option(help="JSON file of prompts instead of the eight built in.")] = None,
) -> None:
    """Eight chat prompts in cohorts: decode rate, tokens per step, acceptance per position, time to first token."""
    from soloist.bench.promptset import chat_prompts
    from soloist.bench.scenarios import single as scenario

    sizes, chosen = numbers(cohorts, "--cohorts"), chat_prompts(prompts)
    modes = [m.strip() for m in sampling.split(",") if m.strip()]
    if not modes or set(modes) - set(scenario.MODES):
        raise UserError(f"--sampling {sampling!r} is not known.", "Use default, greedy, or default,greedy.")
    _finish(
        options,
        lambda c: scenario.run(c, chosen, max_tokens=max_tokens, cohorts=sizes, modes=modes),
        "single",
        scenario.steps(len(chosen), options.repeats, sizes, modes),
    )


@app.command()
@takes_options()
def ladder(
    options: Options,
    max_tokens: MaxTokens = 256,
    rungs: Annotated[str, typer.Option(help="Numbers of streams, comma-separated.")] = "1,2,3,4,5,6,7,8",
    prompt_tokens: Annotated[int, typer.Option(min=16, help="Length of each prompt in tokens.")] = 4096,
    shared: Annotated[bool, typer.Option("--shared", help="Give all streams the same prompt.")] = False,
) -> None:
    """One to eight long prompts at a time: rate per stream and in all, ms and rows per forward, saturation."""
    from soloist.bench.scenarios import ladder as scenario

    steps = numbers(rungs, "--rungs")
    _finish(
        options,
        lambda c: scenario.run(c, rungs=steps, prompt_tokens=prompt_tokens, max_tokens=max_tokens, shared=shared),
        "ladder",
        sum(steps) * options.repeats,
    )


@app.command()
@takes_options()
def document(
    options: Options,
    max_tokens: MaxTokens = 1024,
    tokens: Annotated[int, typer.Option(min=64, help="Length of the document in tokens.")] = 25_000,
    copy_lines: Annotated[int, typer.Option(min=1, help="Lines to reproduce verbatim.")] = 60,
    ask_restart: Annotated[
        bool, typer.Option("--ask-restart", help="Wait for a restart by hand before the last turn.")
    ] = False,
) -> None:
    """Six tasks over a long document, then a chat about it with the cache on, off and after a restart."""
    from soloist.bench.scenarios import document as scenario

    def wait() -> None:
        typer.confirm("Restart the server now. Is it answering again?", abort=True)

    _finish(
        options,
        lambda c: scenario.run(
            c,
            tokens=tokens,
            copy_lines=copy_lines,
            max_tokens=max_tokens,
            wait_for_restart=wait if ask_restart else None,
        ),
        "document",
        6 * options.repeats + 2 * len(scenario.QUESTIONS),
    )


@app.command()
@takes_options(without=("repeat",))
def soak(
    options: Options,
    max_tokens: MaxTokens = 200,
    rounds: Annotated[
        int | None, typer.Option(min=2, help="Stop after this many rounds (10 without --minutes).")
    ] = None,
    minutes: Annotated[float | None, typer.Option(min=0, help="Stop after this many minutes.")] = None,
    streams: Annotated[int, typer.Option(min=1, help="Requests per round.")] = 8,
    plain: Annotated[
        bool, typer.Option("--plain", help="Leave out thinking, schemas, tools, log-probabilities.")
    ] = False,
) -> None:
    """The same mixed requests for rounds or hours: same texts, all finished, pages and memory back; exit 1 if not."""
    from soloist.bench.promptset import chat_prompts
    from soloist.bench.scenarios import soak as scenario

    _finish(
        options,
        lambda c: scenario.run(
            c,
            chat_prompts(),
            rounds=rounds,
            minutes=minutes,
            streams=streams,
            max_tokens=max_tokens,
            features=not plain,
        ),
        "soak",
        rounds if minutes is None else None,
    )


@app.command()
@takes_options(without=("plot", "repeat", "warm_up"))
def smoke(
    options: Options,
    only: Annotated[str | None, typer.Option(help="Only features whose name contains this.")] = None,
) -> None:
    """One request per API feature, PASS or FAIL; exit 1 when one fails."""
    from soloist.bench.scenarios import smoke as scenario

    _finish(options, lambda c: scenario.run(c, only), "smoke", None if only else len(scenario.PROBES))


@app.command()
@takes_options()
def prefill(
    options: Options,
    lengths: Annotated[str, typer.Option(help="Prompt lengths in tokens, comma-separated.")] = "512,2048,8192",
    cohorts: Annotated[str, typer.Option(help="How many prompts run together, comma-separated.")] = "1,4",
) -> None:
    """Prompt tokens per second over lengths and concurrency, nothing cached."""
    from soloist.bench.scenarios import prefill as scenario

    sizes, streams = numbers(lengths, "--lengths"), numbers(cohorts, "--cohorts")
    _finish(
        options,
        lambda c: scenario.run(c, lengths=sizes, cohorts=streams),
        "prefill",
        len(sizes) * sum(streams) * options.repeats,
    )


@app.command()
@takes_options(without=("repeat",), warm_up=1)
def quality(
    options: Options,
    max_tokens: MaxTokens = 96,
    only: Annotated[str, typer.Option(help="Parts, comma-separated: perplexity, battery, needle.")] = PARTS,
    texts: Annotated[Path | None, typer.Option(help="Directory of KIND-NAME.txt files for perplexity.")] = None,
    battery: Annotated[Path | None, typer.Option(help="JSON Lines file of questions.")] = None,
    needle: Annotated[Path | None, typer.Option(help="JSON file of needles.")] = None,
    lengths: Annotated[str, typer.Option(help="Haystack lengths in tokens, comma-separated.")] = "500,1000",
    against: Annotated[
        str | None, typer.Option(help="URL of a second server: divergence of its log-probabilities.")
    ] = None,
) -> None:
    """Perplexity, exact match, needle in a haystack, and the divergence from another server."""
    from soloist.bench.client import Client
    from soloist.bench.scenarios import quality as scenario

    parts = [p.strip() for p in only.split(",") if p.strip()]
    sources = scenario.Sources(
        texts=texts,
        battery=battery,
        needle=needle,
        lengths=numbers(lengths, "--lengths"),
        max_tokens=max_tokens,
        parts=parts,
    )

    async def measure(context: Any) -> Any:
        if against is None:
            return await scenario.run(context, sources)
        async with Client(against, key=options.key) as other:
            return await scenario.run(context, sources, other)

    _finish(options, measure, "quality")


@app.command()
def step(
    synthetic: Annotated[str, typer.Option(help="Shape to build random weights of.")] = "qwen3.8-27b",
    layers: Annotated[int, typer.Option(min=1, help="Decoder layers.")] = 64,
    rows: Annotated[str, typer.Option(help="Rows of one request's step, comma-separated.")] = "1,5,8,16",
    contexts: Annotated[str, typer.Option(help="Context lengths in tokens, comma-separated.")] = "1024,25600",
    state_dtype: Annotated[str, typer.Option(help="float32 or float16.")] = "float16",
    kv: Annotated[str, typer.Option(help="Format of keys and values: bf16, fp8, int8, kvarn.")] = "bf16",
    prompts: Annotated[str, typer.Option(help="Lengths of the prompts to prefill, comma-separated.")] = "1024,16384",
) -> None:
    """One verify step on this card from inside: milliseconds against the bandwidth floor. Needs no server."""
    from soloist.bench.step import main

    counts, lengths = tuple(numbers(rows, "--rows")), tuple(numbers(contexts, "--contexts"))
    main(synthetic, layers, counts, lengths, state_dtype, kv, tuple(numbers(prompts, "--prompts")))


@app.command()
def report(
    runs: Annotated[list[Path], typer.Argument(help="JSON files that `soloist bench` wrote.")],
    out: Annotated[Path, typer.Option(help="Markdown file to write; PNGs go beside it.")] = Path("report.md"),
    plot: Annotated[bool, typer.Option("--plot/--no-plot", help="Draw PNGs beside it (needs matplotlib).")] = True,
) -> None:
    """Several runs side by side, as Markdown and PNG."""
    from soloist.bench.report import write_report

    for path in write_report(runs, out, plot=plot):
        print(path)
