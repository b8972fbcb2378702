"""Prompt kernels against the references, and against themselves cut at a grid point."""

import pytest
import torch

from soloist.ops import attention, conv, gated_delta, norms
from soloist.ops.triton import conv as conv_kernel
from soloist.ops.triton import delta_prefill, prefill
from soloist.ops.triton.norms import norm

CARD = torch.cuda.is_available()
DOT = torch.bfloat16 if CARD else torch.float32


def near(a: torch.Tensor, b: torch.Tensor, bound: float) -> None:
    a, b = a.cpu(), b.cpu()
    assert torch.isfinite(a).all()
    error = (a.double() - b.double()).norm() / b.double().norm()
    assert error <= bound, f"relative error {error:.2e}, max {(a.double() - b.double()).abs().max():.2e}"


@pytest.mark.parametrize("start", [0, 64, 192])
def test_attention(device: torch.device, start: int) -> None:
    torch.manual_seed(start)
    heads, kv, dim, tokens = 4, 2, 32, 128
    q = torch.randn(tokens, heads, dim, device=device).to(DOT)
    keys, values = (torch.randn(start + tokens, kv, dim, device=device).to(DOT) for _ in range(2))
    o = prefill.prefill_attention(q, keys, values, start, 64, dim**-0.5)
    truth = attention.prefill_attention(q.cpu().float(), keys.cpu().float(), values.cpu().float(), start, 64, dim**-0.5)
    near(o, truth, 6e-3 if CARD else 1e-5)
    second = prefill.prefill_attention(q[64:], keys, values, start + 64, 64, dim**-0.5)
    assert torch.equal(second, o[64:])


@pytest.mark.parametrize("state_dtype", [torch.float32, torch.float16])
def test_chunks(device: torch.device, state_dtype: torch.dtype) -> None:
    torch.manual_seed(5)
    heads, dk, dv, tokens = 2, 32, 32, 192
    q, k = (torch.nn.functional.normalize(torch.randn(tokens, heads, dk, device=device), dim=-1) for _ in range(2))
    # Keys that resemble each other make the triangular solve badly conditioned for anything but substitution.
    k[64:128] = torch.nn.functional.normalize(k[64:128] * 0.1 + k[64:65], dim=-1)
    v = torch.randn(tokens, heads, dv, device=device)
    g = -torch.rand(tokens, heads, device=device) * 0.1
    beta = torch.rand(tokens, heads, device=device)
    g[-10:], beta[-10:] = 0.0, 0.0
    state = torch.randn(heads, dk, dv, device=device).to(state_dtype).float()
    o, after = delta_prefill.chunk_scan(state, q, k, v, g, beta, state_dtype)
    parts = [t.cpu() for t in (state, q, k, v, g, beta)]
    truth, settled = gated_delta.chunk_scan(*parts, state_dtype)
    # A card multiplies in tf32 here; the interpreter in fp32.
    bound = 3e-3 if CARD or state_dtype is torch.float16 else 2e-5
    near(o, truth, bound)
    near(after, settled, bound)
    # Token by token, in double precision.
    s, exact = parts[0].double(), []
    for t in range(tokens):
        qt, kt, vt = (parts[i][t].double() for i in (1, 2, 3))
        s = s * parts[4][t].double().exp()[:, None, None]
        d = (vt - (kt[:, None] @ s).squeeze(1)) * parts[5][t].double()[:, None]
        s = s + kt[:, :, None] * d[:, None]
        exact.append((qt[:, None] @ s).squeeze(1))
    if state_dtype is torch.float32:
        near(o, torch.stack(exact), bound)
    first, middle = delta_prefill.chunk_scan(state, q[:64], k[:64], v[:64], g[:64], beta[:64], state_dtype)
    rest, end = delta_prefill.chunk_scan(middle, q[64:], k[64:], v[64:], g[64:], beta[64:], state_dtype)
    assert torch.equal(torch.cat([first, rest]), o) and torch.equal(end, after)


def test_norms(device: torch.device) -> None:
    x, gate = (torch.randn(3, 4, 48, device=device) for _ in range(2))
    wide, narrow = torch.rand(4, 48, device=device) + 0.5, torch.rand(48, device=device) + 0.5
    scale = torch.rand(4, 1, device=device)
    for factor in (wide, narrow):
        near(norm(x, factor, 1e-6), norms.rms_norm(x.cpu(), factor.cpu(), 1e-6), 1e-6)
        near(norm(x, factor, 1e-6, plain=True), norms.plain_rms_norm(x.cpu(), factor.cpu(), 1e-6), 1e-6)
    for act in ("silu", "sigmoid"):
        truth = norms.gated_rms_norm(x.cpu(), narrow.cpu(), gate.cpu(), 1e-6, act)
        near(norm(x, narrow, 1e-6, gate=gate, act=act), truth, 1e-6)
    truth = norms.l2_normalise(x.cpu(), scale.cpu())
    near(norm(x, scale.expand(-1, 48), 1e-6, mean=False), truth, 1e-6)
    assert torch.equal(norm(x[1:2], wide, 1e-6), norm(x, wide, 1e-6)[1:2])


def test_causal_conv(device: torch.device) -> None:
    wide = torch.randn(9, 1100, device=device)
    rows, history = wide[:, :1030], torch.randn(3, 1030, device=device)
    weight = torch.randn(4, 1030, device=device)
    y = conv_kernel.causal_conv(rows, history, weight)
    near(y, conv.causal_conv(rows.cpu(), history.cpu(), weight.cpu()), 1e-6)
    later = conv_kernel.causal_conv(rows[5:], rows[2:5], weight)
    assert torch.equal(later, y[5:])
