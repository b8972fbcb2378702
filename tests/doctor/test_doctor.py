"""The command, the generated page, the live-server checks and the bundle."""

from __future__ import annotations

import json
import string
import zipfile
from pathlib import Path

import pytest
from typer.testing import CliRunner

from bench.fake_server import FakeServer
from soloist.checks import contracts, live
from soloist.checks.base import Status, Subject
from soloist.checks.bundle import without_secrets, write_bundle
from soloist.checks.contracts import Experiment, Run, difference
from soloist.cli import app
from soloist.doctor import every_check, examine, markdown

PAGE = Path(__file__).parents[2] / "docs/troubleshooting.md"


def test_the_page_is_current():
    assert PAGE.read_text(encoding="utf-8") == markdown(), "run: soloist doctor --markdown > docs/troubleshooting.md"


def test_every_outcome_that_is_not_fine_has_a_remedy_and_readable_fields():
    names = [c.name for c in every_check()]
    assert len(names) == len(set(names))
    for check in every_check():
        for key, outcome in check.outcomes.items():
            assert (outcome.status is Status.PASS) == (not outcome.remedy), (check.name, key)
            assert all(name is None or name.isidentifier() for _, name, _, _ in string.Formatter().parse(outcome.says))


def test_command_prints_json_and_fails_with_one(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SESSION_DIR", "none")
    done = CliRunner().invoke(app, ["doctor", str(tmp_path / "none"), "--json"])
    assert done.exit_code == 1
    findings = json.loads(done.stdout)
    broken = next(f for f in findings if f["check"] == "model")
    assert broken["status"] == "FAIL" and broken["remedy"]
    done = CliRunner().invoke(app, ["doctor", str(tmp_path / "none")])
    assert "FAIL  model" in done.stdout and "->" in done.stdout


def test_a_silent_server_and_a_foreign_one(tmp_path):
    silent = Subject({"port": "9"}, {}, tmp_path)
    found = examine(silent, [live.server])
    assert found[0].outcome == "silent" and "soloist serve" in found[0].remedy
    with FakeServer() as server:
        found = examine(Subject({}, {}, tmp_path, server_url=server.url + "/v1"), [live.server])
    assert found[0].outcome == "foreign"


def run(tokens, logprobs, cached=0, accepted=0) -> Run:
    return Run(tuple(tokens), tuple(logprobs), cached, accepted)


def test_difference_names_the_first_place():
    a = [run([1, 2], [-0.5, -0.25]), run([3], [-1.0])]
    assert difference(a, a) is None
    assert difference(a, [run([1, 9], [-0.5, -0.25]), a[1]]) == "text 1: token 1 is 2 and 9"
    assert "2 and 1 tokens" in (difference(a, [run([1], [-0.5]), a[1]]) or "")
    assert "log-probability 1 differs by 1e-09" in (difference(a, [run([1, 2], [-0.5, -0.25 + 1e-9]), a[1]]) or "")


@pytest.mark.parametrize(
    ("part", "outcome"), [("plain", "e1_broken"), ("company", "e2_broken"), ("warm", "e3_broken"), (None, None)]
)
def test_a_broken_contract_is_named(part, outcome, monkeypatch, tmp_path):
    good = [run([1, 2, 3], [-0.1, -0.2, -0.3], cached=64, accepted=2)]
    bad = [run([1, 2, 4], [-0.1, -0.2, -0.3])]
    parts = {name: bad if name == part else good for name in ("alone", "company", "warm", "plain")}
    monkeypatch.setattr(contracts, "measure", lambda _: Experiment(**parts, drafted=True))
    found = examine(Subject({}, {}, tmp_path), contracts.SELF_CHECKS)
    assert [f.outcome for f in found if f.status is Status.FAIL] == ([outcome] if outcome else [])
    assert {f.outcome for f in found} >= {"e1", "e2", "e3"} - {(outcome or "").removesuffix("_broken")}


@pytest.mark.slow
def test_the_contracts_hold_on_the_demo(tmp_path):
    found = examine(Subject({}, {"SESSION_DIR": "none"}, tmp_path), contracts.SELF_CHECKS)
    assert [f.outcome for f in found] == ["e1", "e2", "e3"], found


def test_the_bundle_holds_what_a_report_needs_and_no_key(tmp_path):
    request = tmp_path / "request.json"
    body = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 5, "stream": True, "api_key": "sesame-9"}
    request.write_text(json.dumps(body))
    with FakeServer() as server:
        subject = Subject({}, {"API_KEY": "sesame-9,other-8", "MAX_SEQS": "3"}, tmp_path, server_url=server.url)
        findings = examine(subject, [live.server])
        write_bundle(subject, findings, tmp_path / "b.zip", request)
    with zipfile.ZipFile(tmp_path / "b.zip") as archive:
        files = {name: archive.read(name).decode() for name in archive.namelist()}
    assert set(files) >= {"settings.json", "versions.json", "findings.json", "model.json", "request.json", "reply.json"}
    assert "sesame-9" not in "".join(files.values()) and "other-8" not in "".join(files.values())
    assert json.loads(files["settings.json"])["max_seqs"] == {"value": "3", "from": "environment"}
    assert json.loads(files["reply.json"])["status"] == 200
    assert "server/metrics.txt" in files


def test_secrets_are_masked_by_name():
    masked = without_secrets({"headers": {"Authorization": "Bearer x"}, "list": [{"api_key": "y"}], "max_tokens": 5})
    assert masked == {"headers": {"Authorization": "***"}, "list": [{"api_key": "***"}], "max_tokens": 5}
