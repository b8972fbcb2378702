"""A step never has more than a card's buffers hold: requests that share a prompt's pages, many slots, long paths."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from soloist.engine.build import card_shapes
from soloist.engine.runner import Runner
from soloist.models.card import CardModel, CardShapes, Tables
from soloist.models.state import AcceptedPath
from soloist.models.step import RequestRows, verify_step
from soloist.ops.triton.attention import SPLIT

CPU = torch.device("cpu")
PAGES = 64  # of a pool that one request fills


def each(shapes: CardShapes, settled: Sequence[int]) -> int:
    return CardModel.rows_each(SimpleNamespace(shapes=shapes), settled)  # type: ignore[arg-type]


def entries(shapes: CardShapes, settled: Sequence[int], rows: int) -> int:
    """Partial results of attention that a step of chains needs, its padding's too; all requests have the same pages."""
    tables = Tables(shapes, 4, CPU)
    chain = list(range(-1, rows - 1))
    batch = [RequestRows([1] * rows, chain, n, i, list(range(PAGES))) for i, n in enumerate(settled)]
    tables.fill(verify_step(batch, 4), shapes.rows)
    return int((tables.card["parts"] + tables.card["positions"] // SPLIT + 1).max())


@pytest.mark.parametrize("company", [1, 2, 3, 5, 8])
def test_requests_over_one_prompt_fit(company: int) -> None:
    shapes = card_shapes(8, 16, PAGES, PAGES)
    settled = [PAGES * 64 - 20 - i for i in range(company)]
    rows = each(shapes, settled)
    assert rows >= 1
    assert entries(shapes, settled, min(rows, 16)) <= shapes.splits


def test_without_it_they_would_not() -> None:
    shapes = card_shapes(8, 16, PAGES, PAGES)
    assert entries(shapes, [PAGES * 64 - 20] * 4, 16) > shapes.splits


@pytest.mark.parametrize(("seqs", "verify"), [(1, 1), (1, 16), (3, 7), (8, 16), (8, 64)])
def test_requests_with_pages_of_their_own_have_all_their_rows(seqs: int, verify: int) -> None:
    shapes = card_shapes(seqs, verify, PAGES, PAGES)
    own = PAGES // seqs * 64 - 1
    assert each(shapes, [own] * seqs) >= min(verify, max(1, shapes.rows // seqs))
    assert each(shapes, [PAGES * 64 - 1]) >= verify


class Many(Runner):
    """Steps that are only counted."""

    def __init__(self, model: Any) -> None:
        super().__init__(model, None, None, 0, 16, *[lambda *_: None] * 3)  # type: ignore[arg-type]
        self.steps: list[list[int]] = []

    def _draft(self, requests: Sequence[Any]) -> list[Any]:
        self.steps.append([r.slot for r in requests])
        return []

    def _verify(self, *_: Any) -> Any:
        return None, SimpleNamespace(heads=None), None

    def _accept(self, *_: Any) -> Any:
        return []

    def _commit(self, *_: Any) -> None: ...


def test_more_requests_than_a_step_has_rows_run_in_several() -> None:
    shapes = card_shapes(150, 16, PAGES, PAGES)
    run = Many(SimpleNamespace(rows_each=lambda settled: each(shapes, settled)))
    run.decode([SimpleNamespace(slot=i, settled=5) for i in range(150)])  # type: ignore[misc]
    assert [slot for step in run.steps for slot in step] == list(range(150))
    assert len(run.steps) > 1 and max(map(len, run.steps)) <= shapes.rows


def test_a_path_may_have_as_many_rows_as_are_verified() -> None:
    from soloist.models.card import Paths

    shapes = card_shapes(1, 64, PAGES, PAGES)
    assert entries(shapes, [10], 64) <= shapes.splits
    path, lengths = Paths(shapes, CPU).fill([AcceptedPath(0, list(range(64)), [0, 1], 10)])
    assert lengths[0] == 64 and path[0].tolist() == list(range(64))
