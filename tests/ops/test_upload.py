"""Staging, with a card that makes its copies as late as it may: when somebody waits for them."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

import pytest
import torch

from soloist.ops import upload as module
from soloist.ops.linear import DenseWeight, QuantizedWeight
from soloist.ops.upload import Road, Staging, staged, through, upload

HOST = torch.device("cpu")
SLOT = 4096
KINDS = (
    torch.uint8, torch.int8, torch.bool, torch.int32, torch.int64, torch.float16, torch.bfloat16, torch.float32,
    torch.float64, torch.float8_e4m3fn,
)  # fmt: skip


class LateMark:
    """Waiting for it makes the copies that were begun before it was recorded."""

    def __init__(self, road: LateRoad) -> None:
        self.road, self.at = road, 0

    def record(self) -> None:
        self.at = self.road.begun

    def synchronize(self) -> None:
        self.road.make(self.at)


class LateRoad(Road):
    def __init__(self, refuses: bool = False) -> None:
        super().__init__(HOST)
        self.refuses, self.begun, self.made = refuses, 0, 0
        self.waiting: list[Callable[[], object]] = []
        self.locked: list[int] = []
        self.most = 0  # copies on their way at once

    def lock(self, host: torch.Tensor) -> bool:
        if not self.refuses:
            self.locked.append(host.data_ptr())
        return not self.refuses

    def unlock(self, host: torch.Tensor) -> None:
        assert self.made == self.begun, "freed while the card reads it"
        self.locked.remove(host.data_ptr())

    def send(self, source: torch.Tensor, target: torch.Tensor) -> None:
        assert source.numel() <= SLOT
        self.waiting.append(lambda: target.copy_(source))
        self.begun += 1
        self.most = max(self.most, self.begun - self.made)

    def mark(self) -> LateMark:
        return LateMark(self)

    def drain(self) -> None:
        self.make(self.begun)

    def make(self, until: int) -> None:
        while self.made < until:
            self.waiting[self.made]()
            self.made += 1


@pytest.fixture
def road(monkeypatch: pytest.MonkeyPatch) -> LateRoad:
    monkeypatch.setattr(module, "LEAST", 1024)
    return LateRoad()


def ring(road: LateRoad) -> Staging:
    return Staging(road, slots=3, size=SLOT)


def some(kind: torch.dtype, *shape: int) -> torch.Tensor:
    """Every pattern of bits is a value, NaN included; a bool has two."""
    count = int(torch.tensor(shape).prod()) * kind.itemsize
    # Made in place: a copy that was freed could come back as the memory that is to be written, and look written.
    data = torch.randint(0, 256, (count,), dtype=torch.uint8)
    return (data & 1 if kind is torch.bool else data).view(kind).view(shape)


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    flat = [t.contiguous().view(-1).view(torch.uint8) for t in (a, b)]
    return a.shape == b.shape and a.dtype is b.dtype and torch.equal(*flat)


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_the_bits_arrive(road: LateRoad, kind: torch.dtype) -> None:
    # In bytes: below a slot, a slot, one more value, many rounds of the ring.
    each = SLOT // kind.itemsize
    tensors = [some(kind, n) for n in (each // 2, each, each + 1)] + [some(kind, 7, 3, each // 2)]
    with through(ring(road)):
        arrived = [upload(t, HOST) for t in tensors]
        assert road.begun == 1 + 1 + 2 + 11
    assert all(map(same, arrived, tensors))


def test_several_slots_are_on_their_way_and_none_is_filled_before_its_copy_is_made(road: LateRoad) -> None:
    tensor = some(torch.int32, 8 * SLOT)
    with through(ring(road)):
        arrived = upload(tensor, HOST)
        assert road.most == 3 and road.made == road.begun - 3
        assert not same(arrived, tensor)
    assert same(arrived, tensor)


def test_the_source_is_free_at_once(road: LateRoad) -> None:
    """What is not on the card yet is in the ring."""
    tensor = some(torch.uint8, 3 * SLOT)
    copy = tensor.clone()
    with through(ring(road)):
        arrived = upload(tensor, HOST)
        tensor.zero_()
    assert same(arrived, copy)


def test_small_tensors_strided_ones_and_those_elsewhere_are_copied_plainly(road: LateRoad) -> None:
    wide = some(torch.int16, 64, 128)
    with through(ring(road)):
        for tensor in (some(torch.uint8, 1023), torch.empty(0), wide.t(), wide[:, ::2], wide[:, 1:].expand(64, 127)):
            assert same(upload(tensor, HOST), tensor)
        assert upload(wide, torch.device("meta")).is_meta
        assert upload(torch.empty(9999, device="meta"), torch.device("meta")).is_meta
        assert road.locked == [] and road.begun == 0, "nothing large came: nothing was page-locked"
        arrived = upload(wide[3:50], HOST)
        assert road.begun == 3
    assert same(arrived, wide[3:50])


def test_a_ring_serves_its_own_card_only(road: LateRoad) -> None:
    road.device = torch.device("cuda", 1)
    staging, tensor = ring(road), some(torch.uint8, SLOT)
    assert staging.takes(tensor, torch.device("cuda")) and staging.takes(tensor, torch.device("cuda", 1))
    assert not staging.takes(tensor, torch.device("cuda", 0)) and not staging.takes(tensor, HOST)


def test_memory_is_locked_once_and_given_up(road: LateRoad) -> None:
    staging = ring(road)
    with pytest.raises(KeyError), through(staging):
        for _ in range(3):
            upload(some(torch.uint8, 2 * SLOT), HOST)
            assert len(road.locked) == 1
        raise KeyError
    assert road.locked == [] and staging._host is None and staging._slots == []
    before = road.begun
    upload(some(torch.uint8, SLOT), HOST)
    assert road.begun == before, "outside, copies are plain"


def test_a_refusal_is_said_once(road: LateRoad, caplog: pytest.LogCaptureFixture) -> None:
    road.refuses = True
    tensor = some(torch.uint8, 5 * SLOT)
    with caplog.at_level(logging.INFO, "soloist.ops"), through(ring(road)):
        assert all(same(upload(tensor, HOST), tensor) for _ in range(3))
    assert [r.message for r in caplog.records] == [
        "weights are copied to the card from ordinary memory: none can be page-locked"
    ]
    assert road.begun == 0


def test_another_thread_is_not_staged(road: LateRoad) -> None:
    with through(ring(road)):
        thread = threading.Thread(target=upload, args=(some(torch.uint8, SLOT), HOST))
        thread.start()
        thread.join()
        assert road.begun == 0


def test_off_a_card_nothing_is_staged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "Staging", None)
    with staged(HOST):
        assert module._staging.get() is None


def test_weights_go_through_the_ring(road: LateRoad) -> None:
    dense = DenseWeight(some(torch.bfloat16, 64, 128), some(torch.bfloat16, 64))
    packed = QuantizedWeight(
        some(torch.int32, 64, 64), some(torch.float16, 64, 16), some(torch.uint8, 64, 16), 4, 32, (64, 512)
    )
    with through(ring(road)):
        moved, on_card = dense.to(HOST), packed.to(HOST)
        assert road.begun == 4 + 4 + 1 + 1
    assert same(moved.weight, dense.weight) and moved.bias is not None and same(moved.bias, dense.bias)
    assert same(on_card.codes, packed.codes) and same(on_card.scales, packed.scales)
    assert on_card.zeros is not None and same(on_card.zeros, packed.zeros)
    assert (on_card.bits, on_card.group, on_card.shape, on_card.bias) == (4, 32, (64, 512), None)
