"""Weights on their way to a card: through a small ring of page-locked memory.

A copy from ordinary memory, and the pages of a file are that, is done piece by piece by one thread of the driver, and
the card waits while it reads. Inside `staged`, `upload` fills one slot of a ring with all of torch's threads while the
slots before it are still on their way. Outside of it, for small tensors and where memory cannot be page-locked, it is
`Tensor.to`. The bits are those of `Tensor.to` in any case.

What can go wrong: a slot that is filled again before its copy has been made, and page-locked memory that is freed. So
every slot has an event, and the ring waits for the card before it gives its memory up.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from typing import Protocol

import torch

log = logging.getLogger("soloist.ops")

LEAST = 1 << 20  # bytes from which a tensor is staged
SLOTS, SLOT = 4, 16 << 20  # bytes of a slot: some milliseconds to fill or to send


class Mark(Protocol):
    """A point in the card's work."""

    def record(self) -> None: ...

    def synchronize(self) -> None: ...


def page_lock(host: torch.Tensor, device: torch.device) -> bool:
    """Page-lock memory that exists already, until `page_unlock`: pinning by torch's allocator would round every tensor
    up to a power of two. False where the system refuses: copies are slower then, and nothing else changes."""
    if int(torch.cuda.cudart().cudaHostRegister(host.data_ptr(), host.nbytes, 0)) == 0:
        return True
    # The runtime remembers a refusal, and torch raises it behind the next kernel it launches. Let it be this one.
    with suppress(RuntimeError):
        torch.ones(1, device=device)
    return False


def page_unlock(host: torch.Tensor) -> None:
    """Must come before the memory is freed."""
    torch.cuda.cudart().cudaHostUnregister(host.data_ptr())


class Road:
    """What staging asks of CUDA, on the current device and its current stream."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def lock(self, host: torch.Tensor) -> bool:
        return page_lock(host, self.device)

    def unlock(self, host: torch.Tensor) -> None:
        page_unlock(host)

    def send(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """Begin a copy to the card, and come back at once."""
        target.copy_(source, non_blocking=True)

    def mark(self) -> Mark:
        return torch.cuda.Event()

    def drain(self) -> None:
        """Wait for everything begun."""
        torch.cuda.synchronize(self.device)


class Staging:
    """The ring. Its memory is had and page-locked with the first large tensor, and given up by `close`."""

    def __init__(self, road: Road, slots: int = SLOTS, size: int = SLOT) -> None:
        self._road, self._count, self._size = road, slots, size
        self._host: torch.Tensor | None = None
        self._slots: list[tuple[torch.Tensor, Mark]] = []
        self._next = 0
        self._refused = False

    def takes(self, tensor: torch.Tensor, device: torch.device) -> bool:
        """Whether this tensor, which must be on the host, goes through the ring to `device`."""
        return (
            device.type == self._road.device.type
            and device.index in (None, self._road.device.index)
            and tensor.nbytes >= LEAST
            and tensor.is_contiguous()
            and self._open()
        )

    def send(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy on the card, complete for whatever is launched behind it. `tensor` may be freed at once."""
        target = torch.empty(tensor.shape, dtype=tensor.dtype, device=self._road.device)
        pieces = _bytes(tensor).split(self._size), _bytes(target).split(self._size)
        for here, there in zip(*pieces, strict=True):
            slot, sent = self._slots[self._next]
            self._next = (self._next + 1) % self._count
            sent.synchronize()  # nothing to wait for in the first round
            part = slot[: here.numel()]
            part.copy_(here)  # by all of this thread's workers: page faults of a file are theirs too
            self._road.send(part, there)
            sent.record()
        return target

    def close(self) -> None:
        """Wait for the card and free the memory."""
        host, self._host, self._slots = self._host, None, []
        if host is not None:
            try:
                self._road.drain()
            finally:
                self._road.unlock(host)

    def _open(self) -> bool:
        if self._host is None and not self._refused:
            host = torch.empty(self._count * self._size, dtype=torch.uint8)
            if self._road.lock(host):
                self._host = host
                self._slots = [(slot, self._road.mark()) for slot in host.split(self._size)]
            else:
                self._refused = True
                log.info("weights are copied to the card from ordinary memory: none can be page-locked")
        return not self._refused


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(-1).view(torch.uint8)


_staging: ContextVar[Staging | None] = ContextVar("staging", default=None)


@contextmanager
def staged(device: torch.device) -> Iterator[None]:
    """Inside, and on this thread only, `upload` to a card goes through page-locked memory, freed at the end."""
    if device.type != "cuda":
        yield
        return
    with through(Staging(Road(device))):
        yield


@contextmanager
def through(staging: Staging) -> Iterator[None]:
    """Inside, and on this thread only, `upload` asks `staging`, which is closed at the end."""
    before = _staging.set(staging)
    try:
        yield
    finally:
        _staging.reset(before)
        staging.close()


def upload(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """`tensor.to(device)` with the same bits; what is launched on the current stream finds it complete."""
    staging = _staging.get()
    if staging is None or tensor.device.type != "cpu" or not staging.takes(tensor, device):
        return tensor.to(device)
    return staging.send(tensor)
