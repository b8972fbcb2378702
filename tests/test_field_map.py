"""docs/field-reports.md names tests that exist, and a test that names a report is listed under it."""

from __future__ import annotations

import ast
import re
from pathlib import Path

TESTS = Path(__file__).parent
PAGE = TESTS.parent / "docs" / "field-reports.md"


def functions(path: Path) -> dict[str, str]:
    """Test name -> docstring."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    found = [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef) and n.name.startswith("test_")]
    return {f.name: ast.get_docstring(f) or "" for f in found}


def test_the_map_is_true():
    listed: dict[str, set[str]] = {}
    for line in PAGE.read_text(encoding="utf-8").splitlines():
        row = re.match(r"\| (R\d+) \|", line)
        if row:
            listed[row[1]] = set(re.findall(r"`([\w/]+\.py::\w+)`", line))
            assert listed[row[1]], f"{row[1]} has no test"
    assert len(listed) >= 20
    for report, tests in listed.items():
        for test in tests:
            path, name = test.split("::")
            assert name in functions(TESTS / path), f"{report}: {test} does not exist"
    for path in (TESTS / "http").glob("test_field_*.py"):
        for name, text in functions(path).items():
            for report in re.findall(r"\bR\d\d\b", text):
                assert f"http/{path.name}::{name}" in listed[report], f"{report} does not list {name}"
