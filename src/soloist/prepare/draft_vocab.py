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

from soloist.checkpoint import formats, quant_config
from soloist.checkpoint.formats import pack_quantized
from soloist.checkpoint.layout import part_of
from soloist.checkpoint.reader import DRAFT_HEAD, Checkpoint, open_checkpoint
from soloist.checkpoint.shards import INDEX_NAME, read_directory
from soloist.checkpoint.writer import write_file_atomic, write_text_atomic
from soloist.errors import CheckpointError, UserError
from soloist.ops.linear import DenseWeight, QuantizedWeight, Weight
from soloist.prepare.capture import TOKENS

FILE, LISTED = "model-draft-head.safetensors", "draft_vocab_ids.json"
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

    The new file comes first, the index that names it last: readers see the old checkpoint or the new one.
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
    stored = {f"{DRAFT_HEAD}.{suffix}": tensor for suffix, tensor in tensors.items()}
    index = {name: info.shard.path.name for name, info in read_directory(directory).items()}
    index = {name: file for name, file in index.items() if not name.startswith("mtp.draft_")}
    index |= dict.fromkeys((*stored, "mtp.draft_vocab_ids"), FILE)
    total = sum(
        info.nbytes for name, info in read_directory(directory).items() if name in index and index[name] != FILE
    )
    total += sum(tensor.nbytes for tensor in stored.values()) + ids.nbytes
    write_file_atomic(directory / FILE, {**stored, "mtp.draft_vocab_ids": ids})
    write_text_atomic(directory / LISTED, json.dumps(ids.tolist()) + "\n")
    _update_config(directory, checkpoint, weight)
    table = {"metadata": {"total_size": total}, "weight_map": index}
    write_text_atomic(directory / INDEX_NAME, json.dumps(table, indent=1) + "\n")


def _update_config(directory: Path, checkpoint: Checkpoint, weight: Weight) -> None:
    """Let the quantization_config say what form the draft head has, where it says anything."""
    path = directory / "config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    if (config.get("quantization_config") or {}).get("quant_method") not in (None, "compressed-tensors"):
        raise CheckpointError(
            f"{directory} is not in compressed-tensors form.", "Run `soloist quantize` first; it converts without loss."
        )
    modules: dict[str, tuple[str, quant_config.Scheme | None, int]] = {}
    for name, stored in checkpoint.modules.items():
        if name in ("embed_tokens", DRAFT_HEAD) and stored.dense:
            continue
        scheme = None if stored.dense else (stored.bits, stored.group, stored.symmetric)
        stem = next(iter(stored.tensors.values())).name.rpartition(".")[0]
        if name != DRAFT_HEAD:
            modules[stem] = (part_of(name), scheme, stored.shape[1])
    if "lm_head" not in checkpoint.modules:
        modules["lm_head"] = ("lm_head", None, 0)
    packed = isinstance(weight, QuantizedWeight)
    form = (weight.bits, weight.group, weight.zeros is None) if isinstance(weight, QuantizedWeight) else None
    modules[DRAFT_HEAD] = ("draft_head", form if packed else None, weight.shape[1])
    built = quant_config.build(modules)
    if built is not None:
        old = config.get("quantization_config") or {}
        built["ignore"] += [name for name in old.get("ignore", ()) if "visual" in name and name not in built["ignore"]]
        config["quantization_config"] = built
        write_text_atomic(path, json.dumps(config, indent=2, ensure_ascii=False) + "\n")
