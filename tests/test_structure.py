"""The house keeps its layers, and docs/structure.md names what is really there."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import soloist

PACKAGE = Path(soloist.__file__).parent
ROOT = PACKAGE.parent.parent

# What a room may import besides itself and errors.py. Rooms not listed (commands, bench, prepare) sit at the edge.
MAY_IMPORT = {
    "ops": set(),
    "checkpoint": {"ops"},
    "models": {"ops", "checkpoint"},
    "cache": {"ops", "checkpoint", "models", "drafting", "sampling"},
    "sampling": {"ops", "checkpoint", "models", "drafting", "cache"},
    "drafting": {"ops", "checkpoint", "models", "sampling", "cache"},
    "engine": {
        "ops",
        "checkpoint",
        "models",
        "drafting",
        "sampling",
        "cache",
        "settings",
        "progress",
        "demo",
        "planner",
        "toolchain",
        "cores",
    },
    "planner": {"cache", "checkpoint"},
    "server": {"engine", "sampling", "settings", "progress"},
    "chat": {"settings", "progress"},
    "settings": {"knobs", "combinations"},
    "errors": set(),
    "toolchain": set(),
    "cores": set(),
}
BELOW_ENGINE = ("ops", "checkpoint", "models", "cache", "sampling", "drafting")


def files(room: str) -> list[Path]:
    return [PACKAGE / f"{room}.py"] if (PACKAGE / f"{room}.py").exists() else sorted((PACKAGE / room).rglob("*.py"))


def imported(path: Path) -> Iterator[str]:
    """Full names of the modules a file imports, wherever in it."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            if node.module == "soloist":
                yield from (f"soloist.{alias.name}" for alias in node.names)


@pytest.mark.parametrize("room", MAY_IMPORT)
def test_imports_point_down(room: str) -> None:
    assert files(room)
    allowed = MAY_IMPORT[room] | {room, "errors"}
    wrong = [
        f"{path.relative_to(PACKAGE)} imports {name}"
        for path in files(room)
        for name in imported(path)
        if name.startswith("soloist.") and name.split(".")[1] not in allowed
    ]
    assert not wrong, wrong


@pytest.mark.parametrize("room", BELOW_ENGINE)
def test_below_the_engine_nobody_reads_the_environment_or_speaks_http(room: str) -> None:
    for path in files(room):
        assert not {"fastapi", "starlette", "uvicorn", "httpx"} & {n.split(".")[0] for n in imported(path)}, path
        attributes = {n.attr for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.Attribute)}
        assert not {"environ", "getenv"} & attributes, path


def test_every_room_is_in_the_table() -> None:
    table = (ROOT / "docs/structure.md").read_text()
    rooms = {p.name for p in PACKAGE.iterdir() if (p / "__init__.py").exists()}
    missing = {room for room in rooms if f"`{room}/`" not in table}
    assert not missing, missing


def test_every_file_the_page_names_exists() -> None:
    page = (ROOT / "docs/structure.md").read_text()
    names = set(re.findall(r"`((?:[a-z_0-9]+/)*[a-z_0-9]+(?:\.py|/))`", page))
    assert len(names) > 30
    missing = {n for n in names if not any((base / n).exists() for base in (PACKAGE, ROOT, PACKAGE.parent))}
    assert not missing, missing


def test_the_pages_the_readme_links_to_exist() -> None:
    links = re.findall(r"\]\(([^)#:]+)\)", (ROOT / "README.md").read_text())
    assert links and all((ROOT / link).exists() for link in links)


def test_the_make_targets_the_readme_names_exist() -> None:
    makefile = (ROOT / "Makefile").read_text()
    targets = set(
        re.findall(r"^    (?:[A-Z_0-9=a-z]+ )*make (\w+)", (ROOT / "README.md").read_text(), flags=re.MULTILINE)
    )
    assert {"chat", "test", "serve"} <= targets
    assert all(re.search(rf"^{t}:", makefile, flags=re.MULTILINE) for t in targets)
