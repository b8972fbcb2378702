"""How far two servers' next-token distributions are apart, on the same token ids.

A server gives its `top` best log-probabilities per position, not the whole distribution. Tokens that both name are
compared one by one, everything else is one bucket; the value is therefore a lower bound of the true divergence.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from soloist.bench.client import Client
from soloist.bench.measure import mean, percentile
from soloist.bench.quality.perplexity import Text, prompt_logprobs
from soloist.errors import UserError

FLOOR = 1e-12


@dataclass(frozen=True)
class Divergence:
    """KL(A || B) in nats over `positions`, and how often both would pick the same token."""

    mean: float
    p99: float
    worst: float
    same_top: float
    positions: int


def position_kl(a: Mapping[int, float], b: Mapping[int, float]) -> float:
    """KL(A || B) in nats of two partly known distributions {token: log-probability}, coarse-grained."""
    shared = a.keys() & b.keys()
    pa, pb = {t: math.exp(a[t]) for t in shared}, {t: math.exp(b[t]) for t in shared}
    rest_a, rest_b = max(FLOOR, 1 - sum(pa.values())), max(FLOOR, 1 - sum(pb.values()))
    kl = sum(pa[t] * (a[t] - b[t]) for t in shared) + rest_a * (math.log(rest_a) - math.log(rest_b))
    return max(0.0, kl)


async def compare(a: Client, b: Client, chosen: Sequence[Text], top: int = 20, characters: int = 3000) -> Divergence:
    """Score the texts on both servers. Token ids come from A's tokenizer. Raises UserError when B's ids differ."""
    values: list[float] = []
    same = 0
    for item in chosen:
        status, body = await a.post(
            "/tokenize", {"model": a.model, "prompt": item.text[:characters], "add_special_tokens": False}
        )
        if status != 200:
            raise UserError(f"{a.url} has no /tokenize (status {status}).", "Divergence needs one that does.")
        ids = body["tokens"]
        left, right = await prompt_logprobs(a, ids, top), await prompt_logprobs(b, ids, top)
        if len(left) != len(right):
            raise UserError("The two servers score different numbers of tokens.", "Compare servers of one model.")
        for x, y in zip(left, right, strict=True):
            values.append(position_kl(x, y))
            same += max(x, key=lambda t: x[t]) == max(y, key=lambda t: y[t])
    return Divergence(
        mean(values) or 0.0, percentile(values, 0.99) or 0.0, max(values), same / len(values), len(values)
    )
