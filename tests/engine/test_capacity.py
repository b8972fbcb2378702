"""What cannot fit is refused before any weight is read, with the numbers."""

from __future__ import annotations

import pytest

from soloist.engine import build
from soloist.errors import CapacityError, CheckpointError, SettingError, UserError
from soloist.settings import resolve


@pytest.mark.parametrize(
    ("knobs", "kind", "message"),
    [
        ({"max_len": "10000000"}, SettingError, "is more than the model's"),
        ({"max_len": "4096", "pool_tokens": "2048"}, CapacityError, "needs 4160 tokens of KV, the pool has 2048"),
        ({"pool_tokens": "100000000000"}, CapacityError, "GiB, and host memory has"),
        ({"model": "no/such/model"}, CheckpointError, "no/such/model is not a directory"),
    ],
)
def test_before_loading(knobs, kind, message, monkeypatch):
    def load(*_: object) -> None:
        raise AssertionError("weights were read")

    monkeypatch.setattr(build, "_on_cpu", load)
    with pytest.raises(kind, match=message) as refused:
        build.build_engine(resolve({"device": "cpu", **knobs}, {}, {}))
    assert isinstance(refused.value, UserError) and refused.value.remedy


def test_a_missing_directory_is_not_called_a_missing_tokenizer():
    from soloist.progress import silent
    from soloist.server.main import build_service

    with pytest.raises(CheckpointError, match="is not a directory"):
        build_service(resolve({"model": "no/such/model"}, {}, {}), silent)
