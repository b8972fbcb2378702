"""Which device serves, and what is said when it is not the one a user would expect."""

from __future__ import annotations

import shutil

import pytest
import torch

from soloist import toolchain
from soloist.engine import build
from soloist.errors import SettingError, UserError
from soloist.settings import resolve


def test_a_card_that_torch_cannot_use_is_mentioned(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(shutil, "which", lambda name: f"/usr/bin/{name}")
    assert build._device(resolve({}, {}, {})).type == "cpu"
    assert "soloist doctor" in caplog.text
    caplog.clear()
    assert build._device(resolve({"device": "cpu"}, {}, {})).type == "cpu" and not caplog.text
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert build._device(resolve({}, {}, {})).type == "cpu" and not caplog.text
    with pytest.raises(SettingError, match="DEVICE=cuda"):
        build._device(resolve({"device": "cuda"}, {}, {}))


def test_without_a_compiler_a_card_is_refused_before_weights_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "_device", lambda settings: torch.device("cuda"))
    monkeypatch.setattr(toolchain, "missing", lambda: "a C compiler")
    with pytest.raises(UserError, match="Triton needs a C compiler"):
        build.build_engine(resolve({"model": "demo"}, {}, {}))
