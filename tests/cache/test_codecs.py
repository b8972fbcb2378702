"""Per-token formats against their formulas, and stores under full reuse of a small pool."""

from __future__ import annotations

import math
import random

import pytest
import torch

from soloist.cache.codecs import bytes_per_token, roundtrip, token_codec
from soloist.cache.kv import KVStore
from soloist.cache.pages import PAGE
from soloist.cache.tiers import PagedStores
from soloist.errors import SettingError

FORMATS = ["bf16", "fp16", "fp32", "fp8", "int8"]


def _values(seed: int, *shape: int) -> torch.Tensor:
    g = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=g) * torch.exp(2 * torch.randn(*shape[:-1], 1, generator=g))


def test_fp8_is_a_clamped_cast() -> None:
    x = torch.cat([_values(0, 4000, 2, 64).flatten(), torch.tensor([0.0, -0.0, 448.0, 465.0, 1e9, -1e9, 2.0**-10])])
    codec = token_codec("fp8")
    codes = codec.encode(x.view(-1, 1, 1))["data"]
    expected = x.clamp(-448, 448).to(torch.float8_e4m3fn)
    assert torch.equal(codes.view(torch.uint8).flatten(), expected.view(torch.uint8))
    assert torch.isfinite(codes.float()).all()


def test_fp8_scales_are_per_layer() -> None:
    codec = token_codec("fp8", (2.0, 0.5))
    x = _values(1, 100, 2, 64)
    for layer, scale in enumerate((2.0, 0.5, 1.0)):
        expected = (x / scale).clamp(-448, 448).to(torch.float8_e4m3fn).float() * scale
        assert torch.equal(roundtrip(codec, x, layer), expected)


def test_int8_by_the_formula() -> None:
    """s = max(max|x| / 127, 1e-6), q = clamp(round half away from zero), in single precision, value by value."""
    x = torch.cat([_values(2, 20, 2, 64), torch.zeros(1, 2, 64)])
    x[0, 0, :6] = torch.tensor([127.0, 0.5, 1.5, 2.5, -0.5, -2.5])  # with s = 1: halves go away from zero
    x[0, 0, 6:] = 0.0
    planes = token_codec("int8").encode(x)
    assert planes["data"][0, 0, :6].tolist() == [127, 1, 2, 3, -1, -3]
    for token in range(x.shape[0]):
        for head in range(2):
            row = x[token, head]
            scale = max(torch.tensor(row.abs().max().item()).div(127).item(), torch.tensor(1e-6).item())
            assert planes["scale"][token, head].item() == scale
            for value, code in zip(row, planes["data"][token, head].tolist(), strict=True):
                ratio = (value / torch.tensor(scale)).item()
                away = math.floor(abs(ratio) + 0.5) * (1 if ratio >= 0 else -1)
                assert code == max(-128, min(127, away))
    back = token_codec("int8").decode(planes, torch.float32)
    assert torch.equal(back, planes["data"].float() * planes["scale"].unsqueeze(-1))


@pytest.mark.parametrize(("name", "error"), [("bf16", 0.0017), ("int8", 0.008), ("fp8", 0.027)])
def test_errors_are_the_documented_ones(name: str, error: float) -> None:
    x = torch.randn(512, 4, 256, generator=torch.Generator().manual_seed(4))
    got = roundtrip(token_codec(name), x)
    assert ((got - x).norm() / x.norm()).item() == pytest.approx(error, rel=0.25)


@pytest.mark.parametrize(("name", "size"), [("bf16", 4096), ("fp8", 2048), ("int8", 2080)])
def test_bytes_of_the_27b(name: str, size: int) -> None:
    assert 2 * bytes_per_token(token_codec(name), 4, 256) == size


def test_unknown_format() -> None:
    with pytest.raises(SettingError, match="int4"):
        token_codec("int4")


@pytest.mark.parametrize("value", FORMATS)
@pytest.mark.parametrize("key", FORMATS)
def test_every_page_and_lane_under_full_reuse(key: str, value: str) -> None:
    """Store by random single rows into a pool that is refilled many times; every read equals the reference codec."""
    codec_k, codec_v = token_codec(key, (1.0, 0.25)), token_codec(value, (2.0, 1.0))
    store = KVStore(layers=2, kv_heads=2, head_dim=64, pages=4, codec_k=codec_k, codec_v=codec_v, dtype=torch.float32)
    rng = random.Random(0)
    for round_ in range(4):
        k, v = _values(10 + round_, 4 * PAGE, 2, 64), _values(20 + round_, 4 * PAGE, 2, 64)
        order = list(range(4 * PAGE))
        rng.shuffle(order)
        while order:
            index = torch.tensor([order.pop() for _ in range(min(len(order), rng.randrange(1, 9)))])
            for layer in range(2):
                store.write(layer, index, k[index], v[index])
        for layer in range(2):
            keys, values = store.read(layer, range(4))
            assert torch.equal(keys, roundtrip(codec_k, k, layer)) and torch.equal(values, roundtrip(codec_v, v, layer))
            rk, rv = store.roundtrip(layer, k, v)
            assert torch.equal(keys, rk) and torch.equal(values, rv)


@pytest.mark.parametrize("name", FORMATS)
def test_pages_move_without_a_bit_changing(name: str) -> None:
    codec = token_codec(name)

    def store(layers: int) -> KVStore:
        return KVStore(
            layers=layers, kv_heads=2, head_dim=64, pages=6, codec_k=codec, codec_v=codec, dtype=torch.float32
        )

    both = PagedStores({"target": store(3), "mtp": store(1)})
    rows = torch.arange(6 * PAGE)
    for part in both.stores.values():
        for layer in range(part.layers):
            part.write(layer, rows, _values(layer, 6 * PAGE, 2, 64), _values(9 + layer, 6 * PAGE, 2, 64))
    assert both.page_nbytes() == PAGE * both.bytes_per_token() == sum(t.nbytes for t in both.export([0]).values())
    before = both.export([4, 1])
    both.load([0, 5], before)
    after = both.export([0, 5])
    assert all(torch.equal(before[n].view(torch.uint8), after[n].view(torch.uint8)) for n in before)
    both.copy_page(4, 2)
    assert all(torch.equal(t[:, :PAGE].view(torch.uint8), after[n][:, :PAGE].view(torch.uint8))
               for n, t in both.export([2]).items())  # fmt: skip
    with pytest.raises(ValueError, match="not"):
        both.load([0], before)
    del before["mtp.k.data"]
    with pytest.raises(ValueError, match="belong"):
        both.load([0, 5], before)
