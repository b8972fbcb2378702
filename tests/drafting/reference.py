"""Slow, literal restatements of the drafting rules, for comparison."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import numpy as np

from soloist.drafting.proposal import Proposal


def find_match(s: Sequence[int], nmin: int, nmax: int, search: int = 0) -> tuple[int, int] | None:
    """(capped length, end) of the longest capped match, the most recent among equals, by trying every end."""
    t = len(s) - 1
    if len(s) < nmin + 2:
        return None
    best = None
    for e in range(nmin - 1, t):
        if search and e < len(s) - search:
            continue
        m = 0
        while m < nmax and m <= e and s[e - m] == s[t - m]:
            m += 1
        if m >= nmin and (best is None or (m, e) > best):
            best = (m, e)
    return best


def continuation(s: Sequence[int], end: int, count: int, extend: bool) -> list[int]:
    text = list(s)
    for i in range(count):
        if end + 1 + i >= (len(text) if extend else len(s)):
            break
        text.append(text[end + 1 + i])
    return text[len(s) :]


Chain = Callable[[tuple[int, ...]], np.ndarray]


def free_law(p: Chain, prefix: tuple[int, ...], count: int) -> np.ndarray:
    """The target's own law of the next `count` tokens, [V] * count."""
    if count == 0:
        return np.array(1.0)
    row = p(prefix)
    return np.stack([row[y] * free_law(p, (*prefix, y), count - 1) for y in range(len(row))])


def rejection_law(p: Chain, proposal: Proposal, count: int, node: int = -1, prefix: tuple[int, ...] = ()) -> np.ndarray:
    """Exact law of the first `count` tokens when a tree is verified by trying children in order (rejection)."""
    if count == 0:
        return np.array(1.0)
    row = p(prefix)
    size = len(row)
    out = np.zeros([size] * count)
    left, mass = row.copy(), 1.0
    for child in proposal.children()[node + 1]:
        token, law = proposal.tokens[child], proposal.laws[child]
        q = np.zeros(size)
        q[[token] if law is None else list(law.ids)] = 1.0 if law is None else law.probs
        accept = min(1.0, left[token] / q[token])
        out[token] += mass * accept * rejection_law(p, proposal, count - 1, child, (*prefix, token))
        mass *= 1 - accept
        rest = np.maximum(left - q, 0)
        left = rest / rest.sum() if rest.sum() > 0 else row
    for y in range(size):
        if mass * left[y] > 0:
            out[y] += mass * left[y] * free_law(p, (*prefix, y), count - 1)
    return out


def random_chain(rng: np.random.Generator, size: int, depth: int) -> Chain:
    """A random conditional law for every prefix up to `depth` tokens."""
    table: dict[tuple[int, ...], np.ndarray] = {}

    def law(prefix: tuple[int, ...]) -> np.ndarray:
        if prefix not in table:
            table[prefix] = rng.dirichlet(np.full(size, 0.7))
        return table[prefix]

    for length in range(depth + 1):
        for prefix in itertools.product(range(size), repeat=length):
            law(prefix)
    return law


def upstream_blocks(
    trace: Sequence[tuple[bool, int]], short: int, long: int, sticky_for: int, requests: int = 1
) -> list[int]:
    """Block lengths of the batch-wide machine for one request: flags are read one evaluation late."""
    landed: list[bool] = []
    before, sticky = False, 0
    out = []
    for step, (flag, emitted) in enumerate(trace):
        if step == 0:
            out.append(short)
            continue
        want = bool(landed) and all(landed)
        landed = [flag and emitted >= 1 + short]
        if want and before:
            out.append(long)
            sticky = sticky_for if requests == 1 else 0
        elif sticky > 0 and requests == 1:
            out.append(long)
            sticky -= 1
        else:
            out.append(short)
            sticky = 0
        before = want
    return out
