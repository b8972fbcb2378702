"""Round-to-nearest group quantisation: the baseline, good enough for 8 bits and for embeddings.

Codes are computed with the scale as it is stored (rounded to its 16 bits), so that rounding the scale
costs at most the clamp of a group's extreme value.
"""

from __future__ import annotations

import torch

from soloist.checkpoint.formats.pack_quantized import pack
from soloist.errors import CheckpointError
from soloist.ops.linear import QuantizedWeight

SMALLEST_SCALE = {torch.float16: 2.0**-24, torch.bfloat16: 1e-10, torch.float32: 1e-10}


def group_scales(extreme: torch.Tensor, bits: int, dtype: torch.dtype) -> torch.Tensor:
    """max|w| of each group -> its stored scale, max|w| / (2^(bits-1) - 1), never zero."""
    return (extreme.float() / (2 ** (bits - 1) - 1)).clamp_min(SMALLEST_SCALE[dtype]).to(dtype)


def check_group(name: str, k: int, group: int) -> None:
    if k % group:
        raise CheckpointError(
            f"{name}: a group of {group} does not divide its {k} inputs.",
            f"Choose --group from the divisors of {k}, or leave this part dense.",
        )


def check_finite(name: str, weight: torch.Tensor) -> None:
    if not bool(torch.isfinite(weight).all()):
        raise CheckpointError(f"{name} holds NaN or infinite weights.", "Download the checkpoint again.")


def round_to_nearest(
    weight: torch.Tensor, bits: int, group: int, scale_dtype: torch.dtype = torch.float16
) -> QuantizedWeight:
    """Quantise weight [N, K] (any float dtype) symmetrically; K must be a multiple of `group`."""
    n, k = weight.shape
    grouped = weight.to(torch.float32).view(n, k // group, group)
    scales = group_scales(grouped.abs().amax(-1), bits, scale_dtype)
    half = 2 ** (bits - 1)
    codes = torch.round(grouped / scales.float().unsqueeze(-1)).clamp_(-half, half - 1).add_(half)
    return QuantizedWeight(pack(codes.view(n, k).to(torch.uint8), bits), scales, None, bits, group, (n, k))
