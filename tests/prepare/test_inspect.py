"""What inspect says about directories, and that the commands it proposes are accepted by the parser."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner

from foreign import make_foreign
from soloist import demo
from soloist.checkpoint.reader import open_checkpoint
from soloist.cli import app
from soloist.errors import CheckpointError
from soloist.prepare.inspect import inspect, plan_text
from soloist.prepare.quantize import quantize
from soloist.prepare.recipe import PartRecipe, parse_part
from tiny import build_tiny, build_tiny_drafter


def test_a_dense_target_lacks_everything(tmp_path: Path) -> None:
    directory = build_tiny(tmp_path / "dflash2-looking", pattern="LF", nested=True)
    found = inspect(directory)
    assert found.kind == "target"
    assert [missing.what for missing in found.missing] == [
        "a 4-bit body",
        "a 4-bit head",
        "an 8-bit embedding",
        "a 4-bit MTP module",
        "a draft vocabulary",
    ]
    verbs = [command.split()[1] for command in found.commands]
    assert verbs == ["capture", "quantize", "draft-vocab"]
    words = shlex.split(found.commands[1])
    assert [parse_part(words[i + 1])[0] for i, word in enumerate(words) if word == "--part"] == [
        "body",
        "lm_head",
        "embed",
        "mtp",
    ]
    assert f"{found.parameters:,}" in "\n".join(plan_text(found))


STATES: dict[str, tuple[dict[str, object], dict[str, PartRecipe]]] = {
    "dense": ({}, {}),
    "dense, tied": ({"tied": True}, {}),
    "body and head done": ({}, {"body": PartRecipe(4), "lm_head": PartRecipe(4)}),
    "all but the embedding": ({"mtp": False}, {"body": PartRecipe(4), "lm_head": PartRecipe(4)}),
    "no MTP module": ({"mtp": False}, {}),
    "all but a vocabulary": (
        {},
        {"body": PartRecipe(4), "lm_head": PartRecipe(4), "embed": PartRecipe(8), "mtp": PartRecipe(4)},
    ),
}


QUICK = ("dense", "all but a vocabulary", "drafter")


@pytest.mark.parametrize(
    "state",
    [pytest.param(state, marks=() if state in QUICK else pytest.mark.slow) for state in (*STATES, "drafter")],
)
def test_every_command_works_as_it_stands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, state: str) -> None:
    """In a directory with a space in its name and seen as `.`; afterwards nothing is missing."""
    changes, parts = STATES.get(state, ({}, {}))
    pattern = "LLLF" if state == "drafter" else "LF"
    sizes = {"pattern": pattern, "hidden": 256, "ffn": 256, "key_dim": 64, "value_dim": 64}
    directory = build_tiny(tmp_path / "my model", **(sizes | changes))
    if parts:
        quantize(open_checkpoint(directory), parts, tmp_path / "my quants")  # type: ignore[arg-type]
        directory = tmp_path / "my quants"
    if state == "drafter":
        directory = build_tiny_drafter(directory / "dflash2", directory)
    monkeypatch.setattr("soloist.prepare.texts.Reader.prompts", lambda *_, **__: [list(b"A fox"), list(b"Two foxes")])
    monkeypatch.setenv("MAX_LEN", "128")
    monkeypatch.setenv("THREADS", "1")
    monkeypatch.chdir(directory)
    found = inspect(Path("."))
    assert found.commands
    for command in found.commands:
        done = CliRunner().invoke(app, shlex.split(command)[1:])
        assert done.exit_code == 0, (command, done.output)
    last = shlex.split(found.commands[-1])
    made = Path(last[last.index("--out") + 1] if "--out" in last else last[2])
    after = inspect(made)
    assert after.missing == () and after.commands == () and after.notes == found.notes


def test_what_is_there_is_not_asked_for_again(tmp_path: Path) -> None:
    source = build_tiny(tmp_path / "m", pattern="LF")
    parts = {"body": PartRecipe(4, group=32), "lm_head": PartRecipe(4, group=32), "embed": PartRecipe(8, group=32)}
    quantize(open_checkpoint(source), parts, tmp_path / "q")
    assert [m.what for m in inspect(tmp_path / "q").missing] == ["a 4-bit MTP module", "a draft vocabulary"]


@pytest.mark.parametrize("form", ["gptq", "awq"])
def test_other_formats_are_named(tmp_path: Path, form: str) -> None:
    source = build_tiny(tmp_path / "m", pattern="LF")
    make_foreign(source, tmp_path / "q", form, symmetric=False)
    found = inspect(tmp_path / "q")
    assert {(row.form, row.bits, row.group) for row in found.parts if row.part == "mlp"} == {(form, 4, 32)}


def test_a_drafter_is_recognised_by_its_config(tmp_path: Path) -> None:
    source = build_tiny(tmp_path / "m", pattern="LLF")
    found = inspect(build_tiny_drafter(tmp_path / "plain-name", source))
    assert found.kind == "drafter" and found.missing[0].what == "a 4-bit drafter"


def test_a_missing_directory(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="is not a directory"):
        inspect(tmp_path / "none")


def test_command() -> None:
    table = json.loads(CliRunner().invoke(app, ["inspect", "demo", "--json"]).stdout)
    assert table["parameters"] == 29_474_732 and table["directory"] == str(demo.path())
    text = CliRunner().invoke(app, ["inspect", str(demo.drafter_path())])
    assert text.exit_code == 0 and "DFlash2 block drafter" in text.stdout
