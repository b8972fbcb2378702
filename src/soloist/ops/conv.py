"""Depthwise causal convolution with SiLU, taps taken from a row's ancestors.

A row's history is its path: earlier rows of the step as `parent` says, then the request's stored
columns. Chains and trees differ only in the table of taps.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F


def ancestor_conv(rows: torch.Tensor, taps: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """y[t] = silu(sum_j weight[j] * rows[taps[t, j]]), [T, C].

    rows [H + T, C]: stored columns of every request (K-1 each, oldest first), then the step's own rows;
    taps int64 [T, K], oldest first, the row itself last; weight [K, C] fp32.
    """
    gathered = rows.index_select(0, taps.flatten()).view(*taps.shape, -1).float()
    return F.silu((gathered * weight).sum(1)).to(rows.dtype)


def causal_conv(rows: torch.Tensor, history: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """The same over consecutive rows of one request. rows [T, C]; history [K-1, C]; returns [T, C]."""
    if rows.is_cuda:
        from soloist.ops.triton.conv import causal_conv as on_card

        return on_card(rows, history, weight)
    k = weight.shape[0]
    padded = torch.cat([history, rows]).float()
    total = padded[: rows.shape[0]] * weight[0]
    for j in range(1, k):
        total.addcmul_(padded[j : j + rows.shape[0]], weight[j])
    return F.silu(total).to(rows.dtype)
