"""compressed-tensors `pack-quantized`: int4 or int8 codes in int32 words along K, group or channel scales.

Words hold code + 2^(bits-1), so the packed word is the in-memory form as it stands. Scales are signed.
Asymmetric files add `weight_zero_point`, packed the same way but along N: [ceil(N / f), K / group].
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from soloist.checkpoint.shards import TensorInfo
from soloist.errors import CheckpointError
from soloist.ops.linear import QuantizedWeight

READ_AGAIN = "The checkpoint is damaged or of a variant Soloist does not read; download it again."


def inspect(
    name: str, shape: tuple[int, int], tensors: Mapping[str, TensorInfo], trust_shape: bool = True
) -> tuple[int, int, bool]:
    """(bits, group, symmetric) of a module [N, K] from the shapes of its tensors. Raises CheckpointError.

    `trust_shape=False` for a fused matrix, whose `weight_shape` may describe one part only.
    """
    n, k = shape
    packed = tensors["weight_packed"]
    where = packed.shard.path
    bits = next((b for b in (4, 8) if packed.shape == (n, -(-k * b // 32))), 0)
    if not bits or packed.dtype != torch.int32:
        raise CheckpointError(
            f"{where}: {name}.weight_packed {list(packed.shape)} is not int4 or int8 of {[n, k]}.", READ_AGAIN
        )
    scale = tensors.get("weight_scale")
    if scale is None:
        raise CheckpointError(f"{where}: {name}.weight_scale is missing.", READ_AGAIN)
    if scale.dtype not in (torch.float16, torch.bfloat16, torch.float32) or len(scale.shape) != 2:
        raise CheckpointError(f"{where}: {name}.weight_scale {list(scale.shape)} is not a float matrix.", READ_AGAIN)
    if scale.shape[0] != n or scale.shape[1] < 1 or k % scale.shape[1]:
        raise CheckpointError(
            f"{where}: {name}.weight_scale {list(scale.shape)} does not divide a weight of {[n, k]} into groups.",
            READ_AGAIN,
        )
    if trust_shape and "weight_shape" in tensors:
        stated = tensors["weight_shape"]
        if stated.numel != 2 or tuple(int(v) for v in stated.view()) != shape:
            raise CheckpointError(f"{where}: {name}.weight_shape disagrees with the config's {[n, k]}.", READ_AGAIN)
    group = k // scale.shape[1]
    if "weight_g_idx" in tensors:
        order = tensors["weight_g_idx"].view()
        if order.shape != (k,) or not torch.equal(order.long(), torch.arange(k) // group):
            raise CheckpointError(
                f"{where}: {name} is quantised with activation order (weight_g_idx), which Soloist does not read.",
                "Use a checkpoint exported without act-order (actorder null or static).",
            )
    zero = tensors.get("weight_zero_point")
    if zero is None:
        return bits, group, True
    if zero.shape == (-(-n * bits // 32), k // group) and zero.dtype == torch.int32:
        return bits, group, False
    raise CheckpointError(
        f"{where}: {name}.weight_zero_point {list(zero.shape)} is not packed along the outputs of {[n, k]}.",
        READ_AGAIN,
    )


def unpack_rows(words: torch.Tensor, bits: int, rows: int) -> torch.Tensor:
    """int32 [ceil(rows / f), C] packed along dim 0 -> uint8 [rows, C]."""
    shifts = torch.arange(0, 32, bits, dtype=torch.int32).view(1, -1, 1)
    values = (words.unsqueeze(1) >> shifts) & ((1 << bits) - 1)
    return values.flatten(0, 1)[:rows].to(torch.uint8)


def read(
    bits: int, symmetric: bool, outputs: int, take: Callable[[str], torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """(codes, scales, zeros) in the canonical in-memory form; `take` fetches a stored tensor by suffix."""
    codes, scales = take("weight_packed"), take("weight_scale")
    if symmetric:
        return codes, scales, None
    return codes, scales, unpack_rows(take("weight_zero_point"), bits, outputs)


def pack(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Unsigned codes uint8 [N, K] -> int32 words [N, ceil(K / f)]; missing columns of the last word are zero bits."""
    factor = 32 // bits
    padded = torch.nn.functional.pad(codes, (0, -codes.shape[1] % factor))
    words = torch.zeros(codes.shape[0], padded.shape[1] // factor, dtype=torch.int32, device=codes.device)
    for field in range(factor):
        words |= padded[:, field::factor].to(torch.int32) << (bits * field)
    return words


def stored_tensors(weight: QuantizedWeight) -> dict[str, torch.Tensor]:
    """The tensors of a module by suffix, byte for byte as compressed-tensors writes them."""
    tensors = {
        "weight_packed": weight.codes,
        "weight_scale": weight.scales,
        "weight_shape": torch.tensor(weight.shape, dtype=torch.int64),
    }
    if weight.zeros is not None:
        # Rows missing from the last word are zero bits, as in the codes.
        tensors["weight_zero_point"] = pack(weight.zeros.t(), weight.bits).t().contiguous()
    if weight.bias is not None:
        tensors["bias"] = weight.bias
    return tensors
