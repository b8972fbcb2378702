"""What the doctor says about pictures, for every set-up that can go wrong."""

from __future__ import annotations

from pathlib import Path

import pytest

from soloist.checks import vision
from soloist.checks.base import Finding, Status, Subject
from tiny import build_tiny
from tiny_vision import build_tiny_vision


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_vision(tmp_path_factory.mktemp("vision"))


def look(directory: Path, at: Path, on: str = "1") -> list[Finding]:
    return list(vision.vision.examine(Subject({"model": str(directory), "vision": on}, {"SESSION_DIR": "none"}, at)))


def test_off_and_complete(directory: Path, tmp_path: Path) -> None:
    assert [f.status for f in look(directory, tmp_path, "0")] == [Status.PASS]
    (found,) = look(directory, tmp_path)
    assert found.status is Status.PASS and "2 blocks, 256 pixels" in found.summary


def test_a_text_model(tmp_path: Path) -> None:
    (found,) = look(build_tiny(tmp_path / "text"), tmp_path)
    assert found.status is Status.FAIL and "no vision tower" in found.summary and "VISION=0" in found.remedy


def test_without_the_preprocessor_config(directory: Path, tmp_path: Path) -> None:
    for file in directory.iterdir():
        if file.name != "preprocessor_config.json":
            (tmp_path / file.name).symlink_to(file)
    (found,) = look(tmp_path, tmp_path)
    assert found.status is Status.FAIL and "preprocessor_config.json" in found.summary


def test_without_the_packages(directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vision, "_installed", lambda module: module != "PIL")
    (found,) = look(directory, tmp_path)
    assert found.status is Status.FAIL and "pillow" in found.summary and "soloist[vision]" in found.remedy


def test_an_unreadable_directory_is_another_checks_business(tmp_path: Path) -> None:
    assert [f.status for f in look(tmp_path / "none", tmp_path)] == [Status.PASS]
