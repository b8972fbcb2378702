"""GPTQ and AutoRound (auto_gptq packing): codes packed along the inputs, zero points along the outputs.

    qweight int32 [K / f, N]    word (r, n) holds inputs f*r .. f*r + f-1 of output n, low bits first
    qzeros  int32 [K / g, N / f]    zero points of f outputs; stored as zero - 1 (v1) or as they are (v2)
    scales  [K / g, N]
    g_idx   int32 [K], optional    the group of each input; only i // g is read

Which zero convention a file follows: a symmetric file shows it (words of all 8 are raw, all 7 minus one);
otherwise `checkpoint_format` (gptq_v2 is raw) or AutoRound's `packing_format` (raw unless it names auto_gptq).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from soloist.checkpoint.formats.pack_quantized import READ_AGAIN
from soloist.checkpoint.shards import TensorInfo
from soloist.errors import CheckpointError

FLOATS = (torch.float16, torch.bfloat16, torch.float32)


def word_of(value: int, bits: int) -> int:
    """The int32 whose every field is `value`, as a signed number."""
    word = sum(value << shift for shift in range(0, 32, bits))
    return word - (1 << 32) if word >= 1 << 31 else word


def companions(name: str, tensors: Mapping[str, TensorInfo]) -> tuple[TensorInfo, TensorInfo, TensorInfo]:
    """(qweight, qzeros, scales) or a CheckpointError naming the one that is missing."""
    for suffix in ("qzeros", "scales"):
        if suffix not in tensors:
            raise CheckpointError(
                f"{tensors['qweight'].shard.path}: {name}.{suffix} is missing beside {name}.qweight.", READ_AGAIN
            )
    return tensors["qweight"], tensors["qzeros"], tensors["scales"]


def check_scales(name: str, shape: tuple[int, int], scales: TensorInfo) -> int:
    """The group of a [K / g, N] scale matrix."""
    n, k = shape
    good = len(scales.shape) == 2 and scales.shape[1] == n and scales.shape[0] >= 1 and k % scales.shape[0] == 0
    if not good or scales.dtype not in FLOATS:
        raise CheckpointError(
            f"{scales.shard.path}: {name}.scales {list(scales.shape)} does not divide {[n, k]} into groups.",
            READ_AGAIN,
        )
    return k // scales.shape[0]


def check_order(name: str, k: int, group: int, tensors: Mapping[str, TensorInfo]) -> None:
    """Refuse activation order: a g_idx other than i // group."""
    order = tensors.get("g_idx")
    if order is None:
        return
    if order.shape != (k,) or not torch.equal(order.view().long(), torch.arange(k) // group):
        raise CheckpointError(
            f"{order.shard.path}: {name} is quantised with activation order (g_idx), which Soloist does not read.",
            "Use a checkpoint exported with desc_act false.",
        )


def inspect(
    name: str, shape: tuple[int, int], tensors: Mapping[str, TensorInfo], quantization: Mapping[str, Any]
) -> tuple[int, int, bool]:
    """(bits, group, symmetric) of a module [N, K]. Raises CheckpointError."""
    n, k = shape
    qweight, qzeros, scales = companions(name, tensors)
    bits = next((b for b in (4, 8) if qweight.shape == (k * b // 32, n)), 0)
    if not bits or qweight.dtype != torch.int32:
        raise CheckpointError(
            f"{qweight.shard.path}: {name}.qweight {list(qweight.shape)} is not int4 or int8 of {[n, k]}.",
            "Soloist reads 4 and 8 bits; use such a checkpoint.",
        )
    group = check_scales(name, shape, scales)
    if qzeros.shape != (k // group, -(-n * bits // 32)) or qzeros.dtype != torch.int32:
        raise CheckpointError(
            f"{qzeros.shard.path}: {name}.qzeros {list(qzeros.shape)} does not fit a weight of {[n, k]}.", READ_AGAIN
        )
    check_order(name, k, group, tensors)
    if quantization.get("checkpoint_format") == "gptq_p":
        raise CheckpointError(f"{qweight.shard.path}: planar GPTQ (gptq_p) is not supported.", "Export as gptq.")
    first = qzeros.view()[:1]
    half = 1 << (bits - 1)
    uniform = any(bool((first == word_of(zero, bits)).all()) for zero in (half, half - 1))
    return bits, group, bool(quantization.get("sym", True)) and uniform


def zeros_are_raw(quantization: Mapping[str, Any]) -> bool:
    """True if the config says zero points are stored without the minus one."""
    if quantization.get("quant_method") == "gptq":
        return str(quantization.get("checkpoint_format", "gptq")) == "gptq_v2"
    packing = str(quantization.get("packing_format", "auto_round:auto_gptq"))
    return "gptq" not in packing or "gptqmodel" in packing


def unpack_columns(words: torch.Tensor, bits: int, columns: int) -> torch.Tensor:
    """int32 [R, ceil(C / f)] packed along dim 1 -> uint8 [R, C]."""
    shifts = torch.arange(0, 32, bits, dtype=torch.int32)
    values = (words.unsqueeze(-1) >> shifts) & ((1 << bits) - 1)
    return values.flatten(1)[:, :columns].to(torch.uint8)


def read(
    name: str,
    bits: int,
    symmetric: bool,
    outputs: int,
    take: Callable[[str], torch.Tensor],
    quantization: Mapping[str, Any],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """(codes, scales, zeros) in the canonical form: everything transposed to outputs first, nothing rounded."""
    codes = take("qweight").t().contiguous()
    scales = take("scales").t().contiguous()
    words = take("qzeros")
    half = 1 << (bits - 1)
    if symmetric:
        zero = half if bool((words == word_of(half, bits)).all()) else half - 1
        if not bool((words == word_of(zero, bits)).all()):
            raise CheckpointError(
                f"{name}.qzeros differ between groups although the config says sym.", "Set sym to false in the config."
            )
        return codes, scales, None
    zeros = unpack_columns(words, bits, outputs)
    if not zeros_are_raw(quantization):
        zeros = (zeros + 1) & ((1 << bits) - 1)
    return codes, scales, zeros.t().contiguous()
