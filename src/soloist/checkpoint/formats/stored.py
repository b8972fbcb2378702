"""One stored module: which format its tensors are in, checked from headers, and the way to a `Weight`.

`detect` looks at the tensors that exist under a module's name (`weight`, `weight_packed`, `qweight`, ...),
infers bits and group from their shapes, and refuses by name what has no in-memory form. `load` reads.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from soloist.checkpoint.formats import awq, gptq, pack_quantized
from soloist.checkpoint.shards import BESIDE, TensorInfo
from soloist.errors import CheckpointError
from soloist.ops.linear import DenseWeight, QuantizedWeight, Weight

FLOATS = (torch.bfloat16, torch.float16, torch.float32)
SCALE_OF = {"pack-quantized": "weight_scale", "gptq": "scales", "awq": "scales"}


@dataclass(frozen=True)
class StoredModule:
    """A linear as the files hold it.

    form      dense, pack-quantized, gptq or awq
    shape     (N, K) of this module; `rows` are its rows inside a stored fused matrix of `whole` rows
    group     inputs per scale (K: one scale per row), 0 if dense
    tensors   suffix (`weight`, `weight_scale`, `bias`) -> its place
    """

    name: str
    form: str
    shape: tuple[int, int]
    bits: int
    group: int
    symmetric: bool
    tensors: Mapping[str, TensorInfo]
    quantization: Mapping[str, Any]
    rows: tuple[int, int] | None = None
    whole: int = 0

    @property
    def dense(self) -> bool:
        return self.form == "dense"

    @property
    def fused(self) -> bool:
        """True if the file stores this module inside a larger matrix."""
        return self.rows is not None

    @property
    def beside(self) -> bool:
        """True if it comes from the file that only Soloist reads."""
        return next(iter(self.tensors.values())).shard.path.name == BESIDE

    @property
    def scale_dtype(self) -> torch.dtype:
        return self.tensors[SCALE_OF[self.form]].dtype

    @property
    def nbytes(self) -> int:
        """Bytes of the in-memory form."""
        n, k = self.shape
        bias = n * self.tensors["bias"].dtype.itemsize if "bias" in self.tensors else 0
        if self.dense:
            return n * k * self.tensors["weight"].dtype.itemsize + bias
        groups = n * (k // self.group)
        return n * -(-k * self.bits // 32) * 4 + groups * (self.scale_dtype.itemsize + (not self.symmetric)) + bias


def detect(
    name: str,
    shape: tuple[int, int],
    tensors: Mapping[str, TensorInfo],
    biased: bool,
    quantization: Mapping[str, Any],
    rows: tuple[int, int] | None = None,
    whole: int = 0,
) -> StoredModule:
    """Decide and check the format of module `name` with true shape [N, K]. Raises CheckpointError.

    With `rows` and `whole` the tensors are those of a fused matrix [whole, K] that holds the module.
    """
    if biased and "bias" not in tensors:
        raise CheckpointError(f"{name}.bias is missing.", "The config says attention_bias; download it again.")
    stored = (whole, shape[1]) if rows else shape
    if "bias" in tensors and tensors["bias"].shape != (stored[0],):
        raise CheckpointError(
            f"{tensors['bias'].shard.path}: {name}.bias is {list(tensors['bias'].shape)}, not [{stored[0]}].",
            "config.json and weights belong to different models; download both again.",
        )
    if "weight" in tensors:
        _check_dense(name, stored, tensors["weight"])
        return StoredModule(
            name, "dense", shape, tensors["weight"].dtype.itemsize * 8, 0, True, tensors, quantization, rows, whole
        )
    if "weight_packed" in tensors:
        form, found = "pack-quantized", pack_quantized.inspect(name, stored, tensors, trust_shape=rows is None)
    elif "qweight" in tensors:
        is_awq = tensors["qweight"].shape[:1] == (shape[1],)
        form = "awq" if is_awq else "gptq"
        found = awq.inspect(name, stored, tensors) if is_awq else gptq.inspect(name, stored, tensors, quantization)
    else:
        present = ", ".join(sorted(tensors)) or "nothing"
        raise CheckpointError(
            f"{name}.weight is missing (found under this name: {present}).", "Download the checkpoint again."
        )
    bits, group, symmetric = found
    return StoredModule(name, form, shape, bits, group, symmetric, tensors, quantization, rows, whole)


def _check_dense(name: str, shape: tuple[int, int], weight: TensorInfo) -> None:
    if weight.dtype not in FLOATS:
        raise CheckpointError(
            f"{weight.shard.path}: {name}.weight is {str(weight.dtype).removeprefix('torch.')}, "
            "a form Soloist does not read.",
            "Use a bf16, fp16, fp32, compressed-tensors pack-quantized, GPTQ, AWQ or AutoRound checkpoint.",
        )
    if weight.shape != shape:
        raise CheckpointError(
            f"{weight.shard.path}: {name}.weight is {list(weight.shape)}, the config implies {list(shape)}.",
            "config.json and weights belong to different models; download both again.",
        )


def check_finite(name: str, info: TensorInfo, tensor: torch.Tensor) -> None:
    """Refuse NaN and infinity: one of them anywhere makes the sum one. Raises CheckpointError."""
    if tensor.is_floating_point() and not bool(torch.isfinite(tensor.sum(dtype=torch.float32))):
        raise CheckpointError(f"{info.shard.path}: {name} holds NaN or infinite values.", "Download it again.")


def check(stored: StoredModule) -> None:
    """Refuse a module whose weight, or scales, are not all finite. Reads them once."""
    suffix = "weight" if stored.dense else SCALE_OF[stored.form]
    check_finite(f"{stored.name}.{suffix}", stored.tensors[suffix], stored.tensors[suffix].view())


def load(stored: StoredModule, copy: bool = True) -> Weight:
    """Read one module: each stored tensor is copied out of the mapped file once.

    With `copy=False` the parts that need no conversion are views of the mapped file; the caller copies.
    """

    def view(suffix: str) -> torch.Tensor:
        return stored.tensors[suffix].view()

    def cut(tensor: torch.Tensor) -> torch.Tensor:
        part = tensor if stored.rows is None else tensor[stored.rows[0] : stored.rows[1]]
        return part.clone() if copy and tensor.data_ptr() in mapped else part

    mapped = {info.view().data_ptr() for info in stored.tensors.values() if info.numel}
    bias = cut(view("bias")) if "bias" in stored.tensors else None
    if copy:
        check(stored)
    if stored.dense:
        return DenseWeight(cut(view("weight")), bias)
    outputs = stored.whole if stored.rows else stored.shape[0]
    if stored.form == "gptq":
        parts = gptq.read(stored.name, stored.bits, stored.symmetric, outputs, view, stored.quantization)
    elif stored.form == "awq":
        parts = awq.read(outputs, view)
    else:
        parts = pack_quantized.read(stored.bits, stored.symmetric, outputs, view)
    codes, scales, zeros = parts
    zeros = None if zeros is None else cut(zeros)
    return QuantizedWeight(cut(codes), cut(scales), zeros, stored.bits, stored.group, stored.shape, bias)
