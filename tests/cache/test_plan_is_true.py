"""The plan's bytes are the engine's bytes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from soloist import demo
from soloist.cache.tiles import make_store
from soloist.checkpoint.reader import open_checkpoint
from soloist.engine.build import build_engine
from soloist.engine.capacity import choices, drafter_of
from soloist.planner import Choices, kv_token_bytes, slot_items, weight_items
from soloist.scaleout.dense import dense_copy
from soloist.settings import resolve
from tiny import build_tiny, build_tiny_drafter


def held(*roots: object) -> int:
    """Bytes of every tensor that can be reached from objects of this project; a storage counts once."""
    seen: set[int] = set()
    storages: dict[int, int] = {}
    left = list(roots)
    while left:
        thing = left.pop()
        if id(thing) in seen:
            continue
        seen.add(id(thing))
        if isinstance(thing, torch.Tensor):
            prepacked = thing.is_mkldnn  # has no storage to ask
            where = id(thing) if prepacked else thing.untyped_storage().data_ptr()
            storages[where] = thing.nbytes if prepacked else thing.untyped_storage().nbytes()
        elif isinstance(thing, dict):
            left += thing.values()
        elif isinstance(thing, list | tuple | set):
            left += thing
        elif type(thing).__module__.startswith("soloist"):
            left += getattr(thing, "__dict__", {}).values()
            left += [getattr(thing, name, None) for name in getattr(type(thing), "__slots__", ())]
    return sum(storages.values())


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Two checkpoints in the dtype they are served in: a synthetic one with a drafter, and the demo."""
    synthetic = tmp_path_factory.mktemp("synthetic")
    # Wide enough that what a CPU pads and keeps in fp32 (norms, convolutions, narrow projections) is no percent.
    build_tiny(synthetic, dtype=torch.bfloat16, hidden=512, ffn=1024)
    build_tiny_drafter(synthetic / "dflash2", synthetic, dtype=torch.bfloat16)
    return {"synthetic": synthetic, "demo": dense_copy(demo.path(), tmp_path_factory.mktemp("demo"))}


@pytest.mark.parametrize(
    ("which", "knobs"),
    [
        ("synthetic", {"spec": "mtp"}),
        ("synthetic", {"spec": "dflash2", "kv_format": "int8"}),
        ("synthetic", {"spec": "none", "kv_format": "kvarn"}),
        ("demo", {"spec": "mtp"}),
        ("demo", {"spec": "none", "max_seqs": "3", "state_dtype": "float32"}),
    ],
)
def test_everything_an_engine_holds_is_planned_within_one_percent(
    served: dict[str, Path], which: str, knobs: dict[str, str]
) -> None:
    """Weights, drafter, slots and pool, by walking through what the engine can reach. A CPU keeps no step buffers."""
    sizes = {"model": str(served[which]), "threads": "1", "max_len": "1024", "dtype": "bfloat16", "linear": "plain"}
    settings = resolve(sizes | knobs, {}, {})
    checkpoint = open_checkpoint(served[which])
    chosen = choices(settings, checkpoint, "bfloat16")
    drafter, drafter_bytes = drafter_of(settings, checkpoint, chosen)
    engine = build_engine(settings)
    try:
        actual = held(engine.model, engine.memory, engine.speculation)
        pool = engine.memory.pages.total * 64 * kv_token_bytes(checkpoint.config, chosen)
    finally:
        engine.close()
    items = weight_items(checkpoint.config, checkpoint.nbytes(), drafter_bytes, chosen)
    items += slot_items(checkpoint.config, drafter, chosen)
    assert actual == pytest.approx(pool + sum(item.nbytes for item in items), rel=0.01)


@pytest.mark.parametrize("knobs", [{"spec": "mtp"}, {"spec": "dflash2", "kv_format": "int8"}, {"kv_format": "kvarn"}])
def test_the_plan_is_what_an_engine_allocates(tiny_model: Path, knobs: dict[str, str]) -> None:
    """Pool, slots and drafter context, byte for byte, on a synthetic checkpoint."""
    sizes = {"model": str(tiny_model), "threads": "1", "max_len": "512", "dtype": "bfloat16"}
    settings = resolve(sizes | knobs, {}, {})
    checkpoint = open_checkpoint(tiny_model)
    chosen = choices(settings, checkpoint, "bfloat16")
    drafter, _ = drafter_of(settings, checkpoint, chosen)
    items = {item.name: item.nbytes for item in slot_items(checkpoint.config, drafter, chosen)}
    engine = build_engine(settings)
    try:
        memory, storage = engine.memory, engine.reuse.storage
        assert storage.page_nbytes() == 64 * kv_token_bytes(checkpoint.config, chosen)
        assert sum(t.nbytes for t in memory.state.states) == items["recurrent state"]
        assert sum(t.nbytes for t in memory.state.conv) == items["convolution state"]
        if "drafter context" in items:
            assert engine.speculation.drafter.nbytes == items["drafter context"]
        window = memory.kv.nbytes - memory.pages.total * 64 * storage.stores["target"].bytes_per_token()
        # The rows of the running step (16 of the 400 tokens) are the step's own buffers.
        assert window == items.get("16-bit tiles", 0) * 384 // 400
    finally:
        engine.close()


@pytest.mark.parametrize(
    "size",
    [{}, {"max_seqs": 1, "kv_format": "int8"}, {"verify_rows": 5, "max_seqs": 2}, {"kv_format": "kvarn"}],
)
def test_step_buffers_are_those_of_the_card(tiny_model: Path, size: dict[str, int]) -> None:
    """Within 1 %: everything `CardModel` allocates for a verify step, splits of attention included."""
    pytest.importorskip("triton")
    from soloist.engine.build import card_shapes
    from soloist.models.card import CardModel
    from soloist.ops.triton.attention import SPLIT, Partials
    from soloist.planner import SPLIT as PLANNED
    from soloist.planner import split_bytes, step_items

    assert SPLIT == PLANNED
    config = open_checkpoint(tiny_model).config
    chosen = Choices(prefill_rows=0, **size)
    pages = 512
    shapes = card_shapes(chosen.max_seqs, chosen.verify_rows, 64, pages)
    model = CardModel.__new__(CardModel)
    model.config, model.dtype, model.device, model.layers = config, torch.bfloat16, torch.device("cpu"), []
    model.shapes, model._tap_layers = shapes, (1, 3)
    kv = make_store(
        *(chosen.kv_format,) * 2, layers=len(config.attention_layers), kv_heads=config.num_kv_heads,
        head_dim=config.head_dim, pages=2, slots=1, dtype=torch.bfloat16,
    )  # fmt: skip
    buffers = sum(t.nbytes for t in (*vars(model._allocate()).values(), *kv.row_planes(shapes.rows).values()))
    assert sum(item.nbytes for item in step_items(config, chosen, taps=2)) == pytest.approx(buffers, rel=0.01)
    partials = Partials.allocate(shapes.splits, config.num_heads, config.head_dim, model.device)
    splits = sum(t.nbytes for t in vars(partials).values())
    fixed, per_token = split_bytes(config, chosen)
    assert fixed + per_token * pages * 64 == pytest.approx(splits, rel=0.01)
