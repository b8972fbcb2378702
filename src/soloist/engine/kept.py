"""What a sleeping engine leaves in host memory: the prefix cache, and a card's weights where they fit.

Weights move by storage, not by tensor: every tensor of the model, its views and whatever refers to them stay the
objects they are, only their bytes go to the host and come back. Static buffers, pages and graphs are not kept; they
are made anew, so nothing may remember an address across a sleep. Scratch that products share (`ops/scratch.py`) is
reached through the model and is not the model's: it stays, for whatever else the process loads.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from soloist.cache.persist import Persister
from soloist.cache.prefix import PrefixCache
from soloist.engine.capacity import host_room
from soloist.engine.segments import side_by_side
from soloist.errors import CapacityError
from soloist.models.qwen3_5 import Qwen35
from soloist.models.vision import VisionTower
from soloist.ops.scratch import SHARED
from soloist.ops.upload import page_lock, page_unlock

log = logging.getLogger("soloist.engine")

HOST_MARGIN = 2 << 30  # host memory that parked weights leave to everybody else, in bytes
Loaded = tuple[Qwen35, VisionTower | None, tuple[str, ...]]


def tensors_of(*roots: object) -> Iterator[torch.Tensor]:
    """Every tensor reachable through attributes and containers of Soloist's own objects and of torch's modules (the
    vision tower is one of another library), each once. Scratch that products share is nobody's and left out."""
    seen: set[int] = set()
    stack: list[Any] = list(roots)
    while stack:
        item = stack.pop()
        if id(item) in seen or isinstance(item, SHARED):
            continue
        seen.add(id(item))
        if isinstance(item, torch.Tensor):
            yield item
        elif isinstance(item, dict):
            stack.extend(item.values())
        elif isinstance(item, list | tuple):
            stack.extend(item)
        elif isinstance(item, torch.nn.Module) or type(item).__module__.partition(".")[0] == "soloist":
            stack.extend(getattr(item, "__dict__", {}).values())


class ParkedStorages:
    """The bytes of some tensors on a device, moved to host memory (pinned where a card can pin it)."""

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        self._storages = {t.untyped_storage().data_ptr(): t.untyped_storage() for t in tensors if t.numel()}
        self._sizes = [s.nbytes() for s in self._storages.values()]
        self._host = torch.empty(sum(self._sizes), dtype=torch.uint8)
        card = next((s.device for s in self._storages.values() if s.device.type == "cuda"), None)
        self._pinned = card is not None and page_lock(self._host, card)
        try:
            for part, storage in self._pairs():
                part.copy_(_bytes(storage))
                storage.resize_(0)
        except BaseException:
            self.close()
            raise

    @property
    def nbytes(self) -> int:
        return self._host.numel()

    def restore(self) -> None:
        """Give every tensor its bytes back. torch.OutOfMemoryError, and nothing taken, where the device has no room."""
        try:
            for (_, storage), size in zip(self._pairs(), self._sizes, strict=True):
                storage.resize_(size)
        except RuntimeError:
            self.empty()
            raise
        for part, storage in self._pairs():
            _bytes(storage).copy_(part, non_blocking=True)
        if self._pinned:
            torch.cuda.synchronize()

    def empty(self) -> None:
        """Free the device again; the host still has the bytes."""
        for _, storage in self._pairs():
            storage.resize_(0)

    def close(self) -> None:
        """Free the host's copy. Must be called: memory that is freed while the card has it page-locked would leave the
        card reading the old pages whenever something else comes to lie at that address."""
        if self._pinned:
            page_unlock(self._host)
            self._pinned = False
        self._host = self._host[:0].clone()

    def _pairs(self) -> Iterator[tuple[torch.Tensor, torch.UntypedStorage]]:
        yield from zip(self._host.split(self._sizes), self._storages.values(), strict=True)


def _bytes(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


class ParkedWeights:
    """A card's target and vision tower in host memory."""

    def __init__(self, loaded: Loaded) -> None:
        self._loaded = loaded
        self._storages = ParkedStorages(_on_card(loaded))

    @property
    def nbytes(self) -> int:
        return self._storages.nbytes

    def restore(self) -> Loaded:
        """The same objects, usable again. CapacityError, to be tried again later, where the card has no room."""
        try:
            with side_by_side(self._loaded[0].device):  # as loading took it: a pool of the same size must fit again
                self._storages.restore()
        except torch.OutOfMemoryError:
            free, _ = torch.cuda.mem_get_info()
            raise CapacityError(
                f"The card has {free / 2**30:.2f} GiB free, the weights take {self.nbytes / 2**30:.2f} GiB.",
                "Close other programs on the card and ask again.",
            ) from None
        return self._loaded

    def back_to_host(self) -> None:
        """Undo `restore`: what was built on it did not come to be."""
        self._loaded[0].unprepare()  # type: ignore[attr-defined]  # a card's model
        self._storages.empty()

    def close(self) -> None:
        """Free the host's copy."""
        self._storages.close()


def park_weights(loaded: Loaded) -> ParkedWeights | None:
    """Move a card's weights to host memory; None on a CPU, or where they do not fit: then they are read again."""
    model = loaded[0]
    if model.device.type != "cuda":
        return None
    torch.cuda.synchronize(model.device)
    model.unprepare()  # type: ignore[attr-defined]  # a card's model
    size = sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in _on_card(loaded)}.values())
    room = host_room() - HOST_MARGIN
    if size > room:
        log.info(
            "%.1f GiB of weights do not fit host memory (%.1f GiB are free); waking reads them again",
            size / 2**30,
            room / 2**30,
        )
        return None
    return ParkedWeights(loaded)


def _on_card(loaded: Loaded) -> list[torch.Tensor]:
    return [t for t in tensors_of(*loaded) if t.device.type == "cuda"]


@dataclass
class Kept:
    """`prefix` owns no pages, and `persister` goes on writing for it; both only while `numerics` are the engine's."""

    prefix: PrefixCache | None = None
    persister: Persister | None = None
    numerics: str = ""
    weights: ParkedWeights | None = None

    def cache_for(self, numerics: str) -> tuple[PrefixCache | None, Persister | None]:
        """The kept cache if it was made with these numerics; otherwise it is closed and forgotten."""
        if numerics != self.numerics:
            self.end_writing()
            self.prefix = None
        return self.prefix, self.persister

    @property
    def host_bytes(self) -> int:
        """Snapshots and pages of the cache."""
        return self.prefix.host_used if self.prefix is not None else 0

    def back_to_host(self) -> None:
        """An engine that was to be built around this did not come to be: hold no device memory for it."""
        if self.weights is not None:
            self.weights.back_to_host()
        if self.prefix is not None:
            self.prefix.vacate()

    def taken_over(self) -> None:
        """A new engine has everything; the copies of its weights can go."""
        if self.weights is not None:
            self.weights.close()
            self.weights = None

    def end_writing(self) -> None:
        """Finish what is being written."""
        if self.persister is not None:
            self.persister.close()
            self.persister = None

    def close(self) -> None:
        """Nobody will wake this: finish what is being written, free the weights."""
        self.end_writing()
        self.taken_over()
