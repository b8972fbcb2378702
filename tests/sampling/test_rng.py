"""The counter generator: its integer definition, independence of context, and both ends of the noise."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from soloist.sampling.rng import GUMBEL_MAX, GUMBEL_MIN, Noise, Stream, derive_seed, perturbed_argmax

M = 0xFFFFFFFF


def reference_hash(seed: int, stream: int, position: int, token: int) -> int:
    """The docstring's definition, written again with Python integers."""

    def rotl(x: int, r: int) -> int:
        return (x << r | x >> (32 - r)) & M

    def mix(h: int) -> int:
        h = (h ^ h >> 16) * 0x85EBCA6B & M
        h = (h ^ h >> 13) * 0xC2B2AE35 & M
        return h ^ h >> 16

    keys = []
    for h in (0x9E3779B9, 0x7F4A7C15):
        for w in (seed & M, seed >> 32 & M, stream, position):
            k = rotl(w * 0xCC9E2D51 & M, 15) * 0x1B873593 & M
            h = (rotl(h ^ k, 13) * 5 + 0xE6546B64) & M
        keys.append(mix(h))
    return mix(mix(token ^ keys[0]) ^ keys[1])


def test_bits_follow_the_integer_definition_on_every_backend() -> None:
    rng = np.random.default_rng(0)
    ids = np.concatenate([np.arange(40), rng.integers(0, 2**31, 200)])
    for seed in (0, 1, -1, 2**63 - 1, -(2**63), 0x123456789ABCDEF):
        for stream in Stream:
            position = int(rng.integers(0, 300_000))
            noise = Noise.at(seed, stream, position)
            want = [reference_hash(seed, stream, position, t) for t in ids.tolist()]
            assert noise.bits(ids).tolist() == want
            assert noise.bits(torch.from_numpy(ids)).tolist() == want
            assert [noise.bits(t) for t in ids.tolist()] == want


def test_known_values_do_not_drift() -> None:
    """Stored seeds must keep their texts: the constants of the definition are frozen."""
    assert [reference_hash(7, 0, 100, t) for t in (0, 1, 248319)] == [54418043, 234937813, 1996924944]


def test_numpy_and_torch_noise_have_equal_bits() -> None:
    ids = np.arange(50_000)
    noise = Noise.at(99, Stream.TARGET, 4321)
    a, b = noise.gumbel(ids), noise.gumbel_tensor(torch.from_numpy(ids)).numpy()
    assert a.dtype == np.float32
    assert np.array_equal(a.view(np.int32), b.view(np.int32))


def test_noise_of_a_token_does_not_depend_on_what_is_evaluated_with_it() -> None:
    """Every length 1..200 and every offset: a vector body and its tail must agree."""
    ids = np.arange(4096)
    noise = Noise.at(5, Stream.TARGET, 77)
    whole = noise.gumbel(ids).view(np.int32)
    for n in range(1, 201):
        start = (n * 37) % (4096 - n)
        part = np.ascontiguousarray(ids[start : start + n])
        assert np.array_equal(noise.gumbel(part).view(np.int32), whole[start : start + n])
        assert np.array_equal(
            noise.gumbel_tensor(torch.from_numpy(part)).numpy().view(np.int32), whole[start : start + n]
        )
    for shape in ((2, 3), (5, 40), (1, 1, 7)):
        block = ids[: np.prod(shape)].reshape(shape)
        assert np.array_equal(noise.gumbel(block).view(np.int32), whole[: block.size].reshape(shape))
    shuffled = np.random.default_rng(0).permutation(ids)
    assert np.array_equal(noise.gumbel(shuffled).view(np.int32), whole[shuffled])


class _Fixed(Noise):
    """Noise whose 32-bit hash is the token itself, to reach both ends."""

    def bits(self, token):  # type: ignore[no-untyped-def]
        return token


def test_gumbel_is_right_at_both_ends() -> None:
    h = np.array([0, 1, 2, 1000, 2**31 - 1, 2**31, 2**32 - 1000, 2**32 - 2, 2**32 - 1])
    got = _Fixed(0, 0).gumbel(h)
    for bits, g in zip(h.tolist(), got.tolist(), strict=True):
        u = (bits + 0.5) * 2.0**-32
        log_u = math.log(u) if u < 0.5 else math.log1p(-((2**32 - bits) - 0.5) * 2.0**-32)
        want = -math.log(-log_u)
        assert g == pytest.approx(want, rel=1e-7, abs=2e-8)
    assert np.all(np.diff(got) >= 0)
    assert got[0] > GUMBEL_MIN and got[-1] < GUMBEL_MAX


def test_distribution_of_uniforms_and_independence_of_keys() -> None:
    ids = np.arange(1 << 16)
    rows = []
    for seed, stream, position in [(1, 0, 5), (2, 0, 5), (1, 1, 5), (1, 0, 6), (1 + 2**32, 0, 5)]:
        u = (Noise.at(seed, Stream(stream), position).bits(ids) + 0.5) * 2.0**-32
        counts = np.bincount((u * 256).astype(int), minlength=256)
        chi2 = ((counts - 256.0) ** 2 / 256.0).sum()
        assert 255 - 5 * math.sqrt(510) < chi2 < 255 + 5 * math.sqrt(510)
        assert np.corrcoef(u[1:], u[:-1])[0, 1] == pytest.approx(0.0, abs=0.02)
        rows.append(u)
    assert np.all(np.abs(np.corrcoef(rows) - np.eye(len(rows))) < 0.02)
    across = [Noise.at(1, Stream.ACCEPT, position).uniform() for position in range(1 << 14)]
    assert np.mean(across) == pytest.approx(0.5, abs=0.01)
    assert np.corrcoef(across[1:], across[:-1])[0, 1] == pytest.approx(0.0, abs=0.03)


@pytest.mark.parametrize("n", [1, 5, 9, 40, 4096])
def test_argmax_with_many_tokens_is_the_definition(n: int) -> None:
    rng = np.random.default_rng(n)
    for position in range(60):
        ids = np.sort(rng.choice(100_000, n, replace=False))
        scores = (rng.standard_normal(n) * 4).astype(np.float32)
        scores -= scores.max()
        noise = Noise.at(3, Stream.TARGET, position)
        assert perturbed_argmax(ids, scores, noise) == int(np.argmax(scores + noise.gumbel(ids)))


def test_derived_seeds() -> None:
    assert derive_seed(-5, 0) == -5
    seeds = [derive_seed(s, j) for s in (0, 1, -1, 2**63 - 1) for j in range(100)]
    assert len(set(seeds)) == len(seeds)
    assert all(-(2**63) <= s < 2**63 for s in seeds)
