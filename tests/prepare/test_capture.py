"""Capture sees what the modules really read, and leaves the answers alone."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from oracle.target import load_target, states
from soloist import Engine
from soloist.checkpoint.reader import open_checkpoint
from soloist.cli import app
from soloist.errors import CheckpointError, SettingError
from soloist.prepare.capture import capture
from soloist.prepare.draft_vocab import read_counts
from soloist.prepare.hessians import Captured
from soloist.prepare.recipe import OUTPUTS
from soloist.sampling.params import SamplingParams
from tiny import build_tiny, build_tiny_drafter

PROMPTS = [list(b"The first question"), list(b"Another one, a little longer"), list(b"Third")]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny(tmp_path_factory.mktemp("capture") / "m", pattern="LLLF")


def engine(model: Path, **knobs: object) -> Engine:
    return Engine(model, prefix_cache=False, threads=1, max_len=256, **knobs)


def test_the_heads_hessian_is_that_of_the_hidden_rows(model: Path, tmp_path: Path) -> None:
    with engine(model, spec="none", lookup=False) as plain:
        rows = capture(plain, PROMPTS, tmp_path / "c", ["lm_head"], tokens=12, temperature=0.0)
    answers = [json.loads(line) for line in (tmp_path / "c" / OUTPUTS).read_text().splitlines()]
    oracle = load_target(model)
    seen = []
    for answer in answers:
        hidden = states(oracle, answer["ids"][:-1]).hidden
        seen.append(hidden[answer["prompt"] - 1 :])  # from the row that gives the first token on
    x = torch.cat(seen)
    hessian = Captured(tmp_path / "c").hessian("lm_head")
    assert hessian is not None and hessian.rows == rows["lm_head"] == len(x)
    expected = 2 / len(x) * x.T @ x
    torch.testing.assert_close(hessian.matrix, expected, rtol=0, atol=1e-3 * float(expected.abs().max()))
    counted = read_counts(tmp_path / "c")
    assert counted.total() == sum(len(answer["ids"]) - answer["prompt"] for answer in answers)


@pytest.mark.parametrize(
    "spec, part, module, shared",
    [
        ("mtp", "mtp", "mtp.layers.0.self_attn.q_proj", "mtp.layers.0.self_attn.v_proj"),
        ("dflash2", "drafter", "layers.1.mlp.gate_proj", "layers.1.mlp.up_proj"),
    ],
)
def test_drafters_are_watched_and_answers_stay(
    model: Path, tmp_path: Path, spec: str, part: str, module: str, shared: str
) -> None:
    knobs: dict[str, object] = {"spec": spec}
    if spec == "dflash2":
        knobs["drafter"] = build_tiny_drafter(tmp_path / "d", model)
    params = SamplingParams(max_tokens=10, temperature=0.0, stop_ids=(256, 258))
    with engine(model, spec="none", lookup=False) as plain:
        expected = [list(answer.tokens) for answer in plain.generate(PROMPTS, params)]
    with engine(model, **knobs) as drafting:
        rows = capture(drafting, PROMPTS, tmp_path / "c", ["lm_head", part], tokens=10, temperature=0.0)  # type: ignore[list-item]
    answers = [json.loads(line) for line in (tmp_path / "c" / OUTPUTS).read_text().splitlines()]
    assert [answer["ids"][answer["prompt"] :] for answer in answers] == expected
    captured = Captured(tmp_path / "c")
    found = captured.hessian(module)
    assert found is not None and found is captured.hessian(shared) and rows[module] == found.rows > 0
    checkpoint = open_checkpoint(model) if spec == "mtp" else open_checkpoint(str(knobs["drafter"]), "drafter")
    quantisable = [name for name in rows if name != "lm_head"]
    assert {name: captured.hessian(name).matrix.shape[0] for name in quantisable} == {  # type: ignore[union-attr]
        name: checkpoint.modules[name].shape[1] for name in quantisable
    }
    assert len(quantisable) == (8 if spec == "mtp" else 15)


def test_refusals(model: Path, tmp_path: Path) -> None:
    with engine(model, spec="none", lookup=False) as plain:
        with pytest.raises(SettingError, match="does not draft with the MTP module"):
            capture(plain, PROMPTS, tmp_path / "c", ["mtp"])
        capture(plain, PROMPTS[:1], tmp_path / "c", ["lm_head"], tokens=2)
        with pytest.raises(CheckpointError, match="holds a capture already"):
            capture(plain, PROMPTS, tmp_path / "c", ["lm_head"])


def test_commands_from_prompts_to_a_served_result(model: Path, tmp_path: Path) -> None:
    (tmp_path / "prompts.txt").write_text("Hello there\n\nWhat is a fox?\n")
    run = CliRunner().invoke
    first = run(app, ["capture", str(model), "--prompts", str(tmp_path / "prompts.txt"), "--out", str(tmp_path / "c"),
                      "--tokens", "24", "--max-len", "512", "--threads", "1"])  # fmt: skip
    assert first.exit_code == 0, first.output
    assert "mtp.fc" in first.output
    options = ["--part", "lm_head=int4:gptq", "--part", "mtp=int4:gptq", "--part", "body=int4:gptq", "--group", "32"]
    text = ["--text", str(tmp_path / "c" / OUTPUTS), "--evaluate", str(tmp_path / "c" / OUTPUTS)]
    out = tmp_path / "fast"
    second = run(app, ["quantize", str(model), *options, "--capture", str(tmp_path / "c"), *text, "--out", str(out)])
    assert second.exit_code == 0, second.output
    assert "perplexity" in second.output
    report = json.loads((out / "quantize_report.json").read_text())
    assert report["evaluation"]["tokens"] > 20 and report["bytes_after"] < report["bytes_before"]
    third = run(app, ["draft-vocab", str(out), "--capture", str(tmp_path / "c"), "--size", "64"])
    assert third.exit_code == 0, third.output
    with engine(out, spec="mtp") as fast, engine(out, spec="none", lookup=False) as plain:
        params = SamplingParams(max_tokens=12, temperature=0.0)
        assert [a.tokens for a in fast.generate(PROMPTS, params)] == [a.tokens for a in plain.generate(PROMPTS, params)]
    wrong = run(app, ["quantize", str(model), "--part", "body=int8", "--text", "x", "--out", str(tmp_path / "x")])
    assert wrong.exit_code == 2 and "no part uses gptq" in wrong.output
