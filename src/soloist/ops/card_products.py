"""Products on a card: 4-bit weights through the W4A16 kernels, 16-bit ones through the dense Triton kernel.

Up to DECODE_ROWS rows run the decode kernel, more run the prefill kernel; each has one K order, so within either a
row's bits do not depend on its neighbours. A prompt on the grid always has at least 64 rows, a decode step asks for
its kernel by name, so the switch is never inside one path.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from soloist.ops.linear import DenseWeight, QuantizedWeight, Weight
from soloist.ops.linear_cuda import PackedW4, Residual, Squares, W4Prefill, W4Product, pack, why_not_w4
from soloist.ops.products import Linear
from soloist.ops.scratch import workspace
from soloist.ops.upload import upload

if TYPE_CHECKING:
    from soloist.ops.triton.dense import DenseProduct

DECODE_ROWS = 32
NARROW = 2048  # columns up to which a dense decode product splits K to fill the card


class CardLinear(Linear):
    """A product on a card. `decode` writes into `out` and may be captured; `__call__` picks the kernel by row count."""

    name = "card"

    @property
    def nbytes(self) -> int:
        """Bytes of the weight as a step reads it."""
        raise NotImplementedError

    # What a decode step may ask of `decode` beyond the product; see `W4Product.__call__`.
    takes_squares = False
    adds_residual = False
    gates = False

    def decode(
        self, x: torch.Tensor, out: torch.Tensor | None = None, *, squares: Squares | None = None
    ) -> torch.Tensor:
        raise NotImplementedError

    def prefill(self, x: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError

    def __call__(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        x = x.contiguous()
        y = self.decode(x) if x.shape[0] <= DECODE_ROWS else self.prefill(x)
        return y if residual is None else y + residual


class W4Linear(CardLinear):
    """4-bit codes with group scales; bf16 activations."""

    name = "w4a16"
    takes_squares = True

    def __init__(self, weight: Weight, device: torch.device, dtype: torch.dtype, paired: bool = False) -> None:
        assert isinstance(weight, QuantizedWeight)
        super().__init__(weight.shape)
        self.packed: PackedW4 = pack(weight.to(device), paired)
        self.gates, self.adds_residual = paired, not paired
        self._decode = W4Product(self.packed, workspace(device))
        self._prefill = W4Prefill(self.packed, workspace(device))

    @classmethod
    def refuses(cls, weight: Weight, device: torch.device, dtype: torch.dtype) -> str | None:
        if device.type != "cuda":
            return "runs on a card only"
        if dtype is not torch.bfloat16:
            return "activations must be bfloat16"
        if not isinstance(weight, QuantizedWeight):
            return "the weight is not quantised"
        if weight.bias is not None:
            return "the projection has a bias"
        return why_not_w4(weight)

    @property
    def nbytes(self) -> int:
        return self.packed.nbytes

    def decode(
        self, x: torch.Tensor, out: torch.Tensor | None = None, *, squares: Squares | None = None
    ) -> torch.Tensor:
        return self._decode(x, out, squares=squares)

    def gated(self, x: torch.Tensor, out: torch.Tensor, squares: Squares | None) -> torch.Tensor:
        """out [M, N / 2] = silu(first half) * second half; `gates` products only."""
        return self._decode(x, out, squares=squares, gated=True)

    def add(self, x: torch.Tensor, out: torch.Tensor, residual: Residual) -> torch.Tensor:
        """residual.x += product, out = its rows times the next norm's factor; `adds_residual` products only."""
        return self._decode(x, out, residual=residual)

    def prefill(self, x: torch.Tensor) -> torch.Tensor:
        return self._prefill(x)

    def warm(self) -> None:
        """Compile and load the kernels now, not at the first request."""
        self._decode.warm()
        self._prefill.warm()


