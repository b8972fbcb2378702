"""What quantisation cost: perplexity before and after, and the KL divergence between the two, on given texts.

Both models are streamed layer by layer, so neither has to fit in memory; logits are made for one text at a time.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from soloist.checkpoint.reader import Checkpoint
from soloist.ops.linear import DenseWeight, Weight
from soloist.prepare.streaming import Streams
from soloist.progress import Progress, silent

HEAD_ROWS = 16384


@dataclass(frozen=True)
class Comparison:
    """Per token, in nats: KL(before || after); perplexities; share of positions with the same likeliest token."""

    tokens: int
    kl: float
    perplexity_before: float
    perplexity_after: float
    agreement: float


def _part(weight: Weight, start: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    if isinstance(weight, DenseWeight):
        return weight.weight[start : start + HEAD_ROWS].to(device, dtype)
    ids = torch.arange(start, min(start + HEAD_ROWS, weight.shape[0]))
    return weight.rows(ids, dtype).to(device)


def _log_probs(hidden: torch.Tensor, head: Weight) -> torch.Tensor:
    parts = [
        hidden @ _part(head, start, hidden.dtype, hidden.device).t() for start in range(0, head.shape[0], HEAD_ROWS)
    ]
    return torch.cat([part.float() for part in parts], 1).log_softmax(-1)


def final_hidden(
    checkpoint: Checkpoint, texts: Sequence[Sequence[int]], device: torch.device, dtype: torch.dtype, progress: Progress
) -> Iterator[torch.Tensor]:
    """Rows after the final norm, per text."""
    streams = Streams(checkpoint, texts, device, dtype)
    for _ in range(checkpoint.config.num_layers):
        streams.advance()
        progress(f"layers of {checkpoint.directory.name}", streams.depth, checkpoint.config.num_layers)
    return streams.hidden()


@torch.inference_mode()
def compare(
    before: Checkpoint,
    after: Checkpoint,
    texts: Sequence[Sequence[int]],
    device: torch.device,
    dtype: torch.dtype = torch.float32,
    progress: Progress = silent,
) -> Comparison:
    """Teacher-forced over `texts` (token ids, at least two each)."""
    rows = [final_hidden(checkpoint, texts, device, dtype, progress) for checkpoint in (before, after)]
    heads = [checkpoint.weight("lm_head", copy=False) for checkpoint in (before, after)]
    kl = nll_before = nll_after = agreed = 0.0
    tokens = 0
    for text, p_hidden, q_hidden in zip(texts, *rows, strict=True):
        p, q = _log_probs(p_hidden[:-1], heads[0]), _log_probs(q_hidden[:-1], heads[1])
        following = torch.tensor(text[1:], device=device).unsqueeze(1)
        kl += float((p.exp() * (p - q)).sum(dtype=torch.float64))
        nll_before -= float(p.gather(1, following).sum(dtype=torch.float64))
        nll_after -= float(q.gather(1, following).sum(dtype=torch.float64))
        agreed += float((p.argmax(1) == q.argmax(1)).sum())
        tokens += len(text) - 1
    return Comparison(tokens, kl / tokens, math.exp(nll_before / tokens), math.exp(nll_after / tokens), agreed / tokens)
