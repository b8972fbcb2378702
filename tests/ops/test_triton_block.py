"""Kernels of a draft block against the reference drafter's arithmetic."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from soloist.models.dflash2 import DFlash2, GroupedConv
from soloist.models.layers import Loader
from soloist.ops.linear import DenseWeight, QuantizedWeight
from soloist.ops.norms import plain_rms_norm, rms_norm
from soloist.ops.rope import apply_rope, inverse_frequencies, rope_tables
from soloist.ops.top import width
from soloist.ops.triton import embed, grouped_conv, ring
from soloist.ops.triton.dense import DenseProduct
from soloist.ops.triton.selector import pair_scores

CARD = torch.cuda.is_available()
BLOCK, EPS = 4, 1e-6


def near(a: torch.Tensor, b: torch.Tensor, bound: float = 1e-5) -> None:
    assert torch.isfinite(a).all()
    error = (a.double() - b.double()).norm() / b.double().norm()
    assert error <= bound, f"relative error {error:.2e}, max {(a.double() - b.double()).abs().max():.2e}"


def nothing(*shape: int, like: torch.Tensor) -> torch.Tensor:
    return torch.full(shape, float("nan"), dtype=like.dtype, device=like.device)


def tables(device: torch.device) -> dict[str, DenseWeight | QuantizedWeight]:
    def codes(bits: int, columns: int) -> torch.Tensor:
        return torch.randint(-(2**31), 2**31, (50, columns * bits // 32), device=device).to(torch.int32)

    def scales(groups: int) -> torch.Tensor:
        return torch.randn(50, groups, device=device).half() / 8

    zeros = torch.randint(0, 16, (50, 6), device=device).to(torch.uint8)
    return {
        "16-bit rows": DenseWeight(torch.randn(50, 96, device=device).bfloat16()),
        "8 bits": QuantizedWeight(codes(8, 96), scales(1), None, 8, 96, (50, 96)),
        "4 bits, zeros": QuantizedWeight(codes(4, 96), scales(6), zeros, 4, 16, (50, 96)),
    }


@pytest.mark.parametrize("name", ["16-bit rows", "8 bits", "4 bits, zeros"])
def test_look_ups(device: torch.device, name: str) -> None:
    torch.manual_seed(2)
    weight = tables(device)[name]
    table, tokens = embed.Table.of(weight), torch.tensor([7, 0, 49, 7, 3, 3, 9, 1], device=device, dtype=torch.int32)
    truth = weight.rows(tokens.long())
    x, h = (nothing(8, 96, like=truth) for _ in range(2))
    assert torch.equal(embed.embed(table, tokens, x), truth)
    if CARD:  # the interpreter truncates to bf16
        rounded = nothing(8, 96, like=truth.bfloat16())
        assert torch.equal(embed.embed(table, tokens, rounded), weight.rows(tokens.long(), torch.bfloat16))

    factor, anchors = torch.rand(96, device=device) + 0.5, tokens[:2]
    embed.embed_block(table, anchors, 5, 3.0, factor, EPS, x.fill_(float("nan")), h)
    rows = torch.tensor([7, 5, 5, 5, 0, 5, 5, 5], device=device)
    assert torch.equal(x, weight.rows(rows) * 3.0)
    near(h, rms_norm(x, factor, EPS))

    hidden, factors = torch.randn(5, 96, device=device), torch.rand(2, 96, device=device) + 0.5
    sources = torch.tensor([4, 4, 0, 1, 2, 3, 0, 2], device=device, dtype=torch.int32)
    pair = nothing(8, 2, 96, like=truth)
    embed.embed_pair(table, tokens, hidden, sources, factors, EPS, pair)
    near(pair, rms_norm(torch.stack([truth, hidden[sources.long()]], 1), factors, EPS))
    embed.embed_pair(table, tokens[:5], hidden, None, factors, EPS, pair[:5].fill_(float("nan")))
    near(pair[:5], rms_norm(torch.stack([truth[:5], hidden], 1), factors, EPS))


class Convolution:
    """A random `GroupedConv` over 96 channels in groups of 8."""

    def __init__(self, taps: int, device: torch.device) -> None:
        kernel, base = torch.randn(2 * taps * 12, 96) * 0.1, torch.randn(2, taps, 96)
        source = SimpleNamespace(weight=lambda name: DenseWeight(kernel), tensor=lambda name: base)
        config = SimpleNamespace(conv_taps=taps, conv_group=8, hidden_size=96)
        self.conv = GroupedConv(Loader(source, torch.device("cpu"), torch.float32), "", config)  # type: ignore[arg-type]
        weight = self.conv.projection(torch.eye(96)).T.contiguous().to(device)
        self.product, self.base = DenseProduct(weight, max_rows=16), self.conv.base.to(device)

    def truth(self, x: torch.Tensor, delta: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The convolution in front of a sublayer, and the one behind it, by the definition of spec/dflash2.md."""
        before, after = self.conv.coefficients(x.cpu(), BLOCK)
        return self.conv(x.cpu(), before).to(x.device), self.conv(delta.cpu(), after).to(x.device)


