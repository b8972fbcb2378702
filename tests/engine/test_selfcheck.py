"""What a check found is kept under its key, until somebody asks to measure again."""

from pathlib import Path

import pytest
import torch

from soloist.cache.recurrent import RecurrentState, StateShapes
from soloist.cache.tiles import TileStore
from soloist.checkpoint.reader import open_checkpoint
from soloist.engine.selfcheck import cached_check, card_prints, check_contracts, forget_checks, user_cache
from soloist.models.layers import Loader
from soloist.models.qwen3_5 import Qwen35
from soloist.models.state import Caches
from tiny import build_tiny


def test_the_cache_is_where_the_variable_says_if_it_says_something(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/somebody")
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    assert user_cache() == Path("/home/somebody/.cache/soloist")  # and not below the working directory
    monkeypatch.setenv("XDG_CACHE_HOME", "/caches")
    monkeypatch.setattr(Path, "home", lambda: (_ for _ in ()).throw(RuntimeError("no home")))
    assert user_cache() == Path("/caches/soloist")


def test_an_outcome_is_kept_until_it_is_forgotten(tmp_path: Path) -> None:
    runs = []

    def run() -> list[str]:
        runs.append(1)
        return ["E2"]

    assert cached_check("a", run, tmp_path) == cached_check("a", run, tmp_path) == ["E2"]
    assert len(runs) == 1
    cached_check("b", run, tmp_path)
    assert len(runs) == 2
    forget_checks(tmp_path)
    cached_check("a", run, tmp_path)
    assert len(runs) == 3


def test_a_card_is_asked_again_after_a_change_of_code_or_driver() -> None:
    assert set(card_prints()) == {"code", "cuda", "driver"} and len(card_prints()["code"]) == 16


@pytest.mark.parametrize("fault", ["", "tiles are packed when they are settled"])
def test_tiles_are_asked_where_packed_ones_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    """What upstream does makes a row's keys depend on where its step or slice began: that must be found."""
    build_tiny(tmp_path, pattern="LF", mtp=False)
    checkpoint = open_checkpoint(tmp_path)
    c = checkpoint.config
    model = Qwen35(Loader(checkpoint, torch.device("cpu"), torch.float32), c)

    def fresh(slots: int, pages: int) -> Caches:
        kv = TileStore(
            layers=1, kv_heads=c.num_kv_heads, head_dim=c.head_dim, pages=pages, slots=slots, dtype=torch.float32
        )  # fmt: skip
        return Caches(kv, RecurrentState(StateShapes.of(c), slots))

    if fault:
        honest = TileStore.read_settled

        def as_settled(self, layer, index, slot, tile):
            return honest(self, layer, index, slot, index.numel() // 128 + 1)

        monkeypatch.setattr(TileStore, "read_settled", as_settled)
    assert check_contracts(model, fresh, TileStore.tile) == (["E1", "E3"] if fault else [])
