"""KVarN's tile arithmetic against a second statement of spec/kv_formats.md section 5, written with numpy loops."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from soloist.ops import kvarn
from soloist.ops.kvarn import TILE


def _sylvester(size: int) -> np.ndarray:
    """Entry (i, j) is the parity of the bits i and j share."""
    signs = [[(-1) ** (i & j).bit_count() for j in range(size)] for i in range(size)]
    return np.array(signs) / math.sqrt(size)


def _normalise(m: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Section 5.2 step by step on one matrix, in double precision."""
    rows, columns = m.shape
    lc, lr = np.zeros(columns), np.zeros(rows)

    def scaled() -> np.ndarray:
        return m * np.exp(-lc[None, :] - lr[:, None])

    def spread(values: np.ndarray) -> float:
        return values.max() / values.min()

    def imbalance(x: np.ndarray) -> float:
        return spread(x.std(0, ddof=1)) + spread(x.std(1, ddof=1))

    best = (imbalance(scaled()), lc.copy(), lr.copy())
    for _ in range(8):
        for j in range(columns):
            deviation = np.std(m[:, j] * np.exp(-lc[j] - lr), ddof=1)
            lc[j] = min(max(lc[j] + math.log(min(max(deviation, 1e-3), 1e3)), -0.3), 10.0)
        for i in range(rows):
            deviation = np.std(m[i] * np.exp(-lc - lr[i]), ddof=1)
            lr[i] = min(max(lr[i] + math.log(min(max(deviation, 1e-3), 1e3)), -0.3), 10.0)
        now = imbalance(scaled())
        if now <= best[0]:
            best = (now, lc.copy(), lr.copy())
    return best[1], best[2]


def _matrix(seed: int, rows: int, columns: int) -> torch.Tensor:
    g = torch.Generator().manual_seed(seed)
    scale = torch.exp(torch.randn(rows, 1, generator=g)) * torch.exp(0.5 * torch.randn(1, columns, generator=g))
    return torch.randn(rows, columns, generator=g) * scale


@pytest.mark.parametrize("shape", [(64, 128), (128, 64), (128, 256)])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_normalisation_loop(shape: tuple[int, int], seed: int) -> None:
    m = _matrix(seed, *shape)
    lc, lr = kvarn.normalise(m)
    expected_c, expected_r = _normalise(m.double().numpy())
    np.testing.assert_allclose(lc.squeeze(0).numpy(), expected_c, atol=2e-5)
    np.testing.assert_allclose(lr.squeeze(1).numpy(), expected_r, atol=2e-5)


def test_the_least_imbalanced_state_is_kept() -> None:
    """A matrix that is balanced already: eight corrections may only be kept if they make it no worse."""
    m = torch.randn(64, 128, generator=torch.Generator().manual_seed(3))
    lc, lr = kvarn.normalise(m)
    before, after = kvarn._imbalance(m), kvarn._imbalance(m * (-lc - lr).exp())
    assert after <= before


@pytest.mark.parametrize("size", [2, 64, 256])
def test_hadamard(size: int) -> None:
    matrix = kvarn.hadamard(size)
    assert torch.equal(matrix, matrix.T)
    assert torch.allclose(matrix @ matrix, torch.eye(size), atol=1e-6)
    np.testing.assert_allclose(matrix.numpy(), _sylvester(size), atol=1e-7)


