"""The one in-memory form of a weight, and the product y = x W^T that reads it.

A checkpoint's format ends in `checkpoint/`; model code holds a `Linear` and never asks which format
it came from. `DenseWeight` and `QuantizedWeight` are the canonical forms; what a product does with
them (prepacking, tile layouts) is private to that product and derived after loading.

Every product keeps a row's bits independent of how many rows stand beside it (contracts E1-E3).
What can go wrong: group scales may be negative, and codes are unsigned with an explicit zero.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from soloist.ops.upload import upload


def _moved(weight: object, names: tuple[str, ...], device: torch.device) -> dict[str, Any]:
    parts = {name: getattr(weight, name) for name in names}
    return {name: upload(part, device) for name, part in parts.items() if part is not None}


@dataclass(frozen=True)
class DenseWeight:
    """weight [N, K] in a floating dtype; bias [N] or None."""

    weight: torch.Tensor
    bias: torch.Tensor | None = None

    @property
    def shape(self) -> tuple[int, int]:
        return self.weight.shape[0], self.weight.shape[1]

    @property
    def nbytes(self) -> int:
        return self.weight.nbytes + (0 if self.bias is None else self.bias.nbytes)

    def dequantize(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return self.weight.to(dtype)

    def rows(self, ids: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Gather rows [n] -> [n, K]: an embedding look-up."""
        return self.weight[ids].to(dtype)

    def to(self, device: torch.device) -> DenseWeight:
        return replace(self, **_moved(self, ("weight", "bias"), device))


@dataclass(frozen=True)
class QuantizedWeight:
    """Group-quantised weight, w[n, c] = scales[n, c // group] * (code[n, c] - zero[n, c // group]).

    codes   int32 [N, ceil(K / f)], f = 32 / bits: element c in word c // f at bit bits * (c % f), unsigned
    scales  [N, K / group] fp16, bf16 or fp32, of either sign
    zeros   uint8 [N, K / group] in code units, or None for the symmetric zero 2^(bits - 1)
    """

    codes: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor | None
    bits: int
    group: int
    shape: tuple[int, int]
    bias: torch.Tensor | None = None

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for t in (self.codes, self.scales, self.zeros, self.bias) if t is not None)

    def unpack(self, codes: torch.Tensor | None = None) -> torch.Tensor:
        """Unsigned codes uint8 [rows, K] of `codes` (default: all rows)."""
        words = self.codes if codes is None else codes
        shifts = torch.arange(0, 32, self.bits, device=words.device, dtype=torch.int32)
        values = (words.unsqueeze(-1) >> shifts) & ((1 << self.bits) - 1)
        return values.flatten(-2)[..., : self.shape[1]].to(torch.uint8)

    def _scaled(self, codes: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor | None) -> torch.Tensor:
        n, k = codes.shape
        q = codes.to(torch.float32).view(n, k // self.group, self.group)
        q -= 2 ** (self.bits - 1) if zeros is None else zeros.to(torch.float32).unsqueeze(-1)
        return (q * scales.to(torch.float32).unsqueeze(-1)).view(n, k)

    def dequantize(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """The weight this form stands for, [N, K]. Exact products in fp32, one rounding to `dtype`."""
        return self._scaled(self.unpack(), self.scales, self.zeros).to(dtype)

    def rows(self, ids: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Gather rows [n] -> [n, K]: an embedding look-up that dequantises what it reads."""
        zeros = None if self.zeros is None else self.zeros[ids]
        return self._scaled(self.unpack(self.codes[ids]), self.scales[ids], zeros).to(dtype)

    def to(self, device: torch.device) -> QuantizedWeight:
        return replace(self, **_moved(self, ("codes", "scales", "zeros", "bias"), device))


Weight = DenseWeight | QuantizedWeight
