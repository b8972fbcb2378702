"""Norm, rotation, activation and dense-product kernels against ops/."""

import pytest
import torch

from soloist.ops.linear_cuda import Squares
from soloist.ops.norms import rms_norm
from soloist.ops.rope import apply_rope, inverse_frequencies, rope_tables
from soloist.ops.triton.dense import DenseProduct
from soloist.ops.triton.rows import add_norm, qk_prepare, silu_mul
from soloist.ops.triton.wide import wide

CARD = torch.cuda.is_available()
# The interpreter truncates to bf16 where a card rounds to nearest, and its bf16 dot is broken: fp32 there.
BF16_BOUND = 3e-3 if CARD else 1e-2
DOT = torch.bfloat16 if CARD else torch.float32


def near(a: torch.Tensor, b: torch.Tensor, bound: float) -> None:
    assert torch.isfinite(a).all()
    error = (a.double() - b.double()).norm() / b.double().norm()
    assert error <= bound, f"relative error {error:.2e}, max {(a.double() - b.double()).abs().max():.2e}"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_add_norm(device: torch.device, dtype: torch.dtype) -> None:
    x, delta = (torch.randn(5, 320, device=device).to(dtype) for _ in range(2))
    factor, truth = torch.rand(320, device=device) + 0.5, x + delta
    y = add_norm(x, delta, factor, 1e-6, torch.full_like(x, float("nan")))
    near(x, truth, BF16_BOUND if dtype is torch.bfloat16 else 0)
    near(y, rms_norm(x, factor, 1e-6), BF16_BOUND if dtype is torch.bfloat16 else 1e-6)
    y = add_norm(x, None, factor, 1e-6, torch.full_like(x, float("nan")))
    near(y, rms_norm(x, factor, 1e-6), BF16_BOUND if dtype is torch.bfloat16 else 1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_heads_are_normed_and_rotated(device: torch.device, dtype: torch.dtype) -> None:
    heads, kv, dim, half = 3, 2, 64, 8
    qkv = torch.randn(4, 2 * (heads + kv) * dim, device=device).to(dtype)
    positions = torch.tensor([0, 7, 1000, 131071], device=device, dtype=torch.int32)
    inverse = inverse_frequencies(2 * half, 1e7, device)
    factors = torch.rand(heads + kv, dim, device=device) + 0.5
    q, k, v = (torch.full((4, n, dim), float("nan"), device=device, dtype=dtype) for n in (heads, kv, kv))
    qk_prepare(qkv, factors, positions, inverse, 1e-6, q, k, v)
    source_q = qkv[:, : 2 * heads * dim].view(4, heads, 2 * dim)[..., :dim]
    source_k, source_v = qkv[:, 2 * heads * dim :].view(4, 2, kv, dim).unbind(1)
    tables = rope_tables(positions, inverse)
    bound = BF16_BOUND if dtype is torch.bfloat16 else 2e-5
    near(q, apply_rope(rms_norm(source_q, factors[:heads], 1e-6), *tables), bound)
    near(k, apply_rope(rms_norm(source_k, factors[heads:], 1e-6), *tables), bound)
    assert torch.equal(v, source_v)


def test_silu_mul(device: torch.device) -> None:
    x = torch.randn(3, 2 * 1500, device=device)
    gate, up = x.chunk(2, -1)
    near(silu_mul(x, torch.full_like(gate, float("nan")).contiguous()), torch.nn.functional.silu(gate) * up, 1e-6)


@pytest.mark.parametrize("bias", [False, True])
def test_wide_product(device: torch.device, bias: bool) -> None:
    n, k = 100, 300
    weight, x = (torch.randn(r, k, device=device).to(DOT) for r in (n, 21))
    b = torch.randn(n, device=device).to(DOT) if bias else None
    whole = wide(x, weight, b, torch.full((21, n), float("nan"), dtype=DOT, device=device))
    near(whole, x.double() @ weight.double().T + (0 if b is None else b.double()), 4e-3 if CARD else 1e-6)
    for rows in (1, 5, 16, 17):
        assert torch.equal(wide(x[:rows], weight, b, torch.empty(rows, n, dtype=DOT, device=device)), whole[:rows])


@pytest.mark.parametrize(("n", "k"), [(24, 64), (96, 1280), (40, 1100)])
def test_dense_product(device: torch.device, n: int, k: int) -> None:
    weight = torch.randn(n, k, device=device).to(DOT)
    product = DenseProduct(weight, max_rows=32)
    x = torch.randn(37, k, device=device).to(DOT)
    whole = product(x, out=torch.full((37, n), float("nan"), dtype=DOT, device=device))
    near(whole, x.double() @ weight.double().T, 4e-3 if CARD else 1e-6)
    for rows in (1, 5, 16, 17):
        assert torch.equal(product(x[:rows]), whole[:rows])


def test_dense_product_of_rows_without_their_root(device: torch.device) -> None:
    torch.manual_seed(9)
    weight = torch.randn(24, 1536, device=device).to(DOT)
    x = torch.randn(18, 1536, device=device).to(DOT)
    sums = torch.full((20, 24), float("nan"), device=device)
    sums[:18] = torch.rand(18, 24, device=device) * 1536 / 8
    y = DenseProduct(weight)(x, None, Squares(sums, 1536, 1e-6))
    root = torch.rsqrt(sums[:18].sum(1) / 1536 + 1e-6)
    near(y, (x.float() @ weight.float().T) * root[:, None], 5e-3 if CARD else 1e-5)


def test_dense_products_share_their_parts(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """A smaller product after a larger one takes the same scratch, and each leaves the counters as it found them."""
    monkeypatch.setattr("soloist.ops.scratch._parts", {})
    torch.manual_seed(4)
    large, small = (torch.randn(n, 512, device=device).to(DOT) for n in (96, 40))
    x = torch.randn(7, 512, device=device).to(DOT)
    first, second = DenseProduct(large), DenseProduct(small)
    assert second.parts is first.parts and second.arrivals is first.arrivals
    for product, weight in ((first, large), (second, small), (first, large)):
        near(product(x).float(), (x.double() @ weight.double().t()).float(), BF16_BOUND)
        assert not product.arrivals.any()
    wider = DenseProduct(torch.randn(96, 4096, device=device).to(DOT))
    assert wider.parts is not first.parts, "the old ones stay with their holders, whose graphs know the address"
    near(first(x).float(), (x.double() @ large.double().t()).float(), BF16_BOUND)
