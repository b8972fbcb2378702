"""How torch's allocator takes weights and pool from a card.

By default it takes every large tensor in whole pieces of 2 MiB, keeps what is left over up to 1 MiB with the tensor,
and keeps pieces that loading used and freed: of a 24 GiB card some hundred MiB. With expandable segments tensors lie
side by side and what is freed is given back by the page. Graphs are captured with ordinary segments all the same: their
pools had faults with expandable ones in some versions of torch.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch

log = logging.getLogger("soloist.engine")

PROBE = 4 << 20  # bytes
# Whoever sets one of these has configured the allocator; it is left alone then.
CONFIGURED = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")


def _setting() -> Callable[[str], object]:
    newer = getattr(torch._C, "_accelerator_setAllocatorSettings", None)
    return newer if newer is not None else torch.cuda.memory._set_allocator_settings


@contextmanager
def side_by_side(device: torch.device, environ: Mapping[str, str] = os.environ) -> Iterator[None]:
    """Inside, tensors on a card are taken from expandable segments."""
    if device.type != "cuda" or any(environ.get(name) for name in CONFIGURED):
        yield
        return
    choose = _setting()
    choose("expandable_segments:True")
    try:
        reason = _why_not(device)
        if reason is not None:
            log.info("weights and pool are taken in whole pieces: %s", reason)
            choose("expandable_segments:False")
        yield
    finally:
        choose("expandable_segments:False")


def _why_not(device: torch.device) -> str | None:
    """Why a tensor cannot be had from an expandable segment here (a driver or a container without them), or None."""
    try:
        torch.zeros(PROBE, dtype=torch.uint8, device=device)
        torch.cuda.synchronize(device)
    except RuntimeError as error:
        return str(error).splitlines()[0]
    return None
