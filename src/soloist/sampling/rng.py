"""Counter-based randomness: every draw is a pure function of (seed, stream, position, token).

Nothing is consumed and nothing is shared, so a value cannot depend on batch neighbours, on how many
rows or tokens are evaluated together, on scheduling or on a retry. The integer definition, all in
unsigned 32-bit arithmetic that wraps (`rotl` = rotate left):

    absorb(h, w) = rotl(h ^ (rotl(w * 0xCC9E2D51, 15) * 0x1B873593), 13) * 5 + 0xE6546B64
    mix(h):        h ^= h >> 16;  h *= 0x85EBCA6B;  h ^= h >> 13;  h *= 0xC2B2AE35;  h ^= h >> 16
    key(init)    = mix(absorb(absorb(absorb(absorb(init, seed_low), seed_high), stream), position))
    a = key(0x9E3779B9);  b = key(0x7F4A7C15)
    hash(token)  = mix(mix(token ^ a) ^ b)
    u(token)     = (hash(token) + 0.5) * 2^-32           exact in fp64, never 0 or 1

(The finaliser is murmur3's.) Gumbel noise is -ln(-ln u), evaluated in fp64 by additions,
multiplications and divisions only (`_ln`) and rounded once to fp32: a library's logarithm may differ
between a vector body and its tail, between machines and between CPU and GPU; IEEE basic operations do
not, as long as nothing fuses a multiplication with an addition. The range is about [-3.13, 22.88].

The same expressions run on numpy arrays and on torch tensors of any device, with equal bits.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import IntEnum
from functools import lru_cache
from types import ModuleType
from typing import Any

import numpy as np
import torch

MASK32 = 0xFFFFFFFF
MASK64 = 0xFFFFFFFFFFFFFFFF
GUMBEL_MAX = 22.89
GUMBEL_MIN = -3.14

# 1 / (2n + 1): ln m = 2 s (1 + s^2/3 + s^4/5 + ...), s = (m - 1) / (m + 1), |s| < 0.172, error below 2^-38.
_ATANH = tuple(1.0 / (2 * n + 1) for n in range(7))
_LN2, _SQRT_HALF = math.log(2.0), math.sqrt(0.5)

# Up to this many tokens plain Python is quicker than array operations.
_FEW = 24


class Stream(IntEnum):
    """What a draw is for. Draft noise must be disjoint from acceptance and residual noise (rejection)."""

    TARGET = 0
    ACCEPT = 1
    RESIDUAL = 2
    DRAFT = 3


def derive_seed(seed: int, index: int) -> int:
    """The seed of sequence `index` of a request with n > 1; index 0 is the request's own seed.

    Returns a signed 64-bit integer (index 0: `seed` as given).
    """
    if index == 0:
        return seed
    x = (seed + index * 0x9E3779B97F4A7C15) & MASK64
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        x = ((x ^ (x >> shift)) * factor) & MASK64
    x ^= x >> 31
    return x - (1 << 64) if x >> 63 else x


def _rotl(x: int, r: int) -> int:
    return ((x << r) | (x >> (32 - r))) & MASK32


def _absorb(states: tuple[int, int], word: int) -> tuple[int, int]:
    """`absorb` of one word into both key chains."""
    word = (_rotl((word * 0xCC9E2D51) & MASK32, 15) * 0x1B873593) & MASK32
    a, b = _rotl(states[0] ^ word, 13), _rotl(states[1] ^ word, 13)
    return (a * 5 + 0xE6546B64) & MASK32, (b * 5 + 0xE6546B64) & MASK32


@lru_cache(maxsize=1024)
def _seeded(seed: int) -> tuple[int, int]:
    return _absorb(_absorb((0x9E3779B9, 0x7F4A7C15), seed & MASK32), (seed >> 32) & MASK32)


def key_before_position(seed: int, stream: Stream) -> tuple[int, int]:
    """Both key chains before the position is absorbed, for kernels that absorb it themselves."""
    return _absorb(_seeded(seed), int(stream))


def _mix(h: Any) -> Any:
    """The finaliser on Python integers or int64 arrays holding values below 2^32 (products wrap, then are masked)."""
    h = ((h ^ (h >> 16)) * 0x85EBCA6B) & MASK32
    h = ((h ^ (h >> 13)) * 0xC2B2AE35) & MASK32
    return h ^ (h >> 16)


def _ln(x: Any, xp: ModuleType) -> Any:
    """Natural logarithm of positive fp64 values by IEEE basic operations, relative error below 2^-36."""
    m, e = xp.frexp(x)
    low = m < _SQRT_HALF
    m = xp.where(low, m * 2.0, m)
    e = xp.where(low, e - 1, e)
    s = (m - 1.0) / (m + 1.0)
    z = s * s
    series = z * _ATANH[6] + _ATANH[5]
    for coefficient in _ATANH[4::-1]:
        series = series * z + coefficient
    return xp.asarray(e, dtype=xp.float64) * _LN2 + (s * 2.0) * series


def _ln_scalar(x: float) -> float:
    """`_ln` of one Python float: the same operations in the same order, so the same bits."""
    m, e = math.frexp(x)
    if m < _SQRT_HALF:
        m, e = m * 2.0, e - 1
    s = (m - 1.0) / (m + 1.0)
    z = s * s
    series = z * _ATANH[6] + _ATANH[5]
    for coefficient in _ATANH[4::-1]:
        series = series * z + coefficient
    return e * _LN2 + (s * 2.0) * series


@dataclass(frozen=True, slots=True)
class Noise:
    """The noise of one (seed, stream, position): keys once, then any token ids."""

    a: int
    b: int

    @classmethod
    def at(cls, seed: int, stream: Stream, position: int) -> Noise:
        """`seed` any 64-bit integer (signed or not), `position` the absolute index of the token being produced."""
        a, b = _absorb(_absorb(_seeded(seed), int(stream)), position & MASK32)
        return cls(_mix(a), _mix(b))

    def bits(self, token: Any) -> Any:
        """hash(token): a Python integer, or int64 array/tensor of the same shape."""
        return _mix(_mix(token ^ self.a) ^ self.b)

    def uniform(self, token: int = 0) -> float:
        """One uniform in (0, 1)."""
        return (self.bits(token) + 0.5) * 2.0**-32

    def gumbel(self, ids: np.ndarray) -> np.ndarray:
        """Standard Gumbel noise of token ids int64 [...] -> fp32 [...]."""
        if ids.size <= _FEW:
            few = [-_ln_scalar(-_ln_scalar((self.bits(t) + 0.5) * 2.0**-32)) for t in ids.ravel().tolist()]
            return np.array(few, dtype=np.float32).reshape(ids.shape)
        u = (self.bits(ids) + 0.5) * 2.0**-32
        return (-_ln(-_ln(u, np), np)).astype(np.float32)

    def gumbel_tensor(self, ids: torch.Tensor) -> torch.Tensor:
        """`gumbel` on an int64 tensor of any device, with the same bits."""
        u = (self.bits(ids).to(torch.float64) + 0.5) * 2.0**-32
        return (-_ln(-_ln(u, torch), torch)).to(torch.float32)


def perturbed_argmax(ids: np.ndarray, scores: np.ndarray, noise: Noise) -> int:
    """argmax over i of scores[i] + gumbel(ids[i]) in fp32; ties go to the lowest id. Returns the index i.

    ids int64 [n] ascending; scores fp32 [n], log-probabilities up to a common constant, -inf = excluded.
    A library logarithm picks the few that can win and only those are evaluated by definition.
    """
    if len(ids) > _FEW // 3:
        rough = scores - np.log(-np.log((noise.bits(ids) + 0.5) * 2.0**-32))
        # fp32 rounding of score and noise moves a sum by less than 1e-4 for scores of magnitude below 500.
        near = (rough >= rough.max() - 1e-2).nonzero()[0]
        if len(near) == 1:
            return int(near[0])
        return int(near[(scores[near] + noise.gumbel(ids[near])).argmax()])
    return int((scores + noise.gumbel(ids)).argmax())
