"""GPTQ: quantise a matrix column by column and push each column's error onto the columns not yet quantised.

With calibration inputs X [n, K] the loss of a quantised row is its error in the norm H = (2/n) X^T X
(Frantar et al. 2022, arXiv 2210.17323). Scales come from the current, error-compensated weights at each group's
start; there is no activation order, so the result is an ordinary group-quantised matrix.
What can go wrong: too few rows make H singular (damping covers it), and inputs never seen must not steer anything.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from soloist.checkpoint.formats.pack_quantized import pack
from soloist.errors import CheckpointError
from soloist.ops.linear import QuantizedWeight
from soloist.prepare.rtn import group_scales

BLOCK = 128
DAMPING = 0.01
MOST_CLIPPED, CLIPS = 0.7, 13


class Hessian:
    """H = (2/n) sum over rows of x x^T in fp32, accumulated batch by batch on the rows' device."""

    def __init__(self, width: int, device: torch.device | str = "cpu") -> None:
        self.rows = 0
        self.matrix = torch.zeros(width, width, dtype=torch.float32, device=device)

    def add(self, x: torch.Tensor) -> None:
        """x [..., K], any float dtype: the inputs of one call of the module."""
        rows = x.detach().reshape(-1, x.shape[-1]).to(self.matrix.device, torch.float32)
        total = self.rows + rows.shape[0]
        if not rows.shape[0]:
            return
        self.matrix.mul_(self.rows / total).addmm_(rows.t(), rows, alpha=2 / total)
        self.rows = total

    def merge(self, other: Hessian) -> None:
        """Add the rows another accumulator has seen."""
        total = self.rows + other.rows
        if total:
            self.matrix.mul_(self.rows / total).add_(other.matrix.to(self.matrix.device), alpha=other.rows / total)
        self.rows = total


@dataclass(frozen=True)
class Factor:
    """U, the upper Cholesky factor of the damped H^-1 (H^-1 = U^T U), and the inputs that were never active."""

    upper: torch.Tensor
    dead: torch.Tensor


def factorise(hessian: Hessian, name: str = "", damping: float = DAMPING) -> Factor:
    """Damp and invert H once; every matrix that reads these inputs shares the result. Raises CheckpointError."""
    if not hessian.rows:
        raise CheckpointError(f"No calibration rows reached {name}.", "Capture with more prompts, or use rtn.")
    h = hessian.matrix.clone()
    dead = h.diagonal() <= 0
    h.diagonal()[dead] = 1.0
    h.diagonal().add_(damping * h.diagonal().mean())
    try:
        lower = torch.linalg.cholesky(h)
        upper = torch.linalg.cholesky(torch.cholesky_inverse(lower), upper=True)
    except torch.linalg.LinAlgError:
        raise CheckpointError(
            f"The calibration of {name} is numerically singular ({hessian.rows} rows).",
            "Raise --damping, or capture more prompts.",
        ) from None
    return Factor(upper, dead)


def quantize_gptq(
    weight: torch.Tensor,
    factor: Factor,
    bits: int,
    group: int,
    scale_dtype: torch.dtype = torch.float16,
    search: bool = False,
) -> QuantizedWeight:
    """Quantise weight [N, K] symmetrically. Rows are independent given the factor, so blocks of rows may come alone.

    `search` tries several scales of either sign for each group instead of the one its extreme value asks for.
    """
    n, k = weight.shape
    upper = factor.upper
    # Transposed: a column of W is contiguous, and so is everything done to it.
    w = weight.to(upper.device, torch.float32).t().contiguous()
    w[factor.dead] = 0.0
    half = 1 << (bits - 1)
    width = min(BLOCK, group)
    codes = torch.empty(k, n, dtype=torch.uint8, device=w.device)
    scales = torch.empty(k // group, n, dtype=scale_dtype, device=w.device)
    scale = torch.ones(n, device=w.device)
    pivots = upper.diagonal().tolist()
    importance = upper.diagonal().reciprocal().square()  # what an error in a column costs before compensation
    for start in range(0, k, width):
        end = min(start + width, k)
        if start % group == 0:
            here = w[start : start + group]
            if search:
                stored = _searched(here, importance[start : start + group], bits, scale_dtype)
            else:
                stored = group_scales(here.abs().amax(0), bits, scale_dtype)
            scales[start // group] = stored
            scale = stored.float()
        block = w[start:end]
        errors = torch.empty_like(block)
        for j in range(end - start):
            q = torch.round(block[j] / scale).clamp_(-half, half - 1)
            codes[start + j] = (q + half).to(torch.uint8)
            errors[j] = (block[j] - q * scale).div_(pivots[start + j])
            block[j + 1 :].addr_(upper[start + j, start + j + 1 : end], errors[j], alpha=-1)
        w[end:].addmm_(upper[start:end, end:].t(), errors, alpha=-1)
    packed = pack(codes.t().cpu(), bits)
    return QuantizedWeight(packed, scales.t().cpu().contiguous(), None, bits, group, (n, k))


def _searched(group: torch.Tensor, importance: torch.Tensor, bits: int, dtype: torch.dtype) -> torch.Tensor:
    """The stored scale [N] with the least error of one group's weights [g, N], inputs weighted by `importance` [g].

    Candidates shrink the range, and use the code range -2^(b-1) .. 2^(b-1)-1 in full: a negative scale gives the
    longer side to positive extremes.
    """
    half = 1 << (bits - 1)
    extreme = group.abs().amax(0)
    longer = torch.where(group.amax(0) >= -group.amin(0), -1.0, 1.0)
    best = torch.full_like(extreme, torch.inf)
    chosen = group_scales(extreme, bits, dtype)
    weighted = importance.unsqueeze(1)
    for clip in torch.linspace(MOST_CLIPPED, 1.0, CLIPS).tolist():
        shrunk = extreme * clip
        for scale in (
            group_scales(shrunk, bits, dtype),
            group_scales(shrunk * (half - 1) / half, bits, dtype) * longer,
        ):
            stored = scale.to(dtype)
            step = stored.float()
            lost = ((torch.round(group / step).clamp_(-half, half - 1) * step - group).square_() * weighted).sum(0)
            better = lost < best
            best, chosen = torch.where(better, lost, best), torch.where(better, stored, chosen)
    return chosen


def loss(weight: torch.Tensor, quantised: torch.Tensor, hessian: Hessian) -> float:
    """tr((W - Q) H (W - Q)^T): the squared output error over the calibration rows, times two, per row."""
    error = weight.float() - quantised.float()
    return float(((error @ hessian.matrix) * error).sum(dtype=torch.float64))
