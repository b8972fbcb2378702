"""What is read off a card is written as it comes: a command that fails, hangs or is cut short costs nothing else."""

from __future__ import annotations

import importlib.util
import json
import shlex
import subprocess
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
    cut = """echo '{{"case": 1}}'; echo '{{"case": 2}}'; sleep 60"""
    steps = [
        card_run.Step("bad", "echo something && false", 20),
        card_run.Step("hangs", "echo begun; sleep 60 & sleep 60", 1),
        card_run.Step("cut", cut, 3),
        card_run.Step("good", say, 20),
    ]
    began = time.monotonic()
    assert card_run.play("part", steps, tmp_path) == 3
    assert time.monotonic() - began < 40
    bad, hangs, cut_short, good = json.loads((tmp_path / "part.json").read_text())["results"]
    assert bad["code"] == 1 and not bad["ended_by_limit"] and "document" not in bad
    assert hangs["code"] != 0 and hangs["ended_by_limit"]
    assert cut_short["documents"] == [{"case": 1}, {"case": 2}] and cut_short["ended_by_limit"]
    assert good["code"] == 0 and good["document"] == {"ms": 1} and "documents" not in good
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


def test_its_tests_run_where_no_plugin_is_installed(tmp_path: Path) -> None:
    """A machine with a card has pytest and little beside it; unknown options of pyproject.toml must not end the run."""
    commands = [s.command for steps in card_run.PARTS.values() for s in steps if "pytest" in s.command]
    assert len(commands) == 3
    trivial = tmp_path / "test_trivial.py"
    trivial.write_text("def test_it(): pass\n")
    for command in commands:
        plain = shlex.split(command.format(python=sys.executable))
        options = plain[: next(i for i, word in enumerate(plain) if word.startswith("tests/"))]
        done = subprocess.run(
            [*options, "-p", "no:timeout", "-c", str(ROOT / "pyproject.toml"), str(trivial)],
            capture_output=True, text=True, timeout=200, cwd=ROOT, env=card_run.environment(),
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
