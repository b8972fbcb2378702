"""Programmatic dependent launch (sm_90+): a kernel starts while the one before it drains.

Every kernel of a step calls `begin` first: it lets its successor start (a product then fetches weights while this
kernel still runs) and waits until its predecessor has ended and its writes are visible. What can go wrong: a kernel
launched this way that touches memory before `begin`.
"""

from __future__ import annotations

from functools import lru_cache

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@lru_cache(maxsize=16)
def _supported(index: int) -> bool:
    return torch.cuda.get_device_capability(index)[0] >= 9


def dependent(x: torch.Tensor) -> bool:
    """Whether kernels on x's device are launched dependently."""
    return x.is_cuda and _supported(x.device.index or 0)


def shared_memory(x: torch.Tensor) -> int:
    """Bytes of shared memory a block may have on x's device; a consumer card's where there is no card."""
    if not x.is_cuda:
        return 101376
    return torch.cuda.get_device_properties(x.device).shared_memory_per_block_optin  # type: ignore[attr-defined]


def warp_groups(x: torch.Tensor) -> bool:
    """Whether x's card multiplies 64 rows by a group of four warps: sm_90, and no card since."""
    return x.is_cuda and torch.cuda.get_device_capability(x.device)[0] == 9


def multiprocessors(x: torch.Tensor) -> int:
    """How many multiprocessors x's card has; where there is none, as few as show how work is dealt among them."""
    return torch.cuda.get_device_properties(x.device).multi_processor_count if x.is_cuda else 4


def launch(on: bool) -> dict[str, bool]:
    """Keyword arguments of a launch: nothing where it does not apply, so that the interpreter never sees them."""
    return {"launch_pdl": True} if on else {}


@triton.jit
def begin(PDL: tl.constexpr):
    """First statement of a kernel that may be launched dependently."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
