"""Stored responses are bounded by number and by what they hold."""

from __future__ import annotations

from soloist.server.response_store import ResponseStore, Stored


def _stored(name: str, length: int) -> Stored:
    picture = {"type": "input_image", "image_url": "x" * length}
    return Stored({"id": name}, [{"role": "user", "content": [picture]}])


def test_bounded_by_number_and_by_characters() -> None:
    store = ResponseStore(limit=3, characters=1000)
    for i in range(5):
        store.put(_stored(f"r{i}", 10))
    assert list(store.finished) == ["r2", "r3", "r4"]
    store.put(_stored("large", 980))
    assert list(store.finished) == ["large"] and store.get("r4") is None
    store.put(_stored("larger", 2000))
    assert not store.finished and store.held == 0
    store.put(_stored("again", 10))
    assert store.get("again") is not None and 0 < store.held < 100
