"""The load-time repack, read back the way w4a16.cu reads it."""

import pytest
import torch

from soloist.ops.linear import QuantizedWeight
from soloist.ops.linear_cuda import ROW_TILES, pack, plan_ring, why_not_w4


def quantized(n: int, k: int, group: int, zeros: bool) -> QuantizedWeight:
    g = torch.Generator().manual_seed(n + k)
    words = torch.randint(-(2**31), 2**31 - 1, (n, k // 8), dtype=torch.int32, generator=g)
    scales = torch.randn(n, k // group, generator=g).to(torch.float16)
    z = torch.randint(0, 16, (n, k // group), dtype=torch.uint8, generator=g) if zeros else None
    return QuantizedWeight(words, scales, z, 4, group, (n, k))


def read_back(packed, row: int, column: int) -> float:
    """One element through the address arithmetic of the kernel's fragments."""
    tile, inside, unit, k = row // 256, row % 256, column // 64, column % 64
    m_tile, half, g = inside // 16, inside % 16 // 8, inside % 8
    step, c = k // 16, k % 16
    t, upper, odd = c % 8 // 2, c // 8, c % 2
    value = int(packed.words[tile, unit, m_tile, g * 4 + t, half * 2 + step // 2])
    code = value >> (4 * (2 * (step % 2) + upper + 4 * odd)) & 0xF
    at = (tile, unit // packed.group_units, inside // 32, g, m_tile % 2, half)
    zero = 8 if packed.zeros is None else int(packed.zeros[at])
    return float(packed.scales[at].float()) * (code - zero)


@pytest.mark.parametrize(
    ("n", "k", "group", "zeros"), [(256, 128, 64, False), (300, 256, 128, True), (512, 256, 256, True)]
)
def test_every_element_is_where_the_kernel_looks(n: int, k: int, group: int, zeros: bool) -> None:
    weight = quantized(n, k, group, zeros)
    packed, truth = pack(weight), weight.dequantize()
    for row in range(0, n, 7):
        for column in range(0, k, 5):
            assert read_back(packed, row, column) == pytest.approx(float(truth[row, column]), rel=1e-6)


def test_refusals_name_the_reason() -> None:
    assert "group 32" in why_not_w4(quantized(256, 128, 32, False))
    weight = quantized(256, 128, 64, False)
    eight = QuantizedWeight(weight.codes, weight.scales, None, 8, 64, (256, 64))
    with pytest.raises(ValueError, match="8-bit"):
        pack(eight)


def test_ring_fits_the_cards_of_users() -> None:
    for limit in (101376, 166912, 232448):
        for row_tile in ROW_TILES:
            ring = plan_ring(row_tile, True, limit)
            assert ring is not None and ring.stages >= 2
            assert ring.shared + 2048 <= limit


@pytest.mark.parametrize("zeros", [False, True])
def test_a_pair_meets_eight_rows_at_a_time(zeros: bool) -> None:
    half = 200
    weight = quantized(2 * half, 128, 64, zeros)
    packed, truth = pack(weight, paired=True), weight.dequantize()
    assert packed.paired and packed.words.shape[0] == 2
    for row in range(0, 2 * half, 3):
        second, inside = divmod(row, half)
        at = inside // 8 * 16 + second * 8 + inside % 8
        for column in range(0, 128, 9):
            assert read_back(packed, at, column) == pytest.approx(float(truth[row, column]), rel=1e-6)
    for at in range(inside // 8 * 16 + 16, 512):
        assert read_back(packed, at, 0) == 0
