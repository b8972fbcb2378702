"""AWQ (and AutoRound's auto_awq packing): int4 codes and zero points packed along the outputs, interleaved.

qweight int32 [K, N / 8]    field p of word (k, m) holds output 8m + ORDER[p] of input k
qzeros  int32 [K / g, N / 8]    zero points as they are, in the same order
scales  [K / g, N]
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from soloist.checkpoint.formats.gptq import check_scales, companions, unpack_columns
from soloist.checkpoint.formats.pack_quantized import READ_AGAIN, pack
from soloist.checkpoint.shards import TensorInfo
from soloist.errors import CheckpointError

ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
BITS = 4


def inspect(name: str, shape: tuple[int, int], tensors: Mapping[str, TensorInfo]) -> tuple[int, int, bool]:
    """(bits, group, symmetric) of a module [N, K]; AWQ keeps its zero points, so it is never symmetric here."""
    n, k = shape
    qweight, qzeros, scales = companions(name, tensors)
    group = check_scales(name, shape, scales)
    if qweight.shape != (k, n // 8) or n % 8 or qzeros.shape != (k // group, n // 8):
        raise CheckpointError(
            f"{qweight.shard.path}: {name}.qweight {list(qweight.shape)} with qzeros {list(qzeros.shape)} is not "
            f"4-bit AWQ of {[n, k]}.",
            READ_AGAIN,
        )
    return BITS, group, False


def in_order(words: torch.Tensor, outputs: int) -> torch.Tensor:
    """int32 [R, N / 8] -> uint8 [R, N], outputs in their natural order."""
    fields = unpack_columns(words, BITS, outputs).unflatten(1, (-1, 8))
    natural = torch.empty_like(fields)
    natural[:, :, list(ORDER)] = fields
    return natural.flatten(1)


def read(outputs: int, take: Callable[[str], torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """(codes, scales, zeros) in the canonical form: unpacked, transposed, repacked along the inputs."""
    codes = pack(in_order(take("qweight"), outputs).t().contiguous(), BITS)
    zeros = in_order(take("qzeros"), outputs).t().contiguous()
    return codes, take("scales").t().contiguous(), zeros
