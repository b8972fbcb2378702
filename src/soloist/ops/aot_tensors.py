"""Empty CPU tensors that stand for a card's in the launches that `ops/aot.py` compiles: only shape and dtype count."""

from __future__ import annotations

import torch


def half(*shape: int) -> torch.Tensor:
    """Activations, weights and keys: bf16."""
    return torch.zeros(shape, dtype=torch.bfloat16)


def full(*shape: int) -> torch.Tensor:
    """Scales, states and partial results: fp32."""
    return torch.zeros(shape, dtype=torch.float32)


def index(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    """Tables: int32, or int64 where the host makes them with torch."""
    return torch.zeros(shape, dtype=dtype)
