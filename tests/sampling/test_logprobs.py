"""Reported log-probabilities: values, ranks, ties, and bits that do not depend on neighbours."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from soloist.errors import EngineError
from soloist.sampling.logprobs import prompt_logprobs, token_logprobs


def test_values_ranks_and_alternatives_equal_log_softmax() -> None:
    rows = torch.from_numpy((np.random.default_rng(0).standard_normal((20, 3001)) * 4).astype(np.float32))
    want = rows.double().log_softmax(-1)
    for i in range(20):
        order = want[i].argsort(descending=True).tolist()
        for token in (order[0], order[7], order[-1]):
            got = token_logprobs(rows, i, token, 20)
            assert got.logprob == pytest.approx(want[i, token].item(), abs=2e-6)
            assert got.rank == order.index(token) + 1
            assert [t for t, _ in got.top] == order[:20]
            assert [p for _, p in got.top] == pytest.approx(want[i, order[:20]].tolist(), abs=2e-6)
    assert token_logprobs(rows, 0, 5).top == ()
    assert len(token_logprobs(rows, 0, 5, 1).top) == 1


def test_ties_are_ordered_by_id_and_share_a_rank() -> None:
    rows = torch.tensor([[1.0, 3.0, 3.0, 2.0, 3.0, 1.0]])
    got = token_logprobs(rows, 0, 4, 4)
    assert got.rank == 1
    assert [t for t, _ in got.top] == [1, 2, 4, 3]
    assert token_logprobs(rows, 0, 0, 0).rank == 5
    assert [t for t, _ in token_logprobs(rows, 0, 0, 20).top] == [1, 2, 4, 3, 0, 5]


@pytest.mark.parametrize("width", [31, 1000, 16384])
def test_a_row_has_the_same_bits_whatever_stands_beside_it(width: int) -> None:
    rng = np.random.default_rng(width)
    row = torch.from_numpy(rng.standard_normal(width).astype(np.float32))
    alone = token_logprobs(row[None], 0, 3, 5)
    for count in (2, 3, 5, 8):
        for index in range(count):
            rows = torch.from_numpy(rng.standard_normal((count, width)).astype(np.float32) * 5)
            rows[index] = row
            assert token_logprobs(rows, index, 3, 5) == alone


def test_masked_entries_are_minus_infinity_and_broken_rows_are_errors() -> None:
    rows = torch.tensor([[0.0, -torch.inf, 0.0], [0.0, torch.nan, 0.0]])
    got = token_logprobs(rows, 0, 1, 3)
    assert got.logprob == -torch.inf and got.rank == 3
    with pytest.raises(EngineError, match="row 1"):
        token_logprobs(rows, 1, 0)


def test_prompt_rows_report_the_token_that_follows() -> None:
    rows = torch.randn(4, 50)
    following = [3, 1, 4]
    got = prompt_logprobs(rows, following, 2)
    assert [g.token for g in got] == following
    assert got[1] == token_logprobs(rows, 1, 1, 2)
