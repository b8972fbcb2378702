"""The model against transformers' Qwen3_5ForCausalLM in fp32: prompt in one piece, in slices, token by token."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from models.rig import Rig
from oracle.target import load_target, states
from soloist import demo
from tiny import build_tiny

TOLERANCE = 1e-4

CONFIGS = {
    "grouped value heads": {"key_heads": 2, "value_heads": 6, "key_dim": 32, "value_dim": 16},
    "one key head, tied": {"key_heads": 1, "value_heads": 3, "tied": True},
    "nested, tied at the top, shards": {"nested": True, "tied": True, "shards": 3},
    "nested, untied": {"nested": True, "heads": 6, "kv_heads": 2},
    "head dim 128, half rotary, biases": {"head_dim": 128, "rotary": 0.5, "attention_bias": True},
    "head dim 256": {"head_dim": 256, "heads": 2, "kv_heads": 1, "pattern": "FLFL"},
    "attention first, odd pattern": {"pattern": "FLLFLF", "heads": 3, "kv_heads": 3},
    "interval instead of a list": {"layer_list": False, "gate": "swish", "pattern": "LLFLLF"},
    "full rotary, wide kernel": {"rotary": 1.0, "conv": 5, "value_dim": 48, "key_dim": 16},
    "linear layers only but one": {"pattern": "LLLLLF", "value_heads": 8, "key_heads": 4},
}


@pytest.fixture(scope="module", params=CONFIGS, ids=lambda name: name.replace(" ", "-"))
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory):
    directory = tmp_path_factory.mktemp("tiny")
    build_tiny(directory, seed=len(request.param), **CONFIGS[request.param])
    return Rig(directory), load_target(directory)


def _tokens(vocab: int, count: int) -> list[int]:
    return torch.randint(0, vocab, (count,), generator=torch.Generator().manual_seed(5)).tolist()


def _worst(found: torch.Tensor, wanted: torch.Tensor) -> float:
    assert torch.isfinite(found).all()
    return float((found - wanted).abs().max() / wanted.abs().max())


def test_prompt_at_once_in_slices_and_token_by_token(pair) -> None:
    rig, oracle = pair
    ids = _tokens(rig.config.vocab_size, 203)
    wanted = states(oracle, ids).logits
    assert _worst(rig.prefill(ids), wanted) < TOLERANCE
    for cut in (64, 128, 192):
        rig.fresh()
        parts = [rig.prefill(ids[:cut]), rig.prefill(ids[cut:], start=cut)]
        assert _worst(torch.cat(parts), wanted) < TOLERANCE
    rig.fresh()
    start = 37
    parts = [rig.prefill(ids[:start])] + [rig.decode(ids[p], p) for p in range(start, len(ids))]
    assert _worst(torch.cat(parts), wanted) < TOLERANCE


def test_bundled_demo() -> None:
    rig, oracle = Rig(demo.path()), load_target(demo.path())
    ids = _tokens(rig.config.vocab_size, 140)
    wanted = states(oracle, ids).logits
    assert _worst(rig.prefill(ids), wanted) < TOLERANCE
    rig.fresh()
    parts = [rig.prefill(ids[:70])] + [rig.decode(ids[p], p) for p in range(70, 140)]
    assert _worst(torch.cat(parts), wanted) < TOLERANCE


def test_a_wrong_convention_is_noticed(tmp_path: Path) -> None:
    """The instrument itself: one norm taken as plain instead of zero-centred moves the logits far past the bound."""
    build_tiny(tmp_path)
    rig, oracle = Rig(tmp_path), load_target(tmp_path)
    ids = _tokens(rig.config.vocab_size, 50)
    rig.model.norm -= 1.0
    assert _worst(rig.prefill(ids), states(oracle, ids).logits) > 100 * TOLERANCE