@pytest.mark.parametrize("bits", [2, 4])
def test_pack_places_values_as_specified(bits: int) -> None:
    codes = torch.randint(0, 2**bits, (3, 128), dtype=torch.uint8, generator=torch.Generator().manual_seed(bits))
    packed = kvarn.pack(codes, bits)
    per_byte = 8 // bits
    for c in range(128):
        shift = (c % per_byte) * bits
        assert torch.equal((packed[:, c // per_byte] >> shift) & (2**bits - 1), codes[:, c])
    assert torch.equal(kvarn.unpack(packed, bits), codes)


def test_record_layout_of_the_27b() -> None:
    where = kvarn.fields(256)
    assert {name: at for name, (at, _) in where.items()} == {
        "k.codes": 0,
        "k.a": 16_384,
        "k.zp": 16_896,
        "k.c": 17_408,
        "v.codes": 17_664,
        "v.c": 25_856,
        "v.a": 26_368,
        "v.zp": 26_624,
    }
    assert kvarn.record_bytes(256) == 26_880 == 210 * TILE


def _restate(record: np.ndarray, dim: int) -> tuple[np.ndarray, np.ndarray]:
    """Read one head's record byte by byte as section 5.4 and 5.5 say."""
    at = {name: record[a : a + n] for name, (a, n) in kvarn.fields(dim).items()}
    half = {name: at[name].view(np.float16).astype(np.float64) for name in at if not name.endswith("codes")}
    kc, vc = at["k.codes"].reshape(dim, 64), at["v.codes"].reshape(TILE, dim // 4)
    key, value = np.zeros((dim, TILE)), np.zeros((TILE, dim))
    for r in range(dim):
        for c in range(TILE):
            code = (kc[r, c // 2] >> (4 * (c % 2))) & 15
            key[r, c] = (code * half["k.a"][r] + half["k.zp"][r]) * half["k.c"][c]
    for r in range(TILE):
        for c in range(dim):
            code = (vc[r, c // 4] >> (2 * (c % 4))) & 3
            value[r, c] = (code * half["v.a"][r] + half["v.zp"][r]) * half["v.c"][c]
    turn = _sylvester(dim)
    return key.T @ turn, value @ turn


def _tile(seed: int, heads: int = 2, dim: int = 64) -> tuple[torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    return torch.randn(TILE, heads, dim, generator=g), torch.randn(TILE, heads, dim, generator=g)


def test_a_record_reads_back_as_specified() -> None:
    k, v = _tile(0)
    records = kvarn.encode_tile(k, v)
    key, value = kvarn.decode_tiles(records.unsqueeze(0), 64)
    for head in range(2):
        expected_k, expected_v = _restate(records[head].numpy(), 64)
        np.testing.assert_allclose(key[:, head].numpy(), expected_k, atol=1e-5)
        np.testing.assert_allclose(value[:, head].numpy(), expected_v, atol=1e-5)


def test_error_on_gaussian_data_is_the_documented_one() -> None:
    """spec section 1: 9.9 % for 4-bit keys, 54 % for 2-bit values (D = 256)."""
    k, v = _tile(1, heads=4, dim=256)
    key, value = kvarn.decode_tiles(kvarn.encode_tile(k, v).unsqueeze(0), 256)
    assert ((key - k).norm() / k.norm()).item() == pytest.approx(0.099, abs=0.015)
    assert ((value - v).norm() / v.norm()).item() == pytest.approx(0.54, abs=0.05)


def test_scores_need_no_rotation_back() -> None:
    """q . K_t = C_t (sum q'_c a_c code + sum q'_c zp_c) with q' = q H."""
    k, v = _tile(2)
    records = kvarn.encode_tile(k, v)[:1]
    key, _ = kvarn.decode_tiles(records.unsqueeze(0), 64)
    q = torch.randn(64, generator=torch.Generator().manual_seed(9))
    at = {name: records[0, a : a + n].contiguous() for name, (a, n) in kvarn.fields(64).items()}
    codes = kvarn.unpack(at["k.codes"].view(64, 64), 4).float()
    a, zp, c = (at[f"k.{name}"].view(torch.float16).float() for name in ("a", "zp", "c"))
    turned = q @ kvarn.hadamard(64)
    scores = c * ((turned * a) @ codes + turned @ zp)
    assert torch.allclose(scores, key[:, 0] @ q, atol=2e-5)


@pytest.mark.parametrize("value", [0.0, 3.0])
def test_constant_tiles_survive(value: float) -> None:
    k = torch.full((TILE, 1, 64), value)
    key, out = kvarn.decode_tiles(kvarn.encode_tile(k, k).unsqueeze(0), 64)
    assert torch.isfinite(key).all() and torch.isfinite(out).all()
    assert torch.allclose(key, k, atol=2e-2) and torch.allclose(out, k, atol=2e-2)
