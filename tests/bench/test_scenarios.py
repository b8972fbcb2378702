"""Each scenario against the scripted server: the right figures, and failures where something is wrong."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from typer.testing import CliRunner

from bench.fake_server import MODEL, FakeServer, Faults
from soloist.bench.client import Client
from soloist.bench.promptset import Prompt, chat_prompts
from soloist.bench.result import Result
from soloist.bench.run import Context
from soloist.bench.scenarios import document, ladder, prefill, quality, single, soak
from soloist.cli import app

PROMPTS = [Prompt(f"p{n}", "english" if n % 2 else "code", f"Tell me about number {n}.") for n in range(4)]


def measure(server: FakeServer, scenario: Callable[[Context], Awaitable[Result]], repeats: int = 1) -> Result:
    async def go() -> Result:
        async with Client(server.url) as client:
            return await scenario(Context(client, repeats=repeats, warm_up=1))

    return asyncio.run(go())


def test_single_sends_cohorts_and_reports_the_scripted_acceptance():
    with FakeServer() as server:
        result = measure(server, lambda c: single.run(c, PROMPTS, max_tokens=31, cohorts=(1, 4)), repeats=2)
        assert server.peak == 4
    rows = {(r["mode"], r["cohort"]): r for r in result.tables[0].rows}
    assert set(rows) == {("default", 1), ("default", 4), ("greedy", 1), ("greedy", 4)} and result.passed
    row = rows["greedy", 1]
    assert row["tokens_per_step"].mean == pytest.approx(3.0) and row["per_position"] == [1.0, 1.0, 0.0, 0.0]
    assert row["tokens"].mean == 4 * 31 and row["decode"].count == 2
    # Three tokens per 2 ms step at best; a client that counts prefill or chunks wrongly exceeds that.
    assert 0 < row["decode"].mean <= 1500 and 0 < rows["greedy", 4]["decode"].mean <= 6000
    assert {r["kind"] for r in result.tables[1].rows} == {"english", "code"}
    assert {p.title for p in result.panels} >= {"Decode rate", "Acceptance per position"}


def test_single_reports_errors_and_prints_absent_figures():
    with FakeServer(faults=Faults(no_usage=True, no_metrics=True)) as server:
        result = measure(server, lambda c: single.run(c, PROMPTS[:2], max_tokens=8, cohorts=(1,), modes=("greedy",)))
    assert result.tables[0].rows[0]["decode"] is None and "n/a" in result.tables[0].markdown()
    with FakeServer(faults=Faults(cut_after=2)) as server:
        result = measure(server, lambda c: single.run(c, PROMPTS[:2], max_tokens=30, cohorts=(1,), modes=("greedy",)))
    assert len(result.failures) == 2 and "without a finish_reason" in result.failures[0]


def test_ladder_salts_its_prompts_and_shares_them_on_request():
    with FakeServer() as server:
        result = measure(server, lambda c: ladder.run(c, rungs=(1, 3), prompt_tokens=300, max_tokens=31))
    assert [r["cached"] for r in result.tables[0].rows] == [0, 0]
    assert result.tables[0].rows[1]["rows"].mean == pytest.approx(15.0)
    assert result.tables[0].rows[0]["step_ms"].mean >= 2.0
    prompts = [b["messages"][0]["content"] for b in server.bodies[1:]]
    assert len(set(prompts)) == 4 and all(b["ignore_eos"] for b in server.bodies[1:])
    with FakeServer() as server:
        result = measure(server, lambda c: ladder.run(c, rungs=(1, 2), prompt_tokens=300, max_tokens=8, shared=True))
    assert len({b["messages"][0]["content"] for b in server.bodies[1:]}) == 1
    assert result.tables[0].rows[1]["cached"] > 0


def test_saturation_is_the_last_rung_that_paid():
    from soloist.bench.measure import Spread

    def points(*rates: float):
        return [(n + 1, Spread(r, r, r, 1)) for n, r in enumerate(rates)]

    assert ladder.saturation(points(100, 180, 185, 183)) == 2
    assert ladder.saturation(points(100, 180, 260)) is None
    assert ladder.saturation([(1, None)]) is None


def test_prefill_counts_only_uncached_tokens():
    with FakeServer(prefill_s=0.05) as server:
        result = measure(server, lambda c: prefill.run(c, lengths=(200,), cohorts=(1, 2)))
    row = result.tables[0].rows[0]
    assert row["prompt_tokens"] > 200 and row["cached"] == 0
    assert row["rate"].mean == pytest.approx(row["prompt_tokens"] / (row["ttft"].mean / 1e3), rel=0.01)


def test_document_checks_the_copy_and_compares_caches():
    with FakeServer() as server:
        result = measure(server, lambda c: document.run(c, tokens=700, copy_lines=5, max_tokens=40, turn_tokens=8))
    tasks = {r["task"]: r for r in result.tables[0].rows}
    assert list(tasks) == ["copy", "commands", "shorten", "quote", "summary", "answer"]
    assert tasks["copy"]["exact"].startswith("0 of ") and tasks["answer"]["exact"] == "wrong"
    assert [r["turn"] for r in result.tables[1].rows] == [1, 2, 3, 4, 1, 2, 3, 4]
    assert any("restart" in note for note in result.notes)


def test_document_restart_row_with_a_manual_restart():
    called = []
    with FakeServer() as server:
        result = measure(
            server,
            lambda c: document.run(
                c, tokens=400, copy_lines=3, max_tokens=8, turn_tokens=8, wait_for_restart=lambda: called.append(1)
            ),
        )
    assert called == [1] and result.tables[1].rows[-1]["cache"] == "after restart"


def soaked(faults: Faults, **options: Any) -> tuple[Result, FakeServer]:
    with FakeServer(step_s=0.001, faults=faults) as server:
        options = {"rounds": 4, "streams": 4, "max_tokens": 40, "hang_up": False, **options}
        return measure(server, lambda c: soak.run(c, PROMPTS, **options)), server


def test_soak_passes_on_a_healthy_server_and_hangs_up_on_it():
    with FakeServer(step_s=0.02) as server:
        result = measure(
            server, lambda c: soak.run(c, PROMPTS, rounds=3, streams=4, max_tokens=40, document_characters=200)
        )
    assert result.passed, result.failures
    assert [r["same"] for r in result.tables[0].rows] == [4, 4, 4] and server.cancelled == 3
    assert result.tables[0].rows[0]["pages"] == 7 and len(result.details["texts"]) == 4


@pytest.mark.parametrize(
    ("faults", "complaint"),
    [
        (Faults(flip_after=8), "answer differs at character 5"),
        (Faults(leak_pages=True), "pages in use grew"),
        (Faults(leak_memory=True), "memory grew"),
        (Faults(cut_after=4), "without a finish_reason"),
    ],
)
def test_soak_fails_on_a_planted_fault(faults, complaint):
    result, _ = soaked(faults)
    assert not result.passed and any(complaint in f for f in result.failures), result.failures


def test_soak_counts_pages_when_every_turn_is_settled():
    result, _ = soaked(Faults(slow_settling=True))
    assert result.passed and [r["pages"] for r in result.tables[0].rows] == [7, 7, 7, 7]


def test_soak_notices_requests_that_never_end(monkeypatch):
    monkeypatch.setattr(soak, "IDLE_S", 0.2)
    result, _ = soaked(Faults(never_idle=True), rounds=2)
    assert any("requests run still" in f for f in result.failures)


def test_quality_perplexity_by_both_ways_of_asking():
    sources = quality.Sources(parts=("perplexity",))
    for faults in (Faults(), Faults(refuse_fields=("prompt_logprobs",))):
        with FakeServer(faults=faults) as server:
            result = measure(server, lambda c: quality.run(c, sources))
        # Every token has log-probability -0.5, so the perplexity is e ** 0.5 whatever the text.
        assert result.tables[0].rows[0]["perplexity"] == pytest.approx(1.6487, abs=1e-3)
        assert {r["kind"] for r in result.tables[1].rows} == {"english", "danish", "code", "manual", "data"}


def test_the_shipped_prompts_cover_their_kinds():
    prompts = chat_prompts()
    assert len(prompts) == 8 and len({p.id for p in prompts}) == 8
    assert {p.kind for p in prompts} == {"english", "danish", "code", "json-sql", "arithmetic", "summarise"}


def test_command_line_writes_json_and_plot_and_sets_the_exit_code(tmp_path):
    arguments = ["bench", "soak", "--rounds", "2", "--streams", "2", "--max-tokens", "20", "--out", str(tmp_path)]
    with FakeServer(step_s=0.001) as server:
        done = CliRunner().invoke(app, [*arguments, "--url", server.url, "--name", "good"])
    assert done.exit_code == 0, done.output
    data = json.loads((tmp_path / "good.json").read_text())
    assert data["about"]["server"]["model"] == MODEL and data["about"]["machine"]["cores"]
    assert (tmp_path / "good.png").read_bytes().startswith(b"\x89PNG")
    with FakeServer(step_s=0.001, faults=Faults(flip_after=4)) as server:
        done = CliRunner().invoke(app, [*arguments, "--url", server.url, "--name", "bad", "--no-plot"])
    assert done.exit_code == 1 and "FAIL" in done.output
    assert not (tmp_path / "bad.png").exists()


def test_missing_matplotlib_is_said_before_anything_runs(monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with FakeServer() as server:
        done = CliRunner().invoke(app, ["bench", "single", "--url", server.url])
        assert done.exit_code == 2 and "soloist[bench]" in done.stderr and server.served == 0


def test_a_wrong_list_names_the_option():
    done = CliRunner().invoke(app, ["bench", "ladder", "--rungs", "1,x"])
    assert done.exit_code == 2 and "--rungs" in done.stderr
