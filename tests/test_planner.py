"""The plan against arithmetic published for the 27B, against the issue's figures, and against real allocations."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from typer.testing import CliRunner

from soloist.bench.synthetic import dflash2_27b, qwen38_27b
from soloist.cli import app
from soloist.commands.plan import parse_size
from soloist.errors import SettingError
from soloist.planner import GIB, Choices, kv_token_bytes, plan, savings, slot_items

HIDDEN, FFN, VOCAB = 5120, 17408, 248_320
# spec/model.md section 6: parameters of a 4-bit export's quantised body, and what stays in 16 bits.
QUANTISED, KEPT = 24_326_963_200, 26_238_464

BIG = qwen38_27b()
DRAFTER = dflash2_27b(BIG)


def _grouped(parameters: int, bits: int) -> int:
    """Group-128 weights with 16-bit scales."""
    return int(parameters * (bits / 8 + 2 / 128))


PARTS = {
    "mlp": _grouped(QUANTISED, 4),
    "norms": 2 * KEPT,
    "embed": _grouped(VOCAB * HIDDEN, 4),
    "lm_head": _grouped(VOCAB * HIDDEN, 4),
    "mtp": 2 * 424_699_392,
}
# spec/dflash2.md section 7, and its key and value projections a second time: one product for the context's rows.
DRAFTER_BYTES = 1_281_000_000 + _grouped(5 * 2 * 8 * 128 * HIDDEN, 4)
LOADED = {"card": 24 * GIB, "used": int(0.3 * GIB), "drafter": DRAFTER, "drafter_bytes": DRAFTER_BYTES}
BASE = Choices(spec="dflash2")


@pytest.mark.parametrize(
    ("key", "spec", "size"),
    [
        ("bf16", "none", 65_536),
        ("bf16", "mtp", 65_536 + 4_096),
        ("fp8", "none", 32_768),
        ("int8", "none", 33_280),
        ("kvarn", "none", 13_440),
    ],
)
def test_bytes_per_token_of_the_27b(key: str, spec: str, size: int) -> None:
    assert kv_token_bytes(BIG, Choices(spec=spec, kv_format=key)) == size


@pytest.mark.parametrize(("dtype", "state"), [("float32", 144), ("float16", 72)])
def test_bytes_per_slot_of_the_27b(dtype: str, state: int) -> None:
    items = {item.name: item.nbytes for item in slot_items(BIG, DRAFTER, replace(BASE, max_seqs=1, state_dtype=dtype))}
    assert items["recurrent state"] == state << 20
    assert items["convolution state"] == 48 * 10_240 * 3 * 2
    assert items["drafter context"] == 2048 * 20_480
    tiles = slot_items(BIG, None, Choices(max_seqs=1, kv_format="kvarn"))[-1]
    assert tiles.nbytes == 25 << 20


def test_the_body_is_what_the_byte_table_says() -> None:
    assert PARTS["mlp"] == pytest.approx(12.54e9, rel=1e-3)
    assert PARTS["lm_head"] == pytest.approx(0.656e9, rel=1e-3)


def _table(choices: Choices) -> dict[str, int]:
    made = plan(BIG, PARTS, choices, **LOADED)
    accounted = made.used + sum(item.nbytes for item in made.items) + made.pool_bytes
    assert accounted == made.card
    assert made.pool_tokens * made.token_bytes <= made.pool_bytes
    return {"pool": made.pool_tokens, "at 11k": made.residents(11_264), "at 16k": made.residents(16_384)}


@pytest.mark.parametrize(
    ("key", "tokens", "context", "residents"),
    [("bf16", 95_000, 11_264, 8), ("fp8", 190_000, 16_384, 8), ("int8", 190_000, 16_384, 8)],
)
def test_figures_for_24_gib(key: str, tokens: int, context: int, residents: int) -> None:
    """The 27B in 4 bits with its drafter, 0.3 GiB used by others."""
    made = plan(BIG, PARTS, replace(BASE, kv_format=key), **LOADED)
    assert made.used + sum(item.nbytes for item in made.items) + made.pool_bytes == made.card
    assert made.pool_tokens * made.token_bytes <= made.pool_bytes
    assert made.pool_tokens >= tokens and made.residents(context) == residents


def test_eight_with_a_drafter_fit_where_eight_without_fit() -> None:
    for key in ("fp8", "int8", "kvarn"):
        for spec in ("none", "dflash2"):
            assert plan(BIG, PARTS, replace(BASE, spec=spec, kv_format=key), **LOADED).residents(16_384) == 8


def test_savings_are_plans_with_one_knob_turned() -> None:
    choices = replace(BASE, state_dtype="float32")
    found = {gain.knob: gain for gain in savings(BIG, PARTS, choices, **LOADED)}
    assert {"STATE_DTYPE=float16", "KV_FORMAT=fp8", "KV_FORMAT=kvarn", "MAX_SEQS=4"} <= found.keys()
    now = plan(BIG, PARTS, choices, **LOADED).pool_tokens
    half = plan(BIG, PARTS, replace(choices, state_dtype="float16"), **LOADED).pool_tokens
    assert found["STATE_DTYPE=float16"].gained == half - now > 0
    assert list(found.values()) == sorted(found.values(), key=lambda gain: -gain.gained)


def test_pictures_cost_the_tower_and_their_workspace() -> None:
    """The tower's 0.858 GiB, and per picture at least its rows for every request."""
    tower = {"hidden_size": 1152, "intermediate_size": 4304, "patch_size": 16, "spatial_merge_size": 2}
    seeing = replace(BIG, vision=tower)
    blind, sight = BASE, replace(BASE, tower=int(0.858 * GIB), pixels=1 << 20)
    items = {item.name: item.nbytes for item in plan(seeing, PARTS, sight, **LOADED).items}
    assert items["vision tower"] == sight.tower and items["pictures"] > 8 * 1024 * HIDDEN * 2
    pools = [plan(seeing, PARTS, c, **LOADED).pool_tokens for c in (blind, replace(sight, offload=True), sight)]
    assert pools == sorted(pools, reverse=True) and len(set(pools)) == 3
    assert "VISION_OFFLOAD=1" in {gain.knob for gain in savings(seeing, PARTS, sight, **LOADED)}


