"""How one token's keys or values of one layer are stored: the formats that encode token by token.

A codec turns x [n, kv_heads, D] into named planes [n, ...] and back. Each token is encoded from its own
values alone, so a row of a running step can be read exactly as it will be stored: `roundtrip`. K and V
choose their codecs separately. KVarN encodes tiles of 128 tokens and lives in `ops/kvarn.py`.

Formulas: spec/kv_formats.md sections 2-4. What can go wrong: a kernel that dequantises with another
rounding than `decode` gives a stored token other bits than `roundtrip` gave it one step earlier, and
greedy text then depends on speculation. Codes come from true fp32 division (Triton: `div_rn`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Protocol

import torch

from soloist.errors import SettingError

Planes = dict[str, torch.Tensor]
FP8_MAX = 448.0


class Codec(Protocol):
    """Contract of a per-token format.

    planes(m, D)      name -> (shape of one token's entry, dtype)
    encode(x, layer)  x [n, m, D] floating -> planes [n, ...]
    decode(p, ...)    planes [n, ...] -> [n, m, D] in `dtype`; scaled products in fp32, one rounding to `dtype`
    """

    @property
    def name(self) -> str: ...

    def planes(self, kv_heads: int, head_dim: int) -> dict[str, tuple[tuple[int, ...], torch.dtype]]: ...

    def encode(self, x: torch.Tensor, layer: int = 0) -> Planes: ...

    def decode(self, planes: Planes, dtype: torch.dtype, layer: int = 0) -> torch.Tensor: ...


def bytes_per_token(codec: Codec, kv_heads: int, head_dim: int) -> int:
    """Stored bytes of one token's K (or V) in one layer."""
    return sum(prod(shape) * dtype.itemsize for shape, dtype in codec.planes(kv_heads, head_dim).values())


def roundtrip(codec: Codec, x: torch.Tensor, layer: int = 0) -> torch.Tensor:
    """What a later read of x returns, in x's dtype. Bit-equal to storing and reading."""
    return codec.decode(codec.encode(x, layer), x.dtype, layer)


@dataclass(frozen=True)
class DenseCodec:
    """Values rounded to one floating dtype: the identity when it is the compute dtype."""

    dtype: torch.dtype
    name: str

    def planes(self, kv_heads: int, head_dim: int) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        return {"data": ((kv_heads, head_dim), self.dtype)}

    def encode(self, x: torch.Tensor, layer: int = 0) -> Planes:
        return {"data": x.to(self.dtype)}

    def decode(self, planes: Planes, dtype: torch.dtype, layer: int = 0) -> torch.Tensor:
        return planes["data"].to(dtype)


@dataclass(frozen=True)
class Fp8Codec:
    """float8 e4m3fn: stored = clamp(x / s, +-448) to nearest even, x' = s * stored; one scale per layer.

    `scales[layer]` comes from the checkpoint (`k_scale`, `v_scale`); layers beyond the list use 1.0.
    """

    scales: Sequence[float] = ()
    name: str = "fp8"

    def scale(self, layer: int) -> float:
        return float(self.scales[layer]) if layer < len(self.scales) else 1.0

    def planes(self, kv_heads: int, head_dim: int) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        return {"data": ((kv_heads, head_dim), torch.float8_e4m3fn)}

    def encode(self, x: torch.Tensor, layer: int = 0) -> Planes:
        scaled = x.to(torch.float32) / self.scale(layer)
        return {"data": scaled.clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn)}

    def decode(self, planes: Planes, dtype: torch.dtype, layer: int = 0) -> torch.Tensor:
        return (planes["data"].to(torch.float32) * self.scale(layer)).to(dtype)


@dataclass(frozen=True)
class Int8Codec:
    """int8 per token and head: s = max(max|x| / 127, 1e-6), q = round half away from zero of x / s, x' = s q.

    The scales stand in a plane of their own (fp32), so that the data keeps its natural alignment.
    """

    name: str = "int8"

    def planes(self, kv_heads: int, head_dim: int) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        return {"data": ((kv_heads, head_dim), torch.int8), "scale": ((kv_heads,), torch.float32)}

    def encode(self, x: torch.Tensor, layer: int = 0) -> Planes:
        x = x.to(torch.float32)
        scale = (x.abs().amax(-1) / 127.0).clamp_min(1e-6)
        ratio = x / scale.unsqueeze(-1)
        rounded = torch.trunc(ratio + torch.copysign(torch.full_like(ratio, 0.5), ratio))
        return {"data": rounded.clamp(-128, 127).to(torch.int8), "scale": scale}

    def decode(self, planes: Planes, dtype: torch.dtype, layer: int = 0) -> torch.Tensor:
        return (planes["data"].to(torch.float32) * planes["scale"].unsqueeze(-1)).to(dtype)


TOKEN_FORMATS = ("bf16", "fp16", "fp32", "fp8", "int8")
_DENSE = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def token_codec(name: str, scales: Sequence[float] = ()) -> Codec:
    """The per-token codec called `name`; `scales` are fp8's per-layer scales. SettingError for unknown names."""
    if name in _DENSE:
        return DenseCodec(_DENSE[name], name)
    if name == "fp8":
        return Fp8Codec(tuple(scales))
    if name == "int8":
        return Int8Codec()
    raise SettingError(f"The KV format {name!r} is unknown.", f"Use one of {', '.join((*TOKEN_FORMATS, 'kvarn'))}.")
