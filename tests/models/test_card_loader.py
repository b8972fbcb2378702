"""What a card's loader hands to the 4-bit product are the checkpoint's codes, row under row, from the file's pages."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

from soloist.bench.synthetic import dflash2_27b, qwen38_27b
from soloist.bench.synthetic_dir import write_synthetic
from soloist.checkpoint.reader import Checkpoint, open_checkpoint
from soloist.errors import CheckpointError
from soloist.models.card_loader import CardLoader
from soloist.ops import card_products
from soloist.ops.linear import QuantizedWeight

HOST = torch.device("cpu")


class Given:
    """In place of the product: keeps what it was made of."""

    refuses = staticmethod(lambda weight, device, dtype: None if weight.bits == 4 else "8 bits")

    def __init__(self, weight: QuantizedWeight, device: torch.device, dtype: torch.dtype, paired: bool = False) -> None:
        self.weight, self.paired = weight, paired


@pytest.fixture
def checkpoint(tmp_path: Path) -> Checkpoint:
    small = replace(
        qwen38_27b(4), hidden_size=256, intermediate_size=256, vocab_size=4096, num_heads=4, num_kv_heads=2,
        head_dim=64, rope_dim=16, linear_key_heads=2, linear_value_heads=4, linear_key_dim=32, linear_value_dim=32,
        max_position=4096, eos_ids=(4090,),
    )  # fmt: skip
    write_synthetic(tmp_path / "m", small, replace(dflash2_27b(small), num_layers=1, num_heads=4, num_kv_heads=2))
    return open_checkpoint(tmp_path / "m")


def test_rows_are_stacked_as_stored(checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(card_products, "W4Linear", Given)
    monkeypatch.setattr(card_products, "card_linear", lambda weight, device, dtype: weight)
    load = CardLoader(checkpoint, HOST, torch.bfloat16)
    copied: list[str] = []
    weight = checkpoint.weight
    monkeypatch.setattr(checkpoint, "weight", lambda m: copied.append(m) or weight(m))
    for modules, made in (
        ([f"layers.3.self_attn.{n}_proj" for n in "qkv"], load.linear),
        ([f"layers.0.mlp.{n}_proj" for n in ("gate", "up")], load.pair),
        (["layers.0.mlp.down_proj"], load.linear),
        (["lm_head"], load.linear),
    ):
        found = made(modules).weight
        parts = [weight(m) for m in modules]
        assert torch.equal(found.codes, torch.cat([p.codes for p in parts]))
        assert torch.equal(found.scales, torch.cat([p.scales for p in parts]))
        assert found.zeros is None and found.shape == (sum(p.shape[0] for p in parts), parts[0].shape[1])
    assert copied == []  # no copy on the host
    assert checkpoint.borrowed("layers.0.linear_attn.in_proj_b") is None
    load.linear([f"layers.0.linear_attn.in_proj_{n}" for n in "ba"], pad=32)
    assert copied == [f"layers.0.linear_attn.in_proj_{n}" for n in "ba"]


def test_an_embedding_goes_to_a_card_from_the_files_pages(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    moved: list[tuple[QuantizedWeight, torch.device]] = []
    monkeypatch.setattr(QuantizedWeight, "to", lambda weight, device: moved.append((weight, device)) or weight)
    stored = checkpoint.modules["embed_tokens"].tensors["weight_packed"].view()
    card = torch.device("cuda")
    on_card = CardLoader(checkpoint, card, torch.bfloat16).table("embed_tokens")
    assert moved[0][1] == card and on_card.codes.data_ptr() == stored.data_ptr()
    # A host keeps what it is given: that must not lie in a file.
    kept = CardLoader(checkpoint, HOST, torch.bfloat16).table("embed_tokens")
    assert kept.codes.equal(stored) and kept.codes.data_ptr() != stored.data_ptr()


def test_damage_is_found_on_borrowed_pages(checkpoint: Checkpoint) -> None:
    name = "layers.0.mlp.down_proj"
    checkpoint.modules[name].tensors["weight_scale"].view()[3, 1] = float("nan")
    with pytest.raises(CheckpointError, match="NaN"):
        checkpoint.borrowed(name)


@pytest.mark.parametrize("field", ["bits", "group", "zeros", "scales", "bias"])
def test_other_forms_are_not_stacked(field: str) -> None:
    codes, scales = torch.zeros(4, 16, dtype=torch.int32), torch.ones(4, 1, dtype=torch.float16)
    plain = QuantizedWeight(codes, scales, None, 4, 128, (4, 128))
    other = {
        "bits": replace(plain, bits=8),
        "group": replace(plain, group=64),
        "zeros": replace(plain, zeros=torch.zeros(4, 1, dtype=torch.uint8)),
        "scales": replace(plain, scales=scales.bfloat16()),
        "bias": replace(plain, bias=torch.zeros(4)),
    }[field]
    assert card_products.one_form([plain, plain])
    assert not card_products.one_form([plain, other]) and not card_products.one_form([other, plain])
