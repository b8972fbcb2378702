"""The card's products on a CPU: what `CardLoader` would load, with the arithmetic done by torch.

A 4-bit product of a card is NVRTC code that needs a card; here its class is kept (so that callers choose the same road)
and its epilogues are spelt out. Dense products are the card's own, interpreted.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from soloist.models.card_loader import CardLoader
from soloist.models.layers import Source
from soloist.ops.card_products import CardLinear, DenseLinear, W4Linear
from soloist.ops.linear import Weight
from soloist.ops.linear_cuda import PART_N, TILE_N, Residual, Squares
from soloist.ops.products import stack_dense


class HostW4(W4Linear):
    """`W4Linear` over the weight's values."""

    def __init__(self, weight: Weight, device: torch.device, dtype: torch.dtype, paired: bool = False) -> None:
        CardLinear.__init__(self, weight.shape)
        self._values = weight.dequantize(dtype).to(device)
        self.gates, self.adds_residual = paired, not paired

    def decode(
        self, x: torch.Tensor, out: torch.Tensor | None = None, *, squares: Squares | None = None
    ) -> torch.Tensor:
        return self.launch(x, out, squares)

    def prefill(self, x: torch.Tensor) -> torch.Tensor:
        return self.launch(x, None, None)

    def gated(self, x: torch.Tensor, out: torch.Tensor, squares: Squares | None) -> torch.Tensor:
        assert self.gates
        return self.launch(x, out, squares, gated=True)

    def add(self, x: torch.Tensor, out: torch.Tensor, residual: Residual) -> torch.Tensor:
        assert self.adds_residual
        return self.launch(x, out, None, residual=residual)

    def launch(
        self,
        x: torch.Tensor,
        out: torch.Tensor | None,
        squares: Squares | None,
        *,
        gated: bool = False,
        residual: Residual | None = None,
    ) -> torch.Tensor:
        """One kernel of a card."""
        assert x.stride(1) == 1
        y = x @ self._values.T
        if squares is not None:
            y = y * torch.rsqrt(squares.values[: len(x)].sum(1) / squares.width + squares.eps)[:, None]
        if gated:
            gate, up = y.chunk(2, -1)
            y = F.silu(gate) * up
        if residual is not None:
            x, rows = residual.x, len(y)
            x += y
            wide = F.pad(x, (0, -x.shape[1] % TILE_N)).view(rows, -1, PART_N)
            residual.squares[:rows] = wide.square().sum(-1)
            y = x * residual.factor
        return y if out is None else out.copy_(y)


class HostLoader(CardLoader):
    """`CardLoader` of a CPU: 4-bit products except where a prepared checkpoint keeps 16 bits."""

    def __init__(self, source: Source, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__(source, device, dtype)
        self.make = DenseLinear

    def linear(self, modules: Sequence[str], pad: int = 1) -> CardLinear:
        weight = stack_dense([self.source.weight(m) for m in modules], pad)
        kind = DenseLinear if modules[0].endswith("projection") or pad > 1 else HostW4
        return kind(weight, self.device, self.dtype)

    def pair(self, modules: Sequence[str]) -> CardLinear:
        return HostW4(stack_dense([self.source.weight(m) for m in modules]), self.device, self.dtype, paired=True)
