"""CPU products y = x W^T whose rows do not depend on how many rows there are.

Candidates are tried in order; each says why it does not apply, and the start-up check (`ops/numerics.py`)
drops one whose bits turn out to vary. Measured on AVX-512 and AVX2 machines, oneDNN with prepacked weights is both
invariant at every row count and the fastest from 1 to 64 rows.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
import torch.nn.functional as F

from soloist.errors import SettingError
from soloist.ops.linear import DenseWeight, Weight


class Linear(ABC):
    """A loaded product. `x` [T, K] -> [T, N]; `residual` [T, N] is added to the result when given."""

    name = ""

    def __init__(self, shape: tuple[int, int]) -> None:
        self.out_features, self.in_features = shape

    @classmethod
    @abstractmethod
    def refuses(cls, weight: Weight, device: torch.device, dtype: torch.dtype) -> str | None:
        """Why this product cannot serve such a weight here, or None."""

    @abstractmethod
    def __call__(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor: ...


class PackedLinear(Linear):
    """oneDNN with weights reordered once at load. Row-invariant at every row count tried."""

    name = "onednn"

    def __init__(self, weight: Weight, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__(weight.shape)
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight.dequantize(dtype).contiguous(), 4)
        self._bias = None if weight.bias is None else weight.bias.to(dtype)

    @classmethod
    def refuses(cls, weight: Weight, device: torch.device, dtype: torch.dtype) -> str | None:
        if device.type != "cpu":
            return "runs on a CPU only"
        if not torch.backends.mkldnn.is_available() or not hasattr(torch.ops.mkldnn, "_linear_pointwise"):
            return "this torch build has no oneDNN"
        if dtype not in (torch.float32, torch.bfloat16):
            return f"no {dtype} product"
        if dtype is torch.bfloat16 and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
            return "oneDNN has no bf16 product on this CPU"
        return None

    def __call__(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        if residual is not None:
            return torch.ops.mkldnn._linear_pointwise.binary(x, residual, self._packed, self._bias, "add")
        return torch.ops.mkldnn._linear_pointwise(x, self._packed, self._bias, "none", [], "")


class BlockLinear(Linear):
    """torch's own product in fixed blocks of `ROWS` rows: slower, invariant because every call has one shape."""

    name = "blocks"
    ROWS = 4

    def __init__(self, weight: Weight, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__(weight.shape)
        self._weight = weight.dequantize(dtype).to(device).contiguous()
        self._bias = None if weight.bias is None else weight.bias.to(device, dtype)

    @classmethod
    def refuses(cls, weight: Weight, device: torch.device, dtype: torch.dtype) -> str | None:
        return None

    def __call__(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        rows = x.shape[0]
        x = F.pad(x, (0, 0, 0, -rows % self.ROWS))
        y = torch.cat([F.linear(block, self._weight, self._bias) for block in x.split(self.ROWS)])[:rows]
        return y if residual is None else y + residual


class PlainLinear(Linear):
    """`F.linear` as it is: fast to call, and a row's bits may depend on its neighbours. Never chosen by itself."""

    name = "plain"

    def __init__(self, weight: Weight, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__(weight.shape)
        self._weight = weight.dequantize(dtype).to(device)
        self._bias = None if weight.bias is None else weight.bias.to(device, dtype)

    @classmethod
    def refuses(cls, weight: Weight, device: torch.device, dtype: torch.dtype) -> str | None:
        return None

    def __call__(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        y = F.linear(x, self._weight, self._bias)
        return y if residual is None else y + residual


CpuProduct = type[PackedLinear] | type[BlockLinear] | type[PlainLinear]
CPU_PRODUCTS: tuple[CpuProduct, ...] = (PackedLinear, BlockLinear, PlainLinear)


def _reasons(device: torch.device, dtype: torch.dtype) -> dict[str, str | None]:
    probe = DenseWeight(torch.zeros(32, 32))
    return {c.name: c.refuses(probe, device, dtype) for c in CPU_PRODUCTS}


def candidates(device: torch.device, dtype: torch.dtype) -> list[str]:
    """Names of the products that apply here and are meant to keep rows apart, best first."""
    reasons = _reasons(device, dtype)
    return [c.name for c in CPU_PRODUCTS if reasons[c.name] is None and c is not PlainLinear]


def product_class(name: str, device: torch.device, dtype: torch.dtype) -> CpuProduct:
    """The product called `name`, or the first candidate when `name` is "auto".

    Raises SettingError with the table of reasons if it does not apply here.
    """
    reasons = _reasons(device, dtype)
    wanted = candidates(device, dtype)[:1] if name == "auto" else [name]
    for candidate in CPU_PRODUCTS:
        if candidate.name in wanted and reasons[candidate.name] is None:
            return candidate
    table = "; ".join(f"{n}: {why or 'applies'}" for n, why in reasons.items())
    raise SettingError(f"No product {name!r} for {device.type} in {dtype}: {table}.", "Set LINEAR=auto.")


def stack_dense(weights: Sequence[Weight], multiple: int = 1) -> DenseWeight:
    """Stack weights along N into one fused projection, dequantised, each padded with zero rows to `multiple`."""
    dense = [w.dequantize() for w in weights]
    padded = [F.pad(d, (0, 0, 0, -d.shape[0] % multiple)) for d in dense]
    if all(w.bias is None for w in weights):
        return DenseWeight(torch.cat(padded))
    biases = [torch.zeros(w.shape[0]) if w.bias is None else w.bias.float() for w in weights]
    return DenseWeight(torch.cat(padded), torch.cat([F.pad(b, (0, -len(b) % multiple)) for b in biases]))
