"""Kernels of the verify step over forests of rows, against the references in ops/ and models/."""

import pytest
import torch

from soloist.cache.pages import PAGE
from soloist.models.card import CardShapes, Paths, Tables
from soloist.models.state import AcceptedPath
from soloist.models.step import RequestRows, VerifyStep, token_rows, verify_step
from soloist.ops import attention as reference_attention
from soloist.ops.conv import ancestor_conv
from soloist.ops.gated_delta import DeltaInputs, delta_step, walk
from soloist.ops.linear_cuda import Squares
from soloist.ops.norms import gated_rms_norm, l2_normalise
from soloist.ops.stored_rows import StoredRows
from soloist.ops.triton import attention, delta, gates
from soloist.ops.triton.dense import DenseProduct

TAPS = 4
CHAIN = [-1, 0, 1, 2, 3]
TREE = [-1, 0, 1, 1, 0, 4, 5, 4, 0]


def near(a: torch.Tensor, b: torch.Tensor, bound: float) -> None:
    a, b = a.cpu(), b.cpu()
    assert torch.isfinite(a).all()
    error = (a.double() - b.double()).norm() / b.double().norm()
    assert error <= bound, f"relative error {error:.2e}, max {(a.double() - b.double()).abs().max():.2e}"


def poison(*shape: int, device: torch.device) -> torch.Tensor:
    return torch.full(shape, float("nan"), device=device)


class Rig:
    """Two requests, a chain and a tree, with scattered pages and slots."""

    def __init__(self, settled: tuple[int, int], device: torch.device) -> None:
        pages = torch.randperm(20).tolist()
        owned = (pages[:10], pages[10:])
        self.batch = [
            RequestRows([1] * len(CHAIN), CHAIN, settled[0], 2, owned[0]),
            RequestRows([1] * len(TREE), TREE, settled[1], 0, owned[1]),
        ]
        self.step: VerifyStep = verify_step(self.batch, TAPS)
        self.shapes = CardShapes(rows=24, requests=3, pages=10, branches=8, splits=200)
        self.tables = Tables(self.shapes, TAPS, device)
        self.tables.fill(self.step, self.step.rows)
        self.card = self.tables.card
        self.device = device


@pytest.mark.parametrize(
    ("settled", "scale"),
    [((0, 0), 0.125), ((63, 130), 0.125), ((256, 300), 0.125), ((511, 255), 0.125), ((300, 515), 0.1)],
)
def test_attention_over_pages_and_ancestors(device: torch.device, settled: tuple[int, int], scale: float) -> None:
    torch.manual_seed(1)
    rig, heads, kv, dim = Rig(settled, device), 6, 2, 64
    rows = rig.step.rows
    q, k, v = (torch.randn(rows, h, dim, device=device) for h in (heads, kv, kv))
    keys, values = (torch.randn(20 * PAGE, kv, dim, device=device) for _ in range(2))
    qkv = torch.randn(rows, 2 * (heads + kv) * dim, device=device)
    partials = attention.Partials.allocate(rig.shapes.splits, heads, dim, device)
    for part in (partials.acc, partials.top, partials.total):
        part.fill_(float("nan"))
    table = {n: t[:rows] if n in ("positions", "request", "parts", "lanes") else t for n, t in rig.card.items()}
    out = attention.verify_attention(
        q, k, v, keys, values, table, partials, qkv, poison(rows, heads * dim, device=device), scale
    )
    past = []
    for part in rig.batch:
        index = token_rows(part.pages, part.settled)
        past.append((keys.cpu()[index], values.cpu()[index]))
    truth = reference_attention.verify_attention(q.cpu(), k.cpu(), v.cpu(), past, rig.step.attention, scale)
    gate = qkv.cpu()[:, : 2 * heads * dim].view(rows, heads, 2 * dim)[..., dim:]
    # A card's fp32 dot is tf32 here; the interpreter's is exact.
    near(out.view(rows, heads, dim), truth * torch.sigmoid(gate), 2e-3 if device.type == "cuda" else 2e-5)