@pytest.mark.parametrize("taps", [1, 2, 3, 4])
def test_convolution_around_a_sublayer(device: torch.device, taps: int) -> None:
    """7 blocks of 4 rows: two launches of the product, whose scratch holds 16 rows."""
    torch.manual_seed(taps)
    c = Convolution(taps, device)
    x, delta, residual = (torch.randn(28, 96, device=device) for _ in range(3))
    truth, behind = c.truth(x, delta)
    padded = c.conv.padded
    assert grouped_conv.why_not_inside(c.product, padded) is None
    coefficients, out = nothing(28, c.product.weight.shape[0], like=x), nothing(28, 96, like=x)
    grouped_conv.convolve_in(x, c.product, c.base, padded, BLOCK, coefficients, out)
    near(out, truth)
    near(coefficients, c.conv.projection(x.cpu()).to(device), 1e-5)

    alone, mine = nothing(8, coefficients.shape[1], like=x), nothing(8, 96, like=x)
    grouped_conv.convolve_in(x[4:12], c.product, c.base, padded, BLOCK, alone, mine)
    assert torch.equal(mine, out[4:12]) and torch.equal(alone, coefficients[4:12])

    grouped_conv.convolve(x, coefficients, c.base, padded, BLOCK, out.fill_(float("nan")))
    near(out, truth)

    factor, summed = torch.rand(96, device=device) + 0.5, residual + behind
    for rows in (28, 21):
        after, h = residual.clone(), nothing(rows, 96, like=x)
        grouped_conv.convolve_out(delta, coefficients, c.base, padded, BLOCK, after, factor, EPS, h)
        near(after, summed)
        kept = summed if rows == 28 else summed.view(7, BLOCK, 96)[:, 1:].flatten(0, 1)
        near(h, rms_norm(kept, factor, EPS))


def test_convolution_names_why_it_stands_alone() -> None:
    assert "not the small dense one" in (grouped_conv.why_not_inside(None, 2) or "")
    product = DenseProduct(torch.zeros(32, 96))
    assert "whole groups of 32" in (grouped_conv.why_not_inside(product, 16) or "")


@pytest.mark.parametrize("rope", [32, 16])
def test_heads_are_turned_and_context_enters_the_ring(device: torch.device, rope: int) -> None:
    torch.manual_seed(3)
    layers, slots, heads, kv, dim, window = 2, 3, 4, 2, 32, 24
    inverse, factors = inverse_frequencies(rope, 1e4, device), torch.rand(heads + kv, dim, device=device) + 0.5
    qkv = torch.randn(2 * BLOCK, (heads + 2 * kv) * dim, device=device)
    positions = torch.tensor([5, 1000], device=device, dtype=torch.int32)
    q, k = nothing(2, BLOCK, heads, dim, like=qkv), nothing(2, BLOCK, kv, dim, like=qkv)
    ring.turn(qkv, factors, inverse, EPS, positions, q, k)
    at = (positions[:, None] + torch.arange(BLOCK, device=device)).flatten()
    qk = qkv[:, : (heads + kv) * dim].view(2 * BLOCK, heads + kv, dim)
    truth = apply_rope(plain_rms_norm(qk, factors, EPS), *rope_tables(at, inverse))
    near(torch.cat([q, k], 2).flatten(0, 1), truth, 1e-4)

    units = layers * kv
    rows, norms = torch.randn(3, 2 * units * dim, device=device), torch.rand(units, dim, device=device) + 0.5
    keys, values = (nothing(layers, slots, kv, window, dim, like=rows) for _ in range(2))
    at, to = (torch.tensor(x, device=device, dtype=torch.int32) for x in ([23, 24, 500], [0, 0, 2]))
    ring.enter(rows, norms, inverse, EPS, to, at, keys, values)
    k_rows, v_rows = rows.view(3, 2, units, dim).unbind(1)
    truth = apply_rope(plain_rms_norm(k_rows, norms, EPS), *rope_tables(at, inverse)).view(3, layers, kv, dim)
    lanes = at.long() % window
    near(keys[:, to.long(), :, lanes], truth, 1e-4)
    assert torch.equal(values[:, to.long(), :, lanes], v_rows.reshape(3, layers, kv, dim))
    assert keys.isnan().sum() == values.isnan().sum() == (slots * window - 3) * layers * kv * dim


@pytest.mark.parametrize(("mapped", "softcap", "count"), [(True, 0.0, 8), (False, 5.0, 16)])
def test_pair_scores(device: torch.device, mapped: bool, softcap: float, count: int) -> None:
    torch.manual_seed(4)
    requests, slots, rank, vocab = 2, 3, 24, 90
    books = tuple(torch.randn(vocab, rank, device=device) for _ in range(2))
    hidden, ids = torch.randn(requests * slots, rank, device=device), torch.randperm(vocab, device=device)[:40]
    places = torch.stack([torch.randperm(40, device=device)[:count] for _ in range(requests * slots)])
    values = torch.randn(requests * slots, count, device=device)
    packed = torch.full((requests * slots, width(count)), -7, dtype=torch.int32, device=device)
    packed[:, :count], packed[:, count : 2 * count] = places, values.view(torch.int32)
    values[4] = float("-inf")  # as of a row of NaN, which has no candidates
    packed[4, :count], packed[4, count : 2 * count] = -1, values[4].view(torch.int32)
    anchors = torch.tensor([11, 89], device=device, dtype=torch.int32)
    found = torch.full((requests, slots, count), -9, dtype=torch.int32, device=device)
    scores = torch.full((requests, slots, count, count), float("nan"), device=device)
    pair_scores(packed, ids if mapped else None, anchors, hidden, books, 1.5, softcap, found, scores)

    tokens = ids[places] if mapped else places
    tokens[4] = ids[0] if mapped else 0
    tokens = tokens.view(requests, slots, count)
    assert torch.equal(found.long(), tokens)
    unary = values.view(requests, slots, count) * 1.5
    unary = unary if softcap == 0 else softcap * torch.tanh(unary / softcap)
    model = SimpleNamespace(predecessors=books[0], successors=books[1], selector=lambda y: hidden)
    truth = DFlash2.edges(model, anchors.long(), hidden.view(requests, slots, rank), tokens, unary)  # type: ignore[arg-type]
    torch.testing.assert_close(scores, truth, rtol=1e-5, atol=1e-5)
