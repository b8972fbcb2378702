"""The allocator is told for weights and pool only, and not at all where the user has told it."""

import pytest
import torch

from soloist.engine import segments


@pytest.mark.parametrize(
    ("device", "environ", "told"),
    [
        ("cuda", {}, ["expandable_segments:True", "expandable_segments:False"]),
        ("cuda", {"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64"}, []),
        ("cuda", {"PYTORCH_ALLOC_CONF": "expandable_segments:False"}, []),
        ("cpu", {}, []),
    ],
)
def test_expandable_inside_and_ordinary_behind(
    monkeypatch: pytest.MonkeyPatch, device: str, environ: dict[str, str], told: list[str]
) -> None:
    said: list[str] = []
    monkeypatch.setattr(segments, "_setting", lambda: said.append)
    monkeypatch.setattr(segments, "_why_not", lambda device: None)
    with pytest.raises(KeyError), segments.side_by_side(torch.device(device), environ):
        assert said == told[:1]
        raise KeyError
    assert said == told


def test_ordinary_ones_where_none_can_be_had(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    said: list[str] = []
    monkeypatch.setattr(segments, "_setting", lambda: said.append)
    monkeypatch.setattr(torch, "zeros", lambda *a, **k: (_ for _ in ()).throw(RuntimeError("operation not supported")))
    with caplog.at_level("INFO"), segments.side_by_side(torch.device("cuda"), {}):
        assert said == ["expandable_segments:True", "expandable_segments:False"]
    assert "operation not supported" in caplog.text


def test_torch_can_be_told() -> None:
    assert callable(segments._setting())
