"""Keys or values as they are stored: what the kernels of a card are handed to read and write rows of a KV format.

The codes and scales are those of `cache/codecs.py`; the kernels (`ops/triton/kv.py`) decode exactly as those do.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class StoredRows:
    """Rows of one layer's keys or values.

    data    [rows, kv, D] in a floating dtype, float8_e4m3fn or int8
    scale   fp32 [rows, kv] of int8 rows, else None
    factor  what fp8 codes are multiplied with
    """

    data: torch.Tensor
    scale: torch.Tensor | None = None
    factor: float = 1.0

    @classmethod
    def of(cls, rows: StoredRows | torch.Tensor) -> StoredRows:
        """Plain tensors hold what they say."""
        return rows if isinstance(rows, StoredRows) else cls(rows)
