"""Scratch of a card's products, which belongs to the process and not to the model whose products write it.

All products of a process run on one stream, each launch writes its scratch only when the one in front has ended, and
leaves the counters as it found them: so one of each kind per card serves every model that is loaded. Whoever frees or
moves a model's memory must leave what is `SHARED` where it is (`engine/kept.py` does): graphs of another model hold
its address, and the next model loaded will use it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch

from soloist.ops.linear_cuda import Workspace


@dataclass(frozen=True)
class Parts:
    """parts fp32: partial tiles. arrivals int32: counters, all zero between launches. See `ops/triton/dense.py`."""

    parts: torch.Tensor
    arrivals: torch.Tensor


SHARED: tuple[type, ...] = (Workspace, Parts)

_parts: dict[torch.device, Parts] = {}


@lru_cache(maxsize=4)
def workspace(device: torch.device) -> Workspace:
    """Scratch of the 4-bit products on the engine's stream: one per card."""
    return Workspace(device)


def dense_parts(device: torch.device, parts: int, slots: int) -> Parts:
    """At least so many parts and counters for the small dense products; a larger request gets new ones and leaves the
    old ones, whose addresses graphs may hold, to their holders."""
    held = _parts.get(device)
    sizes = (0, 0) if held is None else (held.parts.numel(), held.arrivals.numel())
    if held is None or sizes[0] < parts or sizes[1] < slots:
        _parts[device] = held = Parts(
            torch.empty(max(parts, sizes[0]), dtype=torch.float32, device=device),
            torch.zeros(max(slots, sizes[1]), dtype=torch.int32, device=device),
        )
    return held
