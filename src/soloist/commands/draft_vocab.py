"""soloist draft-vocab: the tokens worth drafting, and the head cut to them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(add_completion=False)


@app.command("draft-vocab")
def draft_vocab(
    directory: Annotated[Path, typer.Argument(help="Model directory; the draft head is added to it.")],
    capture: Annotated[
        Path | None, typer.Option(help="Count over the model's own answers: a directory of `soloist capture`.")
    ] = None,
    text: Annotated[Path | None, typer.Option(help="Count over a text instead: text, or JSON lines.")] = None,
    coverage: Annotated[float, typer.Option(help="Choose the size that covers this share.", min=0, max=1)] = 0.975,
    size: Annotated[int | None, typer.Option(help="Choose this many tokens instead.", min=1)] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw the coverage curve as PNG.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the curve; write nothing.")] = False,
) -> None:
    """Count tokens, print how many are needed to cover them, and write the draft head and its id list."""
    from collections import Counter

    from soloist.checkpoint.reader import open_checkpoint
    from soloist.errors import SettingError
    from soloist.prepare import draft_vocab as room
    from soloist.prepare.texts import Reader

    if (capture is None) == (text is None):
        raise SettingError("Tokens are counted over --capture or --text.", "Give one of the two.")
    config = open_checkpoint(directory, need_template=False).config
    reader = Reader(directory)
    if capture is not None:
        counts = room.read_counts(capture)
    else:
        assert text is not None
        counts = Counter(token for ids in reader.texts(text, 1 << 20, 1 << 40) for token in ids)
    always = room.control_ids(reader.tokenizer.added, config.eos_ids)
    chosen = size or room.size_for(counts, always, coverage, config.vocab_size)
    ids = room.choose(counts, always, chosen, config.vocab_size)
    points = room.curve(counts, always, config.vocab_size)
    print(f"{counts.total():,} tokens, {len(counts):,} different")
    for point in points:
        print(f"{point.size:>8} tokens cover {100 * point.coverage:6.2f} %")
    print(f"chosen: {chosen} tokens cover {100 * room.coverage(counts, ids):.2f} %")
    if plot is not None:
        room.plot(points, chosen, plot)
    if not dry_run:
        room.write(directory, ids)
        print(f"{directory} has a draft head of {chosen} rows.")
