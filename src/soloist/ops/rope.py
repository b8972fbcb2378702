"""Rotary embedding on the first `rope_dim` channels of a head, half-split (NeoX) pairing.

Positions may be one axis (text) or three (temporal, height, width: M-RoPE, interleaved sections);
equal axes reduce to the one-axis case.
"""

from __future__ import annotations

import torch


def inverse_frequencies(rope_dim: int, theta: float, device: torch.device | str = "cpu") -> torch.Tensor:
    """theta^(-2j / rope_dim), j = 0 .. rope_dim/2 - 1, fp32."""
    return 1.0 / theta ** (torch.arange(0, rope_dim, 2, dtype=torch.float32, device=device) / rope_dim)


def rope_tables(
    positions: torch.Tensor, inverse: torch.Tensor, section: tuple[int, ...] = ()
) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin, [T, 1, rope_dim / 2] fp32 each.

    positions [T], or [3, T] with `section` (t, h, w): frequency j turns with axis h if j % 3 == 1 and
    j < 3 * section[1], with axis w if j % 3 == 2 and j < 3 * section[2], else with t.
    """
    if positions.dim() == 1:
        angles = positions.to(torch.float32).unsqueeze(-1) * inverse
    else:
        per_axis = positions.to(torch.float32).unsqueeze(-1) * inverse
        j = torch.arange(inverse.numel(), device=inverse.device)
        axis = torch.zeros_like(j)
        axis[(j % 3 == 1) & (j < 3 * section[1])] = 1
        axis[(j % 3 == 2) & (j < 3 * section[2])] = 2
        angles = per_axis.gather(0, axis.expand(1, positions.shape[1], -1)).squeeze(0)
    return angles.cos().unsqueeze(1), angles.sin().unsqueeze(1)


def apply_rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate x [T, H, D]; channels past 2 * cos.shape[-1] pass through. Returns a new tensor of x's dtype."""
    half = cos.shape[-1]
    out = x.clone()
    a, b = x[..., :half].float(), x[..., half : 2 * half].float()
    out[..., :half] = a * cos - b * sin
    out[..., half : 2 * half] = b * cos + a * sin
    return out
