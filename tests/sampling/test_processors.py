"""Processors against transformers, and each option by its own definition."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from transformers.generation.logits_process import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from sampling.tiny import dense_law
from soloist.errors import EngineError
from soloist.ops.top import row_heads
from soloist.sampling.history import History
from soloist.sampling.params import SamplingParams
from soloist.sampling.processors import TargetLaw, greedy_token, processed, target_law
from soloist.sampling.rows import BEST, LogitRows

V = 1500


def law_of(x: torch.Tensor, params: SamplingParams, prompt=(), output=()) -> np.ndarray:  # type: ignore[no-untyped-def]
    history = History(params.validate(x.shape[-1]), list(prompt), x.shape[-1])
    for token in output:
        history.advance(token)
    law = target_law(LogitRows(x[None]), 0, history)
    assert np.all(np.diff(law.ids) > 0) and law.scores.max() == 0
    dense = np.zeros(x.shape[-1])
    dense[law.ids] = law.probs
    return dense


def random_params(rng: np.random.Generator) -> dict[str, float]:
    pick = rng.random
    return {
        "temperature": float(rng.choice([1.0, 0.6, 1.3])),
        "top_k": int(rng.choice([0, 1, 5, 20, 64, 100])),
        "top_p": float(rng.choice([1.0, 0.95, 0.5])),
        "min_p": float(rng.choice([0.0, 0.05, 0.3])),
        "repetition_penalty": float(1.0 if pick() < 0.3 else rng.choice([1.1, 1.5, 0.8])),
    }


def test_support_and_values_equal_transformers() -> None:
    rng = np.random.default_rng(0)
    for case in range(300):
        kw = random_params(rng)
        x = torch.from_numpy((rng.standard_normal(V) * rng.choice([0.5, 2.0, 4.0])).astype(np.float32))
        prompt, output = rng.integers(0, V, 40).tolist(), rng.integers(0, V, 10).tolist()
        ids = torch.tensor([prompt + output])
        y = x[None].clone()
        if kw["repetition_penalty"] != 1.0:
            y = RepetitionPenaltyLogitsProcessor(kw["repetition_penalty"])(ids, y)
        y = TemperatureLogitsWarper(kw["temperature"])(ids, y)
        if kw["min_p"]:
            y = MinPLogitsWarper(kw["min_p"])(ids, y)
        if kw["top_k"]:
            y = TopKLogitsWarper(kw["top_k"])(ids, y)
        if kw["top_p"] < 1:
            y = TopPLogitsWarper(kw["top_p"])(ids, y)
        want = torch.softmax(y[0].double(), -1).numpy()
        got = law_of(x, SamplingParams(**kw), prompt, output)
        assert np.array_equal(got > 0, want > 0), (case, kw)
        assert np.abs(got - want).max() < 1e-5


def test_all_steps_equal_a_dense_restatement() -> None:
    rng = np.random.default_rng(1)
    for _ in range(300):
        kw = random_params(rng) | {
            "presence_penalty": float(rng.choice([0.0, 0.7])),
            "frequency_penalty": float(rng.choice([0.0, -0.4, 1.0])),
        }
        x = torch.from_numpy((rng.standard_normal(V) * 3).astype(np.float32))
        prompt, output = rng.integers(0, V, 30).tolist(), rng.integers(0, 30, 40).tolist()
        params = SamplingParams(**kw)
        want = dense_law(x.numpy(), params, prompt, output)
        got = law_of(x, params, prompt, output)
        assert np.array_equal(got > 0, want > 0), kw
        assert np.abs(got - want).max() < 1e-5


def test_ties_at_the_kth_value_are_kept_and_the_nucleus_prefers_low_ids() -> None:
    x = torch.tensor([0.0, 2.0, 1.0, 1.0, 1.0, -1.0])
    assert np.flatnonzero(law_of(x, SamplingParams(top_k=2))).tolist() == [1, 2, 3, 4]
    flat = torch.zeros(10)
    assert np.flatnonzero(law_of(flat, SamplingParams(top_p=0.35))).tolist() == [0, 1, 2, 3]
    assert np.flatnonzero(law_of(flat, SamplingParams(top_p=1e-9))).tolist() == [0]


def test_long_nucleus_without_top_k_equals_a_full_sort() -> None:
    rng = np.random.default_rng(3)
    for spread in (0.1, 1.0, 4.0):
        x = torch.from_numpy(np.round(rng.standard_normal(6000) * spread, 2).astype(np.float32))
        for top_p in (0.05, 0.6, 0.999):
            got = law_of(x, SamplingParams(top_p=top_p))
            want = dense_law(x.numpy(), SamplingParams(top_p=top_p), (), ())
            assert np.array_equal(got > 0, want > 0)
            assert np.abs(got - want).max() < 1e-6


@pytest.mark.parametrize("temperature", [1e-45, 1e-38, 1e-4])
def test_tiny_temperatures_end_in_the_argmax(temperature: float) -> None:
    x = torch.tensor([1.0, 3.0, -2.0, 3.5])
    assert law_of(x, SamplingParams(temperature=temperature)).tolist() == [0, 0, 0, 1]
    assert law_of(-x.abs(), SamplingParams(temperature=temperature)).tolist() == [1, 0, 0, 0]


def test_greedy_takes_the_lowest_id_among_equals() -> None:
    history = History(SamplingParams(temperature=0.0), [], 5)
    assert greedy_token(LogitRows(torch.tensor([[0.0, 7.0, 7.0, 1.0, 7.0]])), 0, history) == 1
    assert target_law(LogitRows(torch.tensor([[0.0, 7.0, 7.0, 1.0, 7.0]])), 0, history).ids.tolist() == [1]


def test_bias_allowed_and_stop_ids() -> None:
    x = torch.zeros(8)
    assert law_of(x, SamplingParams(logit_bias={3: 100.0, 4: 100.0, 5: -100.0}))[[3, 4]] == pytest.approx([0.5, 0.5])
    assert np.flatnonzero(law_of(x, SamplingParams(allowed_ids=(6, 1)))).tolist() == [1, 6]
    waiting = SamplingParams(min_tokens=2, stop_ids=(0, 7))
    assert np.flatnonzero(law_of(x, waiting, output=(2,))).tolist() == [1, 2, 3, 4, 5, 6]
    assert np.flatnonzero(law_of(x, waiting, output=(2, 2))).tolist() == list(range(8))
    banned = law_of(x, SamplingParams(logit_bias={2: -math.inf}, allowed_ids=(2, 3)))
    assert np.flatnonzero(banned).tolist() == [3]


def test_bad_words_are_banned_only_where_they_would_be_completed() -> None:
    params = SamplingParams(bad_words=((4,), (1, 2), (1, 2, 3)))
    x = torch.zeros(6)
    assert np.flatnonzero(law_of(x, params)).tolist() == [0, 1, 2, 3, 5]
    assert np.flatnonzero(law_of(x, params, output=(1,))).tolist() == [0, 1, 3, 5]
    assert np.flatnonzero(law_of(x, params, output=(0, 1))).tolist() == [0, 1, 3, 5]
    assert np.flatnonzero(law_of(x, params, output=(1, 2))).tolist() == [0, 1, 2, 5]
    assert np.flatnonzero(law_of(x, params, prompt=(1,))).tolist() == [0, 1, 2, 3, 5]


def test_a_row_without_a_finite_maximum_is_named() -> None:
    history = History(SamplingParams(), [], 4)
    for bad in (math.nan, math.inf):
        rows = torch.zeros(3, 4)
        rows[2, 1] = bad
        with pytest.raises(EngineError, match="row 2"):
            target_law(LogitRows(rows), 2, history)
        assert len(target_law(LogitRows(rows), 1, history).ids) == 4
    with pytest.raises(EngineError, match="row 0"):
        target_law(LogitRows(torch.full((1, 4), -math.inf)), 0, history)
    nothing = History(SamplingParams(allowed_ids=(1,), bad_words=((1,),)), [], 4)
    with pytest.raises(EngineError, match="leave no token"):
        target_law(LogitRows(torch.zeros(1, 4)), 0, nothing)


@pytest.mark.parametrize(
    "kw",
    [
        {"top_k": 20, "top_p": 0.95},
        {"top_p": 0.9},
        {"min_p": 0.01, "temperature": 0.7},
        {"repetition_penalty": 1.2, "presence_penalty": 0.3, "top_k": 40},
        {},
    ],
)
def test_a_row_has_the_same_bits_whatever_stands_beside_it(kw: dict[str, float]) -> None:
    """Row position, number of rows, memory alignment and storage dtype of the neighbours must not matter."""
    rng = np.random.default_rng(7)
    params, width = SamplingParams(**kw), 1003
    row = torch.from_numpy((rng.standard_normal(width) * 2).astype(np.float32))

    def law(rows: torch.Tensor, index: int) -> TargetLaw:
        return target_law(LogitRows(rows), index, History(params, [1, 2, 3], width))

    alone = law(row[None], 0)
    for count in range(1, 9):
        for index in range(count):
            rows = torch.from_numpy((rng.standard_normal((count, width)) * 9).astype(np.float32))
            rows[index] = row
            other = law(rows, index)
            assert np.array_equal(other.ids, alone.ids)
            assert np.array_equal(other.scores.view(np.int32), alone.scores.view(np.int32))
            assert np.array_equal(other.probs.view(np.int64), alone.probs.view(np.int64))


def test_raw_rows_are_never_written() -> None:
    rows = torch.randn(2, 50)
    before = rows.clone()
    params = SamplingParams(
        repetition_penalty=1.3, logit_bias={1: 5.0}, bad_words=((2,),), min_tokens=3, stop_ids=(4,), temperature=0.5
    )
    history = History(params, [5, 6], 50)
    target_law(LogitRows(rows), 1, history)
    processed(LogitRows(rows), 0, history)
    assert torch.equal(rows, before)


def remote(rows: torch.Tensor, untouchable: bool = False) -> LogitRows:
    """Rows as a card hands them over: with their best entries (`untouchable`: and nothing else)."""
    return LogitRows(torch.full_like(rows, math.nan) if untouchable else rows, row_heads(rows, BEST))


def test_rows_of_an_accelerator_give_the_same_laws() -> None:
    rng = np.random.default_rng(5)
    for case in range(200):
        x = rng.standard_normal((4, 700)) * 3
        # Every second case is full of ties, also beyond the entries that are fetched.
        rows = torch.from_numpy((np.round(x) if case % 2 else x).astype(np.float32)).to(
            torch.bfloat16 if case % 3 == 0 else torch.float32
        )
        params = SamplingParams(
            top_k=int(rng.choice([0, 1, 2, 20, 64])),
            top_p=float(rng.choice([1.0, 0.9, 0.5])),
            min_p=float(rng.choice([0.0, 0.1])),
            temperature=float(rng.choice([1.0, 0.7, 1.3, 1e-44])),
        )
        history, greedy = History(params, [], 700), History(SamplingParams(temperature=0.0), [], 700)
        here, there = LogitRows(rows), remote(rows)
        for index in range(4):
            a, b = target_law(here, index, history), target_law(there, index, history)
            assert np.array_equal(a.ids, b.ids)
            assert np.array_equal(a.scores.view(np.int32), b.scores.view(np.int32))
            assert greedy_token(here, index, greedy) == greedy_token(there, index, greedy)
    rows[1, 3] = math.nan
    for read in (LogitRows, remote):
        with pytest.raises(EngineError, match="row 1"):
            target_law(read(rows), 1, history)
        with pytest.raises(EngineError, match="row 1"):
            greedy_token(read(rows), 1, greedy)


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(top_k=20, top_p=0.95, temperature=0.6),
        SamplingParams(top_k=64),
        SamplingParams(min_p=0.05, temperature=1.5),
        SamplingParams(top_p=0.95),
        SamplingParams(top_p=0.8, temperature=0.7),
        SamplingParams(temperature=0.0),
    ],
    ids=["top-k", "top-k at the edge", "min-p", "top-p", "top-p and a temperature", "greedy"],
)
def test_the_best_entries_suffice_for_rows_of_a_language_model(params: SamplingParams) -> None:
    """Peaked rows of a large vocabulary: no option here needs the row itself."""
    rng = np.random.default_rng(9)
    x = rng.standard_normal((8, 50000)).astype(np.float32)
    x[:, :40] += np.linspace(20, 10, 40, dtype=np.float32)
    rows, history = torch.from_numpy(x), History(params, [], 50000)
    for index in range(8):
        a = target_law(LogitRows(rows), index, history)
        b = target_law(remote(rows, untouchable=True), index, history)
        assert np.array_equal(a.ids, b.ids) and np.array_equal(a.scores.view(np.int32), b.scores.view(np.int32))
