"""Formulas, text formats and the run file, on numbers worked out by hand."""

from __future__ import annotations

import math

import pytest

from soloist.bench.client import Answer
from soloist.bench.measure import (
    Spread,
    decode_rate,
    end_to_end_rate,
    percentile,
    speculation_between,
    speculation_of,
)
from soloist.bench.prometheus import parse_metrics
from soloist.bench.report import write_report
from soloist.bench.result import ABSENT, Column, Panel, Result, Series, Table, format_cell
from soloist.errors import UserError


def answer(ttft: float, total: float, tokens: int, **spec) -> Answer:
    metrics = {"speculative_decoding": spec} if spec else {}
    return Answer(ttft_ms=ttft, total_ms=total, completion_tokens=tokens, finish_reason="stop", metrics=metrics)


def test_decode_rate_is_c_times_1000_over_mean_tpot():
    # TPOTs 10 and 30 ms: mean 20; four streams: 200 tok/s.
    assert decode_rate(4, [answer(100, 200, 11), answer(50, 350, 11)]) == pytest.approx(200.0)
    assert decode_rate(4, [answer(100, 100, 1)]) is None


def test_end_to_end_rate_needs_every_count():
    assert end_to_end_rate([answer(1, 2, 30), answer(1, 2, 10)], 2.0) == pytest.approx(20.0)
    assert end_to_end_rate([answer(1, 2, 30), Answer()], 2.0) is None


def test_speculation_sums_requests():
    a = answer(
        1, 2, 9, num_spec_steps=4, num_draft_tokens=16, num_accepted_draft_tokens=4, acceptance_histogram=[1, 2, 1]
    )
    b = answer(
        1, 2, 9, num_spec_steps=6, num_draft_tokens=24, num_accepted_draft_tokens=6, acceptance_histogram=[1, 4, 1]
    )
    spec = speculation_of([a, b, Answer()])
    assert spec is not None and (spec.steps, spec.drafted, spec.accepted) == (10, 40, 10)
    assert spec.tokens_per_step == pytest.approx(2.0) and spec.rows_per_step == pytest.approx(5.0)
    assert spec.per_position == pytest.approx((0.8, 0.2))


def test_speculation_from_counters_is_a_difference():
    def scrape(drafts: int, drafted: int, accepted: int, first: int, second: int) -> str:
        return "\n".join(
            [
                f'vllm:spec_decode_num_drafts_total{{model_name="m"}} {drafts}',
                f'vllm:spec_decode_num_draft_tokens_total{{model_name="m"}} {drafted}',
                f'vllm:spec_decode_num_accepted_tokens_total{{model_name="m"}} {accepted}',
                f'vllm:spec_decode_num_accepted_tokens_per_pos_total{{model_name="m",position="0"}} {first}',
                f'vllm:spec_decode_num_accepted_tokens_per_pos_total{{model_name="m",position="1"}} {second}',
            ]
        )

    spec = speculation_between(parse_metrics(scrape(5, 10, 6, 4, 2)), parse_metrics(scrape(15, 30, 20, 12, 8)))
    assert spec is not None and spec.tokens_per_step == pytest.approx(2.4)
    assert spec.per_position == pytest.approx((0.8, 0.6))
    assert speculation_between(None, parse_metrics("other 1")) is None


def test_metrics_text_with_labels_and_escapes():
    samples = parse_metrics('# HELP x y\nx{a="1",b="q\\"}"} 2.5\nx{a="2"} 1e3\ny 7 1700000000\nbroken line here\n')
    assert samples.total("x") == 1002.5 and samples.by_label("x", "a") == {"1": 2.5, "2": 1000.0}
    assert samples.total("absent") is None and samples.first("absent", "y") == 7


def test_percentile_and_spread():
    assert (
        percentile(list(range(1, 101)), 0.99) == 99 and percentile([5.0], 0.99) == 5.0 and percentile([], 0.5) is None
    )
    spread = Spread.of([1.0, None, 3.0, math.inf])
    assert spread == Spread(2.0, 1.0, 3.0, 2) and Spread.of([None]) is None


@pytest.mark.parametrize(
    ("value", "digits", "text"),
    [
        (None, 1, ABSENT),
        (Spread(10.0, 9.0, 12.0, 3), 1, "10.0 ± 1.5"),
        (Spread(10.0, 10.0, 10.0, 1), 1, "10.0"),
        ([0.5, 0.25], 2, "0.50 0.25"),
        ("stop", None, "stop"),
        (0, 0, "0"),
    ],
)
def test_cells(value, digits, text):
    assert format_cell(value, digits) == text


def run_with(rate: float) -> Result:
    table = Table(
        "Chat",
        [Column("c", "C", 0), Column("rate", "tok/s", 1)],
        [{"c": 1, "rate": Spread(rate, rate - 1, rate + 1, 2)}],
    )
    panel = Panel("Rate", "C", "tok/s", "line", [Series("greedy", [1, 2], [rate, None], [[rate, rate], [0.0, 0.0]])])
    about = {"server": {"model": "m"}, "command": "soloist bench single", "machine": {"cpu": "c", "cores": 2}}
    return Result("single", [table], [panel], about=about, notes=["a note"])


def test_a_run_survives_its_file(tmp_path):
    run = run_with(10.0)
    run.write(tmp_path / "a.json")
    again = Result.read(tmp_path / "a.json")
    assert again == run
    assert not list(tmp_path.glob("*.part"))


def test_report_puts_runs_side_by_side(tmp_path):
    run_with(10.0).write(tmp_path / "a.json")
    run_with(20.0).write(tmp_path / "b.json")
    files = write_report([tmp_path / "a.json", tmp_path / "b.json"], tmp_path / "out" / "report.md")
    text = files[0].read_text()
    assert "| a | 1 | 10.0 ± 1.0 |" in text and "| b | 1 | 20.0 ± 1.0 |" in text
    assert "a note" in text and "`soloist bench single`" in text
    assert files[1].read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("content", ["", "[]", '{"format": "other"}'])
def test_a_foreign_file_is_refused(tmp_path, content):
    (tmp_path / "x.json").write_text(content)
    with pytest.raises(UserError, match=r"x\.json"):
        Result.read(tmp_path / "x.json")
