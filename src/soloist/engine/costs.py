"""What a step costs on this machine: milliseconds per verify row count, and of one drafter run.

Measured once at start-up, on rows that touch no cache; the block rule weighs expected tokens against it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import pairwise

import torch

from soloist.drafting.block_length import StepCost
from soloist.drafting.drafter import Ask, Drafter, SettledTokens
from soloist.engine.memory import Memory
from soloist.models.qwen3_5 import Qwen35
from soloist.models.step import RequestRows, verify_step
from soloist.sampling.params import SamplingParams

REPEATS = 5
PATIENCE_S = 1.5  # on a machine that is busy the first rounds have to do
POINTS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)

Work = Callable[[], object]


def fastest_ms(works: dict[int, Work], device: torch.device) -> dict[int, float]:
    """The fastest of a few runs of each, taken in turns: an interruption only ever adds time, and never to all."""
    best = dict.fromkeys(works, float("inf"))
    started = time.perf_counter()
    for done in range(REPEATS):
        if done > 1 and time.perf_counter() - started > PATIENCE_S:
            break
        for key, work in works.items():
            began = time.perf_counter()
            work()
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            best[key] = min(best[key], 1000 * (time.perf_counter() - began))
    return best


def interpolated(points: dict[int, float], rows: int) -> tuple[float, ...]:
    """A table for 1 .. `rows` rows, index 0 unused: straight lines between the measured points.

    Fewer rows never cost more, so a point slower than a larger one was disturbed and takes its time.
    """
    known = sorted(points)
    clean = dict(points)
    for fewer, more in reversed(list(pairwise(known))):
        clean[fewer] = min(clean[fewer], clean[more])
    table = [0.0]
    for n in range(1, rows + 1):
        low = max(k for k in known if k <= n)
        high = min(k for k in known if k >= n)
        share = (n - low) / (high - low) if high > low else 0.0
        table.append(clean[low] + share * (clean[high] - clean[low]))
    return tuple(table)


def measure_costs(model: Qwen35, memory: Memory, drafter: Drafter | None, rows: int, tree: bool = False) -> StepCost:
    """Time verify steps of 1 .. `rows` rows and one drafter run, on an empty slot that no request holds yet.

    tree  the drafter is asked for alternatives, as the engine asks it; the run timed is one that samples, the dearer
          kind and the one clients get who set nothing
    """

    def verify(n: int) -> Work:
        def work() -> object:
            part = RequestRows([0] * n, list(range(-1, n - 1)), 0, 0, [])
            step = verify_step([part], model.config.conv_kernel)
            features = model.forward(step, memory.caches, drafter.taps if drafter else ())
            return model.logits(features.hidden) if features.logits is None else features.logits

        return work

    works = {n: verify(n) for n in sorted({*(p for p in POINTS if p <= rows), rows})}
    if drafter is not None:
        hidden = torch.zeros(1, model.config.hidden_size, dtype=model.dtype, device=model.device)
        taps = hidden.repeat(1, len(drafter.taps)) if drafter.taps else None
        drafter.absorb([SettledTokens(0, 0, [0, 0], hidden, taps, [0])])
        ask = Ask(0, 0, 1, [0], SamplingParams(temperature=1.0), 0, "coupled", drafter.depth, tree)
        works[0] = lambda: drafter.propose([ask])
    points = fastest_ms(works, model.device)
    draft = points.pop(0, 0.0)
    if drafter is not None:
        drafter.drop(0)
    return StepCost(interpolated(points, rows), draft)
