"""Weights through page-locked memory: the bits of a plain copy, however late the card is, and nothing left behind."""

from __future__ import annotations

import mmap
import os
from pathlib import Path

import pytest
import torch

from soloist.ops.upload import SLOT, SLOTS, Road, Staging, through, upload

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
CARD = torch.device("cuda")
CYCLES = 1_000_000_000  # of a card that is busy: half a second


def test_pages_of_a_file_arrive_behind_a_busy_card(tmp_path: Path) -> None:
    size = 3 * SLOTS * SLOT + 12_345
    (tmp_path / "weights").write_bytes(os.urandom(size))
    with (tmp_path / "weights").open("rb") as handle:
        pages = mmap.mmap(handle.fileno(), 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    source = torch.frombuffer(pages, dtype=torch.uint8, count=size)
    torch.zeros(1, device=CARD)
    before = torch.cuda.memory_allocated()
    staging = Staging(Road(CARD))
    with through(staging):
        torch.cuda._sleep(CYCLES)
        arrived = upload(source, CARD)
        assert torch.cuda.memory_allocated() - before <= size + (2 << 20)
        host = staging._host
        assert host is not None and host.is_pinned(), "page-locked"
        doubled = arrived * 2  # what is launched behind it finds it complete
    assert not host.is_pinned(), "given up"
    assert torch.equal(arrived, source.to(CARD)) and torch.equal(doubled.cpu(), source * 2)
    del arrived, doubled
    assert torch.cuda.memory_allocated() == before


def test_the_ring_comes_back_before_the_card_has_read_it_all() -> None:
    source = torch.randint(0, 255, (SLOTS * SLOT,), dtype=torch.uint8)
    with through(Staging(Road(CARD))):
        upload(source, CARD)  # memory is locked and kernels are loaded
        begun, ended = torch.cuda.Event(), torch.cuda.Event()
        begun.record()
        torch.cuda._sleep(CYCLES)
        arrived = upload(source, CARD)
        ended.record()
        assert not ended.query(), "as much as the ring holds is taken while the card is busy"
        source.zero_()
    assert int(arrived.sum(dtype=torch.int64)) > 0 and not torch.equal(arrived.cpu(), source)


def test_a_refusal_is_a_plain_copy() -> None:
    staging = Staging(Road(CARD))
    source = torch.randn(1 << 20)
    cudart, locked = torch.cuda.cudart(), torch.empty(SLOTS * SLOT, dtype=torch.uint8)
    assert int(cudart.cudaHostRegister(locked.data_ptr(), locked.nbytes, 0)) == 0
    try:
        assert not Road(CARD).lock(locked), "it is page-locked already: refused"
        assert torch.ones(3, device=CARD).sum().item() == 3, "the refusal is not raised behind a kernel"
        staging._refused = True
        with through(staging):
            assert torch.equal(upload(source, CARD).cpu(), source) and staging._host is None
    finally:
        cudart.cudaHostUnregister(locked.data_ptr())
