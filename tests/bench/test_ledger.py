"""A snapshot of the allocator as torch documents it, by name: nothing is counted twice and nothing is left out."""

from __future__ import annotations

from typing import Any

from soloist.bench import ledger


def frames(*names: str) -> list[dict[str, Any]]:
    found = [{"filename": "/x/torch/_tensor.py", "name": "to", "line": 1}]
    return found + [
        {"filename": f"/x/src/soloist/{n.split(':')[0]}", "name": n.split(":")[1], "line": 9} for n in names
    ]


def block(size: int, state: str = "active_allocated", asked: int | None = None, stack: Any = ()) -> dict[str, Any]:
    return {"size": size, "requested_size": size if asked is None else asked, "state": state, "frames": list(stack)}


FREE = "inactive"
PACK = frames("ops/linear_cuda.py:pack", "ops/card_products.py:__init__", "models/layers.py:__init__")
SNAPSHOT: dict[str, Any] = {
    "segments": [
        {"total_size": 100, "segment_pool_id": (0, 0), "blocks": [block(60, asked=50, stack=PACK), block(30, FREE)]},
        {"total_size": 8, "segment_pool_id": (0, 1), "blocks": [block(5, stack=PACK), block(3, FREE)]},
        {"total_size": 7, "blocks": [block(7, stack=frames())]},
    ],
    "device_traces": [
        [
            {"action": "segment_alloc", "time_us": 10, "size": 100, "frames": PACK},
            {"action": "alloc", "time_us": 11, "size": 60, "frames": PACK},
            {"action": "segment_map", "time_us": 12, "size": 20, "frames": PACK},
            {"action": "segment_alloc", "time_us": 13, "size": 8, "frames": frames("engine/graphs.py:capture")},
            {"action": "segment_alloc", "time_us": 14, "size": 9, "frames": frames("engine/graphs.py:capture")},
        ]
    ],
}  # fmt: skip


def test_every_byte_has_one_name() -> None:
    names = ledger.named(SNAPSHOT)
    pack = "ops/linear_cuda.py:pack < ops/card_products.py:__init__"
    assert names == {
        pack: 50,
        "unused": 30,
        "unused, at segments' ends": 10,
        "rounding": 10,
        "not from here": 7,
        f"graphs: {pack}": 5,
        "unused, graphs": 3,
    }
    assert sum(names.values()) == sum(s["total_size"] for s in SNAPSHOT["segments"])
    assert list(names.values()) == sorted(names.values(), reverse=True)


def test_what_was_fetched_later_is_named_by_three_places() -> None:
    assert ledger.latest(SNAPSHOT) == 14 and ledger.latest({"device_traces": [[]]}) == 0
    assert ledger.fetched(SNAPSHOT, 10) == [
        "20 B: ops/linear_cuda.py:pack < ops/card_products.py:__init__ < models/layers.py:__init__",
        "17 B: engine/graphs.py:capture",
    ]
    assert ledger.fetched(SNAPSHOT, 14) == []
