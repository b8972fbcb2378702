"""One stored module: which format its tensors are in, checked from headers, and the way to a `Weight`.

`detect` looks at the tensors that exist under a module's name (`weight`, `weight_packed`, `qweight`, ...),
infers bits and group from their shapes, and refuses by name what has no in-memory form. `load` reads.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from soloist.checkpoint.formats import pack_quantized
from soloist.checkpoint.shards import TensorInfo
from soloist.errors import CheckpointError
from soloist.ops.linear import DenseWeight, QuantizedWeight, Weight

FLOATS = (torch.bfloat16, torch.float16, torch.float32)


@dataclass(frozen=True)
class StoredModule:
    """A linear as the files hold it. `tensors` maps suffix (`weight`, `weight_scale`, `bias`) to its place."""

    name: str
    form: str
    shape: tuple[int, int]
    bits: int
    group: int
    symmetric: bool
    tensors: Mapping[str, TensorInfo]

    @property
    def dense(self) -> bool:
        return self.form == "dense"

    @property
    def nbytes(self) -> int:
        """Bytes of the in-memory form."""
        n, k = self.shape
        bias = self.tensors["bias"].nbytes if "bias" in self.tensors else 0
        if self.dense:
            return self.tensors["weight"].nbytes + bias
        scale = self.tensors[SCALE_OF[self.form]]
        zeros = 0 if self.symmetric else n * (k // self.group)
        return n * -(-k * self.bits // 32) * 4 + scale.nbytes + zeros + bias


SCALE_OF = {"pack-quantized": "weight_scale"}


def detect(
    name: str, shape: tuple[int, int], tensors: Mapping[str, TensorInfo], biased: bool, quantization: dict[str, Any]
) -> StoredModule:
    """Decide and check the format of module `name` with true shape [N, K]. Raises CheckpointError."""
    where = next(iter(tensors.values())).shard.path if tensors else None
    if biased and "bias" not in tensors:
        raise CheckpointError(f"{name}.bias is missing.", "The config says attention_bias; download it again.")
    if "bias" in tensors and tensors["bias"].shape != (shape[0],):
        raise CheckpointError(f"{where}: {name}.bias is {list(tensors['bias'].shape)}, not [{shape[0]}].", "")
    if "weight" in tensors:
        weight = tensors["weight"]
        if weight.dtype not in FLOATS:
            raise CheckpointError(
                f"{where}: {name}.weight is {str(weight.dtype).removeprefix('torch.')}, a form Soloist does not read.",
                "Use a bf16, fp16, fp32, compressed-tensors pack-quantized, GPTQ, AWQ or AutoRound checkpoint.",
            )
        if weight.shape != shape:
            raise CheckpointError(
                f"{where}: {name}.weight is {list(weight.shape)}, the config implies {list(shape)}.",
                "config.json and weights belong to different models; download both again.",
            )
        return StoredModule(name, "dense", shape, weight.dtype.itemsize * 8, 0, True, tensors)
    if "weight_packed" in tensors:
        bits, group, symmetric = pack_quantized.inspect(name, shape, tensors)
        return StoredModule(name, "pack-quantized", shape, bits, group, symmetric, tensors)
    present = ", ".join(sorted(tensors)) or "nothing"
    raise CheckpointError(
        f"{name}.weight is missing (found under this name: {present}).", "Download the checkpoint again."
    )


def load(stored: StoredModule, copy: bool = True) -> Weight:
    """Read one module: each stored tensor is copied out of the mapped file once.

    With `copy=False` the parts that need no conversion are views of the mapped file; the caller copies.
    """

    def take(suffix: str) -> torch.Tensor:
        view = stored.tensors[suffix].view()
        return view.clone() if copy else view

    bias = take("bias") if "bias" in stored.tensors else None
    if stored.dense:
        return DenseWeight(take("weight"), bias)
    codes, scales, zeros = pack_quantized.read(stored, take)
    return QuantizedWeight(codes, scales, zeros, stored.bits, stored.group, stored.shape, bias)
