"""The plan's bytes are the engine's bytes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from soloist.checkpoint.reader import open_checkpoint
from soloist.engine.build import build_engine
from soloist.engine.capacity import choices, drafter_of
from soloist.planner import Choices, kv_token_bytes, slot_items
from soloist.settings import resolve


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


@pytest.mark.parametrize("size", [{}, {"max_seqs": 1}, {"verify_rows": 5, "max_seqs": 2}])
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
    buffers = sum(t.nbytes for t in vars(model._allocate()).values())
    assert sum(item.nbytes for item in step_items(config, chosen, taps=2)) == pytest.approx(buffers, rel=0.01)
    partials = Partials.allocate(shapes.splits, config.num_heads, config.head_dim, model.device)
    splits = sum(t.nbytes for t in vars(partials).values())
    fixed, per_token = split_bytes(config, chosen)
    assert fixed + per_token * pages * 64 == pytest.approx(splits, rel=0.01)
