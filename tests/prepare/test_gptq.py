"""GPTQ against an independent, sequential form that keeps the inverse explicitly and shrinks it column by column."""

from __future__ import annotations

import pytest
import torch

from soloist.errors import CheckpointError
from soloist.prepare.gptq import DAMPING, Hessian, factorise, loss, quantize_gptq
from soloist.prepare.rtn import round_to_nearest


def calibration(rows: int, width: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    mixing = torch.randn(width, width, generator=generator) / width**0.5
    return torch.randn(rows, width, generator=generator) @ mixing + torch.randn(width, generator=generator)


def sequential(weight: torch.Tensor, hessian: torch.Tensor, bits: int, group: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Optimal brain quantisation in fixed order: quantise, compensate the rest by H^-1, drop the column from H^-1."""
    w, half = weight.double().clone(), 1 << (bits - 1)
    h = hessian.double().clone()
    h += DAMPING * h.diagonal().mean() * torch.eye(len(h), dtype=torch.float64)
    inverse = torch.linalg.inv(h)
    codes, scales = torch.zeros(weight.shape, dtype=torch.int64), []
    for j in range(w.shape[1]):
        if j % group == 0:
            scale = (w[:, j : j + group].abs().amax(1) / (half - 1)).half().double()
            scales.append(scale)
        codes[:, j] = torch.round(w[:, j] / scale).clamp(-half, half - 1).long()
        error = (w[:, j] - codes[:, j] * scale) / inverse[0, 0]
        w[:, j:] -= error[:, None] * inverse[0]
        inverse = inverse[1:, 1:] - torch.outer(inverse[1:, 0], inverse[0, 1:]) / inverse[0, 0]
    return codes, torch.stack(scales, 1)


@pytest.mark.parametrize("bits, group", [(4, 32), (4, 128), (8, 64), (4, 256)])
def test_equals_the_sequential_form(bits: int, group: int) -> None:
    x = calibration(2000, 256, seed=bits)
    weight = torch.randn(48, 256, generator=torch.Generator().manual_seed(group))
    hessian = Hessian(256)
    for batch in x.split(300):
        hessian.add(batch)
    assert hessian.rows == 2000
    torch.testing.assert_close(hessian.matrix, 2 / 2000 * x.T @ x, rtol=1e-4, atol=1e-4)
    got = quantize_gptq(weight, factorise(hessian), bits, group)
    codes, scales = sequential(weight, hessian.matrix, bits, group)
    agreement = (got.unpack().long() - (1 << (bits - 1)) == codes).float().mean()
    assert float(agreement) > 0.999, float(agreement)  # fp32 against fp64: a code may fall at a tie
    torch.testing.assert_close(got.scales.double(), scales, rtol=2e-3, atol=0)


def test_beats_rounding_on_the_calibrated_inputs() -> None:
    x = calibration(3000, 256, seed=7)
    weight = torch.randn(64, 256, generator=torch.Generator().manual_seed(8))
    hessian = Hessian(256)
    hessian.add(x)
    rounded = loss(weight, round_to_nearest(weight, 4, 128).dequantize(), hessian)
    plain = loss(weight, quantize_gptq(weight, factorise(hessian), 4, 128).dequantize(), hessian)
    clipped = loss(weight, quantize_gptq(weight, factorise(hessian), 4, 128, search=True).dequantize(), hessian)
    assert plain < 0.6 * rounded
    assert clipped < 0.9 * plain


def test_rows_are_independent() -> None:
    hessian = Hessian(128)
    hessian.add(calibration(500, 128, seed=1))
    weight = torch.randn(40, 128, generator=torch.Generator().manual_seed(2))
    factor = factorise(hessian)
    whole = quantize_gptq(weight, factor, 4, 64).dequantize()
    parts = [quantize_gptq(part, factor, 4, 64).dequantize() for part in weight.split(7)]
    assert torch.equal(whole, torch.cat(parts))


def test_inputs_never_seen_become_zero() -> None:
    x = calibration(500, 128, seed=3)
    x[:, 17] = 0
    hessian = Hessian(128)
    hessian.add(x)
    weight = torch.randn(8, 128, generator=torch.Generator().manual_seed(4))
    quantised = quantize_gptq(weight, factorise(hessian), 4, 64).dequantize()
    assert not bool(quantised[:, 17].any()) and bool(torch.isfinite(quantised).all())


def test_merging_equals_accumulating() -> None:
    x = calibration(400, 64, seed=5)
    one, left, right = Hessian(64), Hessian(64), Hessian(64)
    one.add(x)
    left.add(x[:100])
    right.add(x[100:])
    left.merge(right)
    torch.testing.assert_close(left.matrix, one.matrix)
    assert left.rows == one.rows


def test_no_rows_is_refused() -> None:
    with pytest.raises(CheckpointError, match="No calibration rows reached mtp"):
        factorise(Hessian(8), "mtp.fc")