def inputs(rig: Rig, hk: int, hv: int, dk: int, dv: int) -> dict[str, torch.Tensor]:
    rows, channels = rig.step.rows, 2 * hk * dk + hv * dv
    make = lambda *shape: torch.randn(*shape, device=rig.device)  # noqa: E731
    return {
        "u": make(rows, channels + hv * dv),
        "ba": make(rows, 2 * 8),
        "conv": make(3, TAPS - 1, channels),
        "weight": make(TAPS, channels),
        "negative_a": -torch.rand(8, device=rig.device) - 0.1,
        "dt_bias": make(8),
        "states": make(3, hv, dk, dv),
    }


@pytest.mark.parametrize("state_dtype", [torch.float32, torch.float16])
def test_delta_rule_along_the_forest_and_its_fold(device: torch.device, state_dtype: torch.dtype) -> None:
    torch.manual_seed(2)
    hk, hv, dk, dv = 2, 4, 32, 32
    rig = Rig((70, 5), device)
    x, rows, width = inputs(rig, hk, hv, dk, dv), rig.step.rows, 2 * hk * dk
    record = tuple(
        poison(*s, device=device) for s in ((rows, hk, dk), (rows, hk, dk), (rows, hv, dv), (rows, hv), (rows, hv))
    )
    channels = width + hv * dv
    t = rig.card
    delta.prepare(
        x["u"], x["ba"], x["conv"], t["taps"][:rows], t["request"][:rows], t["slots"], x["weight"], x["negative_a"],
        x["dt_bias"], record,
    )  # fmt: skip
    history = x["conv"][rig.step.slots].flatten(0, 1)
    y = ancestor_conv(torch.cat([history, x["u"][:, :channels]]), rig.step.taps.to(device), x["weight"])
    scale = torch.ones(2 * hk, 1, device=device)
    scale[:hk] = dk**-0.5
    qk = l2_normalise(y[:, :width].view(rows, 2 * hk, dk), scale)
    near(record[0], qk[:, :hk], 1e-5)
    near(record[1], qk[:, hk:], 1e-5)
    near(record[2], y[:, width:].view(rows, hv, dv), 1e-5)
    g = torch.nn.functional.softplus(x["ba"][:, 8:] + x["dt_bias"]) * x["negative_a"]
    near(record[3], g[:, :hv].exp(), 1e-5)
    near(record[4], torch.sigmoid(x["ba"][:, :hv]), 1e-5)

    states = x["states"].to(state_dtype)
    expand = lambda a: a.repeat_interleave(hv // hk, 1)  # noqa: E731
    consumed = DeltaInputs(*(expand(a).cpu() for a in record[:2]), *(a.cpu() for a in record[2:]))
    truth, _ = walk(states.cpu()[rig.step.slots].float(), consumed, rig.step.levels, state_dtype)
    out = poison(rows, hv, dv, device=device)
    scratch = poison(rig.shapes.branches + 1, hv, dk, dv, device=device)
    delta.walk(states, record, out, scratch, t["slots"], t["starts"], t["counts"], t["parent"], t["keep"])
    near(out, truth, 1e-3 if state_dtype is torch.float16 else 1e-5)

    paths = [AcceptedPath(0, [0, 1, 2], (), 70), AcceptedPath(1, [5, 9, 10], (), 5)]
    path, lengths = Paths(rig.shapes, device).fill(paths)
    layered = tuple(a if i == 0 else a.unsqueeze(0) for i, a in enumerate(record))
    folded, conv = states.clone()[None], x["conv"].clone()[None]
    delta.fold(folded, conv, layered, x["u"][None], t["taps"], path, lengths, t["slots"])
    for p in paths:
        slot = int(rig.step.slots[p.request])
        state = states[slot : slot + 1].float().cpu()
        for row in p.rows:
            delta_step(state, consumed.rows(torch.tensor([row])), state_dtype)
        near(folded[0, slot].float(), state[0], 1e-3 if state_dtype is torch.float16 else 1e-5)
        columns = torch.cat([history, x["u"][:, :channels]])[rig.step.taps[p.rows[-1], 1:]]
        assert torch.equal(conv[0, slot], columns)
    assert torch.equal(folded[0, 1], states[1])


@pytest.mark.parametrize("rooted", [False, True])
def test_gates_beside_the_convolution(device: torch.device, rooted: bool) -> None:
    torch.manual_seed(4)
    hk, hv, dk, dv, hidden = 2, 4, 32, 32, 1024
    rig = Rig((70, 5), device)
    dot = torch.bfloat16 if device.type == "cuda" else torch.float32
    x, rows = inputs(rig, hk, hv, dk, dv), rig.step.rows
    h, weight = torch.randn(rows, hidden, device=device).to(dot), torch.randn(16, hidden, device=device).to(dot) / 32
    sums = torch.rand(rig.shapes.rows, 16, device=device) * hidden / 4
    root = torch.rsqrt(sums[:rows].sum(1) / hidden + 1e-6)[:, None] if rooted else 1.0
    shapes = ((rows, hk, dk), (rows, hk, dk), (rows, hv, dv), (rows, hv), (rows, hv))
    found, truth = (tuple(poison(*s, device=device) for s in shapes) for _ in range(2))
    t = rig.card
    rest = (x["conv"], t["taps"][:rows], t["request"][:rows], t["slots"], x["weight"], x["negative_a"], x["dt_bias"])
    ba = (h.float() @ weight.float().T * root).to(dot)
    delta.prepare(x["u"], ba, *rest, truth)
    squares = Squares(sums, hidden, 1e-6) if rooted else None
    gates.prepare_gates(h, squares, DenseProduct(weight), x["u"], *rest, found)
    for a, b in zip(found[:3], truth[:3], strict=True):
        assert torch.equal(a, b)
    for a, b in zip(found[3:], truth[3:], strict=True):
        near(a, b, 1e-2 if device.type == "cuda" else 1e-5)


def test_gated_norm(device: torch.device) -> None:
    o, z, weight = (torch.randn(*s, device=device) for s in ((5, 3, 32), (5, 3 * 32 + 7), (32,)))
    for act in ("silu", "sigmoid"):
        y = delta.gated_norm(o, z[:, 7:], weight, 1e-6, act, poison(5, 96, device=device))
        near(y.view(5, 3, 32), gated_rms_norm(o, weight, z[:, 7:].reshape(5, 3, 32), 1e-6, act), 1e-5)


def test_accepted_rows_are_settled_at_consecutive_positions(device: torch.device) -> None:
    rig, kv, dim = Rig((62, 127), device), 2, 32
    rows = rig.step.rows
    k, v = (torch.randn(2, rows, kv, dim, device=device) for _ in range(2))
    keys, values = (torch.zeros(2, 20 * PAGE, kv, dim, device=device) for _ in range(2))
    paths = [AcceptedPath(0, [0, 1, 2], (), 62), AcceptedPath(1, [5, 9], (), 127)]
    path, lengths = Paths(rig.shapes, device).fill(paths)
    moved = (StoredRows(k), StoredRows(v)), (StoredRows(keys), StoredRows(values))
    attention.settle_kv(*moved, path, lengths, rig.card["settled"], rig.card["page_table"])
    written = torch.zeros(20 * PAGE, dtype=torch.bool)
    for p, part in zip(paths, rig.batch, strict=True):
        index = token_rows(part.pages, part.settled + len(p.rows))[part.settled :]
        written[index] = True
        for layer in range(2):
            assert torch.equal(keys[layer, index], k[layer, p.rows]) and torch.equal(
                values[layer, index], v[layer, p.rows]
            )
    assert not keys[:, ~written].any()
