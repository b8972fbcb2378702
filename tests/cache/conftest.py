from __future__ import annotations

from pathlib import Path

import pytest

from tiny import build_tiny, build_tiny_drafter


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random hybrid with an MTP module and a DFlash2 drafter."""
    directory = tmp_path_factory.mktemp("tiny") / "model"
    build_tiny(directory)
    build_tiny_drafter(directory / "dflash2", directory)
    return directory
