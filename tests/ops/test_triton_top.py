"""The best entries of a row against a sort: every tie, sign, infinity and NaN, and rows shorter than asked for."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from soloist.ops.top import Heads, row_heads, width
from soloist.ops.triton.top import RowTop


def heads(logits: torch.Tensor, count: int, stats: bool = True) -> Heads:
    rows, vocab = logits.shape
    top = RowTop(rows, vocab, count, logits.device, stats)
    out = torch.full((rows, width(count)), 7, dtype=torch.int32, device=logits.device)
    top(logits, out)
    return Heads.unpack(out.cpu().numpy(), count)


def check(logits: torch.Tensor, count: int) -> None:
    got, want = heads(logits, count), row_heads(logits, count)
    np.testing.assert_array_equal(got.ids, want.ids)
    np.testing.assert_array_equal(got.values, want.values)
    np.testing.assert_array_equal(got.token, want.token)
    np.testing.assert_array_equal(got.best, want.best)
    np.testing.assert_allclose(got.total, want.total, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("vocab", "count"), [(20000, 128), (4097, 64), (300, 64), (40, 64), (270000, 64)])
def test_random_rows(device: torch.device, dtype: torch.dtype, vocab: int, count: int) -> None:
    generator = torch.Generator().manual_seed(vocab)
    check((torch.randn(3, vocab, generator=generator) * 4).to(dtype).to(device), count)


def test_ties_take_the_lowest_ids(device: torch.device) -> None:
    generator = torch.Generator().manual_seed(0)
    few = torch.randint(-3, 3, (4, 9000), generator=generator).to(torch.bfloat16)
    few[1] = 0.0
    few[2, ::2] = -0.0  # equal to 0
    few[2, 1::2] = 0.0
    few[3] = -5.0
    few[3, 8999] = -4.0
    check(few.to(device), 64)


def test_infinities_and_nan(device: torch.device) -> None:
    generator = torch.Generator().manual_seed(1)
    rows = torch.randn(4, 5000, generator=generator).to(torch.bfloat16)
    rows[0, 17] = float("inf")
    rows[1, 4999] = float("nan")
    rows[2, 100:] = float("-inf")
    rows[3] = float("-inf")
    got = heads(rows.to(device), 64)
    assert got.best[0] == np.inf and got.token[0] == 17
    assert np.isnan(got.best[1])
    assert got.best[3] == -np.inf
    want = row_heads(rows[2:3], 64)
    np.testing.assert_array_equal(got.ids[2], want.ids[0])
    assert got.total[2] == pytest.approx(want.total[0], rel=1e-5)


def test_without_stats_the_entries_are_the_same(device: torch.device) -> None:
    logits = torch.randn(2, 5000, generator=torch.Generator().manual_seed(2)).to(torch.bfloat16).to(device)
    got, want = heads(logits, 64, stats=False), row_heads(logits, 64)
    np.testing.assert_array_equal(got.ids, want.ids)
    np.testing.assert_array_equal(got.token, want.token)
