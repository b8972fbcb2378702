"""Progress reports survive the trip through a pipe, and the bar leaves the terminal alone where there is none."""

from __future__ import annotations

import io

import pytest

from soloist.progress import READY, bar, lines, parse


def test_reports_survive_the_pipe() -> None:
    pipe = io.StringIO()
    report = lines(pipe)
    said = [("reading weights", 0, 24), ("layers", 24, 24), (READY, 1, 1)]
    for one in said:
        report(*one)
    assert [parse(line) for line in pipe.getvalue().splitlines()] == said


@pytest.mark.parametrize("line", ["", "hello", "@progress", "@progress x 3 what", "@progress -1 3 what", "INFO: ready"])
def test_other_lines_are_not_reports(line: str) -> None:
    assert parse(line) is None


def test_without_a_terminal_each_part_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with bar("Loading x") as shown:
        for i in range(5):
            shown("layers", i, 5)
        shown(READY, 1, 1)
    assert capsys.readouterr().err.splitlines() == ["Loading x: layers", "Loading x: ready"]
