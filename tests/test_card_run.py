"""What is read off a card is written as it comes: a command that fails, hangs or is cut short costs nothing else."""

from __future__ import annotations

import importlib.util
import json
import shlex
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parent.parent
SPEC = importlib.util.spec_from_file_location("card_run", ROOT / "tools/card_run.py")
assert SPEC is not None and SPEC.loader is not None
card_run = importlib.util.module_from_spec(SPEC)
sys.modules["card_run"] = card_run
SPEC.loader.exec_module(card_run)


def test_every_command_leaves_what_it_has(tmp_path: Path) -> None:
    say = "{python} -c " + shlex.quote("print('hello'); print('{{\"ms\": 1}}')")
    steps = [
        card_run.Step("bad", "echo something && false", 20),
        card_run.Step("hangs", "echo begun; sleep 60 & sleep 60", 1),
        card_run.Step("good", say, 20),
    ]
    began = time.monotonic()
    assert card_run.play("part", steps, tmp_path) == 2
    assert time.monotonic() - began < 30
    bad, hangs, good = json.loads((tmp_path / "part.json").read_text())["results"]
    assert bad["code"] == 1 and not bad["ended_by_limit"] and "document" not in bad
    assert hangs["code"] != 0 and hangs["ended_by_limit"]
    assert good["code"] == 0 and good["document"] == {"ms": 1}
    text = (tmp_path / "part.txt").read_text()
    assert all(word in text for word in ("something", "begun", "hello"))


def test_a_part_has_no_more_than_its_time(tmp_path: Path) -> None:
    steps = [card_run.Step(name, "sleep 60", 60) for name in ("first", "second")]
    began = time.monotonic()
    assert card_run.play("part", steps, tmp_path, seconds=2) == 2
    assert time.monotonic() - began < 20


def test_the_commands_are_known() -> None:
    from soloist.bench import loop, memory

    text = " ".join(step.command for steps in card_run.PARTS.values() for step in steps)
    for step in card_run.PARTS["memory"]:
        names = step.command.split("--cases ")[1].split()[0].split(",")
        assert set(names) <= set(memory.cases()), names
    assert "tests/gpu" in text and loop.ARMS
    assert all(sum(min(s.limit_s, card_run.PART_S) for s in steps) > 0 for steps in card_run.PARTS.values())
