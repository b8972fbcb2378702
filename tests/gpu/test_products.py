"""The W4A16 product's epilogues against torch, and their rows against themselves at every row count."""

import pytest
import torch

from soloist.ops.linear import QuantizedWeight

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

COUNTS = (40, 1, 5, 8, 9, 16, 17, 32)


def quantized(n: int, k: int, zeros: bool) -> QuantizedWeight:
    words = torch.randint(-(2**31), 2**31 - 1, (n, k // 8), dtype=torch.int32, device="cuda")
    scales = (torch.randn(n, k // 128, device="cuda") * 0.01).half()
    z = torch.randint(0, 16, (n, k // 128), dtype=torch.uint8, device="cuda") if zeros else None
    return QuantizedWeight(words, scales, z, 4, 128, (n, k))


def near(a: torch.Tensor, b: torch.Tensor, bound: float) -> None:
    assert torch.isfinite(a.float()).all()
    assert (a.double() - b.double()).norm() <= bound * b.double().norm()


def sums_of(x: torch.Tensor, rows: int, parts: int) -> torch.Tensor:
    sums = torch.full((rows, parts), float("nan"), device="cuda")
    sums[: x.shape[0]] = torch.rand(x.shape[0], parts, device="cuda") * x.shape[1] / parts
    return sums


@pytest.mark.parametrize("zeros", [False, True])
def test_a_pair_is_gated_and_rooted(zeros: bool) -> None:
    from soloist.ops.linear_cuda import Squares, W4Prefill, W4Product, Workspace, pack

    torch.manual_seed(1)
    half, k = 2 * 1000, 1024
    weight, space = quantized(2 * half, k, zeros), Workspace(torch.device("cuda"))
    packed, dense = pack(weight, paired=True), weight.dequantize(torch.float64)
    product = W4Product(packed, space)
    x = torch.randn(max(COUNTS), k, device="cuda").bfloat16()
    sums = sums_of(x, 48, 80)
    root = torch.rsqrt(sums[: x.shape[0]].double().sum(1) / k + 1e-6)[:, None]
    plain = (x.double() @ dense.T) * root
    gate, up = plain.chunk(2, -1)
    whole = product(x, squares=Squares(sums, k, 1e-6), gated=True)
    near(whole, torch.nn.functional.silu(gate) * up, 8e-3)
    near(product(x, squares=Squares(sums, k, 1e-6)), plain, 3e-3)
    near(W4Prefill(packed, space)(x), x.double() @ dense.T, 3e-3)
    for rows in COUNTS:
        out = torch.full((rows, half), float("nan"), device="cuda", dtype=torch.bfloat16)
        assert torch.equal(product(x[:rows], out, squares=Squares(sums, k, 1e-6), gated=True), whole[:rows])


@pytest.mark.parametrize(("n", "k"), [(5120, 6144), (320, 512)])
def test_residual_and_norm(n: int, k: int) -> None:
    from soloist.ops.linear_cuda import Residual, W4Product, Workspace, pack, parts_of

    torch.manual_seed(2)
    product = W4Product(pack(quantized(n, k, False)), Workspace(torch.device("cuda")))
    x, before = (torch.randn(max(COUNTS), width, device="cuda").bfloat16() for width in (k, n))
    factor = torch.rand(n, device="cuda") + 0.5
    first: list[torch.Tensor] = []
    for rows in COUNTS:
        residual, sums = before[:rows].clone(), torch.full((48, parts_of(n)), float("nan"), device="cuda")
        out = torch.full((rows, n), float("nan"), device="cuda", dtype=torch.bfloat16)
        product(x[:rows], out, residual=Residual(residual, factor, sums))
        assert torch.equal(residual, before[:rows] + product(x[:rows]))
        assert torch.equal(out, (residual.float() * factor).bfloat16())
        near(sums[:rows, : n // 64].sum(1), residual.float().square().sum(1), 1e-6)
        first = first or [out, sums]
        assert torch.equal(out, first[0][:rows]) and torch.equal(sums[:rows, : n // 64], first[1][:rows, : n // 64])
