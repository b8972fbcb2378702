"""Pages on their way to the host and back: a share of a long request at a time, and nobody's pages lost on a fault."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from cache.fakes import PAGE_BYTES, Pool
from soloist.cache import kv, parking
from soloist.cache.codecs import Planes, token_codec
from soloist.cache.kv import KVStore
from soloist.cache.pages import PageAllocator
from soloist.cache.parking import park, unpark
from soloist.cache.prefix import PrefixCache
from soloist.cache.snapshot import Snapshot


class _Gathered(TorchDispatchMode):
    """The most bytes that were gathered from a pool at once, or scattered into it."""

    def __init__(self) -> None:
        super().__init__()
        self.most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.index.Tensor:
            self.most = max(self.most, out.nbytes)
        elif func is torch.ops.aten.index_put_.default:
            self.most = max(self.most, args[2].nbytes)
        return out


def _store(name: str) -> KVStore:
    codec = token_codec(name)
    return KVStore(
        layers=3, kv_heads=2, head_dim=16, pages=12, codec_k=codec, codec_v=codec, dtype=torch.float32
    )  # fmt: skip


@pytest.mark.parametrize("name", ["bf16", "int8", "fp8"])
def test_a_long_request_moves_a_share_at_a_time(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """The pool has the card's memory: a copy of all of a document beside it would not fit."""
    source, target = _store(name), _store(name)
    for plane in source.planes.values():
        plane.view(torch.uint8).copy_(torch.randint(0, 120, plane.view(torch.uint8).shape, dtype=torch.uint8))
    expected = {n: p[:, source.rows([7, 0, 5, 9, 2])].clone() for n, p in source.planes.items()}
    share = 2 * 64 * max(p.nbytes // p.shape[1] for p in source.planes.values()) + 1
    monkeypatch.setattr(kv, "MOVED", share)
    with _Gathered() as gathered:
        planes = source.export([7, 0, 5, 9, 2])
        target.load([1, 11, 3, 4, 6], planes)
    assert 0 < gathered.most <= share
    moved = target.rows([1, 11, 3, 4, 6])
    rest = target.rows([0, 2, 5, 7, 8, 9, 10])
    for plane, value in expected.items():
        assert torch.equal(planes[plane].view(torch.uint8), value.view(torch.uint8))
        assert torch.equal(target.planes[plane][:, moved].view(torch.uint8), value.view(torch.uint8))
        assert not target.planes[plane][:, rest].view(torch.uint8).any()


class _Full(Pool):
    """A pool whose device has no memory for what comes back."""

    def load(self, pages: Any, planes: Planes) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")


def test_a_hit_that_cannot_be_loaded_loses_no_pages() -> None:
    allocator = PageAllocator(4)
    cache = PrefixCache(allocator, storage=_Full(4), host_bytes=16 * PAGE_BYTES)
    tokens = [1] * 192 + [0]
    pages = cache.insert(tokens, allocator.allocate(3) or [], 192)
    cache.attach_snapshot(tokens, 192, Snapshot(192, {"s": torch.zeros(8)}))
    allocator.release(pages)
    while allocator.used and cache.evict(1):
        pass
    assert cache.reach(tokens) == 192 and allocator.used == 0
    with pytest.raises(torch.OutOfMemoryError):
        cache.match(tokens)
    cache.check()
    allocator.check(cache.owned_pages())
    assert allocator.free == 4


def test_a_hit_whose_state_cannot_be_read_loses_no_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    allocator = PageAllocator(4)
    cache = PrefixCache(allocator, storage=Pool(4), host_bytes=16 * PAGE_BYTES)
    tokens = [1] * 192 + [0]
    pages = cache.insert(tokens, allocator.allocate(3) or [], 192)
    cache.attach_snapshot(tokens, 192, Snapshot(192, {"s": torch.zeros(8)}))
    allocator.release(pages)
    used = allocator.used

    def no_memory(node: Any) -> Snapshot:
        raise MemoryError("planted")

    monkeypatch.setattr(cache, "_snapshot_of", no_memory)
    with pytest.raises(MemoryError):
        cache.match(tokens)
    cache.check()
    allocator.check(cache.owned_pages())
    assert allocator.used == used


def test_a_parked_request_that_cannot_come_back_loses_no_pages() -> None:
    allocator = PageAllocator(4)
    pages = allocator.allocate(3) or []
    parked, freed = park(pages, 130, {}, Pool(4), allocator)
    assert freed == 3
    with pytest.raises(torch.OutOfMemoryError):
        unpark(parked, _Full(4), allocator, lambda count: 0)
    assert allocator.free == 4


def test_nothing_of_a_parked_request_stays_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """A drafter's window is tens of MiB: on the device they would eat up what is kept free."""
    monkeypatch.setattr(parking, "host_copy", lambda t: t.new_zeros(t.shape, device="cpu"), raising=False)
    allocator = PageAllocator(2)
    slot = {"dflash2.keys": torch.ones(3, device="meta"), "state0": torch.ones(3)}
    parked, _ = park(allocator.allocate(1) or [], 10, slot, Pool(2), allocator)
    assert parked.slot.keys() == slot.keys()
    assert all(t.device.type == "cpu" for t in parked.slot.values())