class DenseLinear(CardLinear):
    """16-bit weights (quantised ones of other kinds are dequantised to them)."""

    name = "dense"

    def __init__(self, weight: Weight, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__(weight.shape)
        self._weight = upload(weight.dequantize(dtype), device).contiguous()
        self._bias = None if weight.bias is None else weight.bias.to(device, dtype)
        self._narrow: DenseProduct | None = None
        if self._bias is None and self.out_features <= NARROW:
            from soloist.ops.triton.dense import DenseProduct

            self._narrow = DenseProduct(self._weight)
            self.takes_squares = True

    @classmethod
    def refuses(cls, weight: Weight, device: torch.device, dtype: torch.dtype) -> str | None:
        if device.type != "cuda":
            return "runs on a card only"
        return None if dtype in (torch.bfloat16, torch.float16) else "activations must have 16 bits"

    @property
    def nbytes(self) -> int:
        return self._weight.nbytes

    @property
    def narrow(self) -> DenseProduct | None:
        """The small product's kernel, where it is one."""
        return self._narrow

    def decode(
        self, x: torch.Tensor, out: torch.Tensor | None = None, *, squares: Squares | None = None
    ) -> torch.Tensor:
        if self._narrow is not None:
            return self._narrow(x, out, squares)
        assert squares is None
        return self._wide(x, out)

    def prefill(self, x: torch.Tensor) -> torch.Tensor:
        return self._wide(x)

    def _wide(self, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        from soloist.ops.triton.wide import wide

        if out is None:
            out = torch.empty(x.shape[0], self.out_features, dtype=x.dtype, device=x.device)
        return wide(x, self._weight, self._bias, out)


CARD_PRODUCTS: tuple[type[W4Linear] | type[DenseLinear], ...] = (W4Linear, DenseLinear)


def card_linear(weight: Weight, device: torch.device, dtype: torch.dtype) -> CardLinear:
    """The first product that takes this weight; raises ValueError with every reason if none does."""
    reasons = []
    for candidate in CARD_PRODUCTS:
        reason = candidate.refuses(weight, device, dtype)
        if reason is None:
            return candidate(weight, device, dtype)
        reasons.append(f"{candidate.name}: {reason}")
    raise ValueError(f"no product takes a weight of {weight.shape}: {'; '.join(reasons)}")


def decode(product: Linear, x: torch.Tensor, out: torch.Tensor) -> None:
    """out [T, N] = x W^T with a step's kernel; off a card (kernels interpreted) with whatever product there is."""
    if isinstance(product, CardLinear):
        product.decode(x, out)
    else:
        out.copy_(product(x))


def one_form(weights: Sequence[Weight]) -> bool:
    """Whether these are quantised alike, so that their rows can be one weight."""
    first = weights[0]
    return isinstance(first, QuantizedWeight) and all(
        isinstance(w, QuantizedWeight)
        and (w.bits, w.group, w.zeros is None, w.bias is None, w.scales.dtype)
        == (first.bits, first.group, first.zeros is None, True, first.scales.dtype)
        for w in weights
    )


def stack_quantized(weights: Sequence[Weight], device: torch.device) -> QuantizedWeight:
    """Rows of several quantised weights of `one_form` as one weight on `device`, put together there: the host, which
    reads them from files, is the slower of the two at copying."""
    parts = [w.to(device) for w in weights if isinstance(w, QuantizedWeight)]
    if len(parts) == 1:
        return parts[0]
    zeros = [w.zeros for w in parts if w.zeros is not None]
    return QuantizedWeight(
        torch.cat([w.codes for w in parts]),
        torch.cat([w.scales for w in parts]),
        torch.cat(zeros) if zeros else None,
        parts[0].bits,
        parts[0].group,
        (sum(w.shape[0] for w in parts), parts[0].shape[1]),
    )


def runs_w4(weights: Sequence[Weight], device: torch.device, dtype: torch.dtype) -> bool:
    """Whether the rows of `weights` together are for the 4-bit product."""
    return one_form(weights) and W4Linear.refuses(weights[0], device, dtype) is None


def fused_card_linear(
    weights: list[Weight], device: torch.device, dtype: torch.dtype, pad: int = 1, paired: bool = False
) -> CardLinear:
    """One product over stacked rows; falls back to dense rows where forms differ or padding is asked for.

    `paired`: two projections of one size whose rows will be combined, so that a 4-bit product may do it.
    """
    from soloist.ops.products import stack_dense

    if pad == 1 and runs_w4(weights, device, dtype):
        return W4Linear(stack_quantized(weights, device), device, dtype, paired)
    dense: DenseWeight = stack_dense(weights, pad)
    return card_linear(dense, device, dtype)
