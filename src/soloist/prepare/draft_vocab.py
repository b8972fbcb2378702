"""`soloist draft-vocab`: the tokens worth drafting, counted over the model's own answers, and the head cut to them.

A token outside the list is a certain rejection and ends a chain; a shorter list makes every draft cheaper. The
list is the most frequent tokens plus the control tokens a model emits; the head is their rows of `lm_head`, gathered
in whatever form it is stored (slicing rows of a row-grouped format is exact).
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from soloist.checkpoint import formats
from soloist.checkpoint.formats import pack_quantized
from soloist.checkpoint.reader import DRAFT_HEAD, open_checkpoint
from soloist.checkpoint.shards import BESIDE, INDEX_NAME, read_beside, read_directory
from soloist.checkpoint.writer import index_text, write_file_atomic, write_text_atomic
from soloist.errors import CheckpointError, UserError
from soloist.ops.linear import DenseWeight, QuantizedWeight, Weight
from soloist.prepare.recipe import TOKENS

LISTED = "draft_vocab_ids.json"
CONTROL = (
    "<|im_start|>",
    "<|im_end|>",
    "<|endoftext|>",
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
    "<tool_response>",
    "</tool_response>",
)


@dataclass(frozen=True)
class Point:
    """A list of `size` tokens covers `coverage` of the counted tokens."""

    size: int
    coverage: float


def read_counts(capture: Path) -> Counter[int]:
    """Token counts of a capture directory."""
    path = capture / TOKENS
    try:
        table = json.loads(path.read_text(encoding="utf-8"))
        return Counter({int(token): int(n) for token, n in table.items()})
    except (OSError, ValueError, AttributeError):
        raise CheckpointError(f"{path} is not a token count.", "Run `soloist capture` first.") from None


def control_ids(vocabulary: Mapping[str, int], eos: Sequence[int]) -> set[int]:
    """Ids of the control tokens this vocabulary has, and the stop ids."""
    return {vocabulary[token] for token in CONTROL if token in vocabulary} | set(eos)


def choose(counts: Counter[int], always: set[int], size: int, vocab: int) -> torch.Tensor:
    """`size` ids int64, ascending: `always`, then the most frequent, then (where too few were seen) the lowest ids."""
    if not len(always) <= size <= vocab:
        raise UserError(
            f"A draft vocabulary of {size} does not hold the {len(always)} control tokens of {vocab} tokens.",
            f"Choose --size between {len(always)} and {vocab}.",
        )
    ranked = sorted((token for token in counts if token not in always), key=lambda token: (-counts[token], token))
    chosen = always | set(ranked[: size - len(always)])
    unseen = (token for token in range(vocab) if token not in chosen)
    while len(chosen) < size:
        chosen.add(next(unseen))
    return torch.tensor(sorted(chosen), dtype=torch.int64)


def coverage(counts: Counter[int], ids: torch.Tensor) -> float:
    """Share of the counted tokens that a list covers."""
    total = counts.total()
    return sum(counts[token] for token in ids.tolist()) / total if total else 0.0


def curve(counts: Counter[int], always: set[int], vocab: int) -> list[Point]:
    """Coverage at powers of two (and halfway between) up to the vocabulary."""
    sizes = sorted({size for i in range(20) for size in (1 << i, 3 << i) if len(always) <= size < vocab} | {vocab})
    return [Point(size, coverage(counts, choose(counts, always, size, vocab))) for size in sizes]


def size_for(counts: Counter[int], always: set[int], wanted: float, vocab: int, multiple: int = 64) -> int:
    """The smallest size, in multiples of `multiple`, that covers `wanted` of the counted tokens."""
    total = counts.total()
    covered = sum(counts[token] for token in always)
    size = len(always)
    for token, n in counts.most_common():
        if covered >= wanted * total:
            break
        if token not in always:
            covered += n
            size += 1
    return min(-(-size // multiple) * multiple, vocab)


def plot(points: Sequence[Point], chosen: int, path: Path) -> None:
    """Draw the coverage curve. Raises UserError without matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise UserError("Plots need matplotlib.", "Install soloist[bench].") from None
    figure = Figure(figsize=(6, 4))
    axes = figure.subplots()
    axes.plot([p.size for p in points], [100 * p.coverage for p in points], marker="o")
    axes.axvline(chosen, linestyle="--", color="grey", label=f"chosen: {chosen}")
    axes.set(xscale="log", xlabel="draft vocabulary, tokens", ylabel="tokens covered, %")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=120, bbox_inches="tight")


def gather(weight: Weight, ids: torch.Tensor) -> Weight:
    """Rows `ids` of a weight in its own form."""
    if isinstance(weight, DenseWeight):
        return DenseWeight(weight.weight[ids], None if weight.bias is None else weight.bias[ids])
    zeros = None if weight.zeros is None else weight.zeros[ids]
    shape = (len(ids), weight.shape[1])
    return QuantizedWeight(weight.codes[ids], weight.scales[ids], zeros, weight.bits, weight.group, shape)


def write(directory: Path, ids: torch.Tensor) -> None:
    """Add the draft head and its id list to a checkpoint directory, or replace them.

    They go into `soloist.safetensors`, which other readers pass by, in one replacement of that file. A head that the
    index names (the layout of published recipes, which unchanged vLLM refuses) is struck from it.
    """
    checkpoint = open_checkpoint(directory, need_template=False)
    if not checkpoint.has_mtp:
        raise CheckpointError(f"{directory} has no MTP module to draft with.", "Use a checkpoint with mtp.* tensors.")
    head = "lm_head" if "lm_head" in checkpoint.modules else "embed_tokens"
    weight = gather(formats.load(checkpoint.modules[head], copy=False), ids)
    if isinstance(weight, DenseWeight):
        tensors = {"weight": weight.weight}
    else:
        tensors = pack_quantized.stored_tensors(weight)
    kept = {name: info for name, info in read_beside(directory).items() if not name.startswith("mtp.draft_")}
    stored = {f"{DRAFT_HEAD}.{suffix}": tensor for suffix, tensor in tensors.items()}
    indexed = {
        name: (info.shard.path.name, info.nbytes)
        for name, info in read_directory(directory).items()
        if not name.startswith("mtp.draft_")
    }
    # The index before the file it must not name: without one, other readers take every file there is.
    write_text_atomic(directory / INDEX_NAME, index_text(indexed))
    write_file_atomic(
        directory / BESIDE, {**{n: info.view() for n, info in kept.items()}, **stored, "mtp.draft_vocab_ids": ids}
    )
    write_text_atomic(directory / LISTED, json.dumps(ids.tolist()) + "\n")
