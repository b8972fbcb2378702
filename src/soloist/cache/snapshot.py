"""What a hybrid needs beside its pages to resume at a grid point, and where such points are placed.

Attention can resume at any token whose KV is kept; a recurrent layer only where its state was copied. A
snapshot is that copy: named host tensors (recurrent and convolution state, the target's last hidden row
before the cut for the MTP module, the drafter's context window, KVarN's 16-bit tiles). The cache never
looks inside; whoever takes a snapshot also restores it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from soloist.cache.pages import PAGE


@dataclass(frozen=True)
class Snapshot:
    """State after the first `length` tokens. Tensors may stand on any device until `to_host`."""

    length: int
    tensors: dict[str, torch.Tensor]

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors.values())

    def to_host(self) -> Snapshot:
        """The same snapshot in host memory (pinned where there is a CUDA device): 3-6 ms to load for a 27B."""
        return Snapshot(self.length, {name: host_copy(tensor) for name, tensor in self.tensors.items()})


def host_copy(tensor: torch.Tensor) -> torch.Tensor:
    """A host tensor that shares no storage with a device pool; host tensors are taken as they are."""
    if tensor.device.type == "cpu":
        return tensor
    pinned = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    pinned.copy_(tensor)
    return pinned


def grid_points(
    prompt_len: int, boundaries: Sequence[int], every: int, grid: int = PAGE, recent: int = 4, gap: int = 512
) -> list[int]:
    """Lengths at which a prefill of `prompt_len` tokens should leave a snapshot, ascending multiples of `grid`.

    boundaries   ascending token counts at which a message of the prompt ends: the grid point at or before each of
                 the last `recent`, and of older ones where the next point is at least `gap` tokens away
    every        SNAPSHOT_EVERY: one snapshot per so many tokens of a long prompt; 0 = none
    Always the last grid point of the prompt, and the last one that leaves a token to run (for a resend).
    """
    wanted = {prompt_len, prompt_len - 1}
    inside = [b for b in boundaries if 0 < b <= prompt_len]
    wanted.update(inside[max(0, len(inside) - recent) :])
    following = prompt_len
    for boundary in reversed(inside):
        if following - boundary >= gap:
            wanted.add(boundary)
            following = boundary
    if every > 0:
        wanted.update(range(every, prompt_len + 1, every))
    return sorted({point - point % grid for point in wanted if point >= grid})
