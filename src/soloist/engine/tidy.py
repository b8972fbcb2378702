"""Gives freed memory back: allocators keep it, and between tensors of many sizes that comes to hundreds of MiB."""

from __future__ import annotations

import ctypes
import gc
import sys
import time

import torch

EVERY_S = 30.0


def trim_host() -> None:
    """Hand freed host memory back to the system (glibc does so by itself only at the top of a heap)."""
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(0)


def release_memory() -> None:
    """Hand freed memory back to the card and to the system.

    cuBLAS's workspaces too: torch keeps one for every thread that ever called cuBLAS (32 MiB each on an H100 or H200,
    8 MiB on most cards) and makes a new one when it is needed. No graph of Soloist's holds a call of cuBLAS, so none
    remembers their addresses.
    """
    gc.collect()
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch._C._cuda_clearCublasWorkspaces()
        torch.cuda.empty_cache()
    trim_host()


class Tidier:
    """When an engine that has come to rest should trim: after requests, at most every `every_s` seconds."""

    def __init__(self, every_s: float = EVERY_S) -> None:
        self._every_s = every_s
        self._last = time.perf_counter()
        self._used = False

    def used(self) -> None:
        """Requests have arrived."""
        self._used = True

    @property
    def due(self) -> bool:
        return self._used and time.perf_counter() - self._last >= self._every_s

    def tidy(self) -> None:
        trim_host()
        self._used, self._last = False, time.perf_counter()
