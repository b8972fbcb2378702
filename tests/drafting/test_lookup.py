"""The incremental index against a literal scan, and its cost."""

from __future__ import annotations

import random
import time

import pytest

from drafting.reference import continuation, find_match
from soloist.drafting.lookup import LookupConfig, LookupIndex
from soloist.errors import SettingError

SHAPES = [(7, 4, 32), (15, 4, 32), (31, 6, 12), (15, 8, 64), (7, 2, 8), (15, 1, 3), (7, 6, 6)]


def histories(rng: random.Random) -> list[int]:
    """Small alphabets, periods with and without a fault, copies of an earlier stretch, and text without any match."""
    kind = rng.randrange(4)
    size = rng.randrange(1, 160)
    if kind == 0:
        return [rng.randrange(rng.choice([1, 2, 3, 5])) for _ in range(size)]
    if kind == 1:
        period = [rng.randrange(50) for _ in range(rng.randrange(1, 20))]
        text = [period[i % len(period)] for i in range(size)]
        if rng.random() < 0.5:
            text[rng.randrange(size)] = 99
        return text
    if kind == 2:
        text = [rng.randrange(1000) for _ in range(size)]
        start = rng.randrange(size)
        return text + text[start : start + rng.randrange(1, 60)]
    return rng.sample(range(10_000), size)


@pytest.mark.parametrize(("count", "nmin", "nmax"), SHAPES)
def test_every_prefix_matches_the_scan(count: int, nmin: int, nmax: int) -> None:
    rng = random.Random(count * 1000 + nmin * 10 + nmax)
    hits = 0
    for _ in range(100):
        text = histories(rng)
        search = rng.choice([0, 0, 10, 40])
        extend = rng.random() < 0.5
        index = LookupIndex(LookupConfig(nmin=nmin, nmax=nmax, search=search, extend=extend))
        for i, token in enumerate(text):
            index.push(token)
            want = find_match(text[: i + 1], nmin, nmax, search)
            got = index.match(count)
            assert (got and (got.length, got.end)) == want
            if got:
                hits += 1
                assert list(got.tokens) == continuation(text[: i + 1], got.end, count, extend)
    assert hits > 1000


def test_a_short_period_fills_the_block_only_when_extended() -> None:
    text = [1, 2, 3, 4] * 5
    assert len(LookupIndex(LookupConfig(extend=False), text).match(15).tokens) == 4
    assert list(LookupIndex(LookupConfig(), text).match(15).tokens) == [1, 2, 3, 4, 1, 2, 3, 4, 1, 2, 3, 4, 1, 2, 3]


def test_shorter_matches_come_after_longer_ones() -> None:
    text = [*range(100, 112), 7, *range(106, 112), 8, *range(100, 112)]
    assert LookupIndex(LookupConfig(), text).matches() == [(12, 11), (6, 18)]


def test_a_short_history_never_matches() -> None:
    index = LookupIndex(LookupConfig(), [5] * 7)
    assert index.match(4) is None
    index.push(5)
    assert index.match(4).tokens == (5, 5, 5, 5)


def test_impossible_knobs_are_refused() -> None:
    with pytest.raises(SettingError, match="NMIN <= NMAX"):
        LookupConfig(nmin=8, nmax=4)
    with pytest.raises(SettingError, match="SEARCH"):
        LookupConfig(search=-1)


def test_a_push_and_a_match_cost_microseconds_however_long_the_text() -> None:
    rng = random.Random(0)
    index = LookupIndex(LookupConfig(), [rng.randrange(3) for _ in range(60_000)])
    start = time.thread_time()
    for _ in range(2000):
        index.push(rng.randrange(3))
        index.match(15)
    assert (time.thread_time() - start) / 2000 < 100e-6