def test_what_does_not_fit_says_by_how_much() -> None:
    made = plan(BIG, PARTS, BASE, card=16 * GIB, drafter=DRAFTER, drafter_bytes=DRAFTER_BYTES)
    assert not made.fits and made.pool_tokens == 0 and made.pool_bytes < 0 and made.residents(128) == 0


@pytest.mark.parametrize(
    ("text", "size"), [("24GB", 24 * GIB), ("24", 24 * GIB), ("1.5 GiB", 3 * GIB // 2), ("300MB", 300 << 20)]
)
def test_sizes(text: str, size: int) -> None:
    assert parse_size(text, "--card") == size


def test_not_a_size() -> None:
    with pytest.raises(SettingError, match="--used"):
        parse_size("lots", "--used")


def test_the_command() -> None:
    done = CliRunner().invoke(app, ["plan", "demo", "--card", "2GB", "--used", "100MB", "--json"])
    assert done.exit_code == 0, done.output
    table = json.loads(done.output)
    assert table["pool_tokens"] > 0 and {item["name"] for item in table["items"]} >= {"layers", "reserve", "graphs"}


def test_a_card_takes_every_format() -> None:
    import torch

    from soloist.engine.capacity import kv_formats
    from soloist.settings import resolve

    card = torch.device("cuda")
    assert kv_formats(resolve({}, {}, {}), "bfloat16", card) == ("bf16", "bf16")
    assert kv_formats(resolve({"kv_format": "int8", "kv_format_v": "fp8"}, {}, {}), "bfloat16", card) == ("int8", "fp8")
    for knobs in ({"kv_format": "kvarn"}, {"ctx": "huge"}):
        assert kv_formats(resolve(knobs, {}, {}), "bfloat16", card) == ("kvarn", "kvarn")
    with pytest.raises(SettingError, match="packs keys and values together"):
        kv_formats(resolve({"kv_format": "kvarn", "kv_format_v": "int8"}, {}, {}), "bfloat16", card)
