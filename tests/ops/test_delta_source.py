"""The CUDA C++ walk and fold (`cuda/delta.cu`), run on the CPU, against the reference and each other bit for bit."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import cuda_on_host
from soloist.ops import delta_cuda
from soloist.ops.gated_delta import DeltaInputs, delta_step

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")

SOURCE = Path(delta_cuda.__file__).parent / "cuda/delta.cu"
CHAIN = list(range(-1, 18))
TREE = [-1, 0, 1, 1, 0, 4, 5, 4, 0, *range(8, 15), 3, 16, -1, 18]  # branches, one across a chunk, and a second root
PARENT = [*CHAIN, *(p if p < 0 else p + len(CHAIN) for p in TREE), -1]
STARTS, COUNTS, SLOTS = [0, len(CHAIN), 0, len(PARENT) - 1], [len(CHAIN), len(TREE), 0, 1], [2, 0, 3, 4]
ROWS, REQUESTS, LAYERS = len(PARENT), 4, 2


def ints(values: list[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def poisoned(*shape: int) -> torch.Tensor:
    return torch.full(shape, float("nan"))


class OnHost:
    """`delta_cuda.Recurrence` with both kernels compiled for the CPU; blocks run in a random order."""

    def __init__(self, hk: int, hv: int, dk: int, dv: int, state: torch.dtype, sigmoid: int, directory: Path) -> None:
        shape = {"HK": hk, "HV": hv, "DK": dk, "DV": dv, "STATE": delta_cuda.STATES[state]}
        shape |= {"SIGMOID": sigmoid, "PDL": 0}
        self.libraries = [
            cuda_on_host.compile_kernel(SOURCE, "delta", shape | {"FOLD": fold}, directory / str(fold))
            for fold in (0, 1)
        ]
        self.blocks, self.threads = hv * dv // delta_cuda.columns(dv), delta_cuda.threads(dv)
        self.arrivals = torch.zeros(REQUESTS * hv, dtype=torch.int32)

    def walk(self, states, record, walked, scratch, table, z, norm, eps, mixed, seed=0) -> None:  # type: ignore[no-untyped-def]
        requests = table["slots"].numel()
        arguments = delta_cuda.walk_arguments(
            states, record, walked, scratch, table, z, norm, eps, mixed, self.arrivals
        )
        cuda_on_host.launch(
            self.libraries[0], self.blocks * requests, self.threads, arguments, delta_cuda.SIGNATURE, seed
        )
        assert not self.arrivals.any()

    def fold(self, states, record, path, lengths, slots, seed=0) -> None:  # type: ignore[no-untyped-def]
        grid = self.blocks * slots.numel() * states.shape[0]
        arguments = delta_cuda.fold_arguments(states, record, path, lengths, slots)
        cuda_on_host.launch(self.libraries[1], grid, self.threads, arguments, delta_cuda.SIGNATURE, seed)


def reference(states, record, hv, dtype):  # type: ignore[no-untyped-def]
    """o and the state after every row, row by row from the parent's state."""
    q, k, v, decay, beta = record
    repeat = hv // q.shape[1]
    x = DeltaInputs(q.repeat_interleave(repeat, 1), k.repeat_interleave(repeat, 1), v, decay, beta)
    out, after = torch.empty_like(v), {}
    for start, count, slot in zip(STARTS, COUNTS, SLOTS, strict=True):
        for row in range(start, start + count):
            before = states[slot].float() if PARENT[row] < 0 else after[PARENT[row]]
            o, after[row] = delta_step(before[None].clone(), x.rows(torch.tensor([row])), dtype)
            out[row], after[row] = o[0], after[row][0]
    return out, after


def gated(out, z, weight, eps, sigmoid):  # type: ignore[no-untyped-def]
    scaled = out * torch.rsqrt(out.square().mean(-1, keepdim=True) + eps) * weight
    gate = z.float().view(out.shape)
    return (scaled * (torch.sigmoid(gate) if sigmoid else F.silu(gate))).flatten(1)


def near(a: torch.Tensor, b: torch.Tensor, bound: float) -> None:
    assert torch.isfinite(a.float()).all()
    error = float((a.float() - b.float()).norm() / b.float().norm())
    assert error <= bound, error


@pytest.mark.parametrize(
    ("hk", "hv", "dk", "dv", "state", "sigmoid"),
    [
        (1, 2, 128, 128, torch.float16, 0),
        (2, 4, 32, 64, torch.float16, 1),
        pytest.param(1, 1, 48, 32, torch.float16, 0, marks=pytest.mark.slow),
        (1, 2, 64, 128, torch.float32, 0),
        (2, 2, 32, 32, torch.float32, 1),
        pytest.param(2, 4, 64, 64, torch.bfloat16, 0, marks=pytest.mark.slow),
    ],
)
def test_source(hk: int, hv: int, dk: int, dv: int, state: torch.dtype, sigmoid: int, tmp_path: Path) -> None:
    torch.manual_seed(dk + dv)
    q, k = (F.normalize(torch.randn(LAYERS, ROWS, hk, dk), dim=-1) for _ in range(2))
    gates = torch.rand(2, LAYERS, ROWS, hv)
    layered = (q * dk**-0.5, k, torch.randn(LAYERS, ROWS, hv, dv), 0.7 + 0.3 * gates[0], gates[1])
    states = (torch.randn(LAYERS, 5, hv, dk, dv) * 0.3).to(state)
    keep, entries = [0] * ROWS, 0
    for row, above in enumerate(PARENT):
        if above >= 0 and above != row - 1 and keep[above] == 0:
            entries += 1
            keep[above] = entries
    paths = {0: list(range(COUNTS[0])), 1: [STARTS[1] + r for r in (0, 4, 5, 6)], 3: [STARTS[3]]}
    for rows in paths.values():
        if keep[rows[-1]] == 0:
            entries += 1
            keep[rows[-1]] = entries
    table = {"slots": ints(SLOTS), "starts": ints(STARTS), "counts": ints(COUNTS)}
    table |= {"parent": ints(PARENT), "keep": ints(keep)}
    z = torch.randn(ROWS, hv * dv + 64).bfloat16()[:, 64:]
    weight = torch.rand(dv) + 0.5
    kernel = OnHost(hk, hv, dk, dv, state, sigmoid, tmp_path)

    kept_of = []
    for layer in range(LAYERS):
        record = tuple(a[layer].contiguous() for a in layered)
        walked, mixed = poisoned(ROWS, hv, dv), poisoned(ROWS, hv * dv).bfloat16()
        kept = poisoned(entries + 1, hv, dk, dv).to(state)
        kernel.walk(states[layer], record, walked, kept, table, z, weight, 1e-6, mixed, layer)
        out, after = reference(states[layer], record, hv, state)
        bound = {torch.float32: 1e-6, torch.float16: 1e-4, torch.bfloat16: 1e-3}[state]
        near(walked, out, bound)
        near(mixed, gated(out, z, weight, 1e-6, sigmoid), 4e-3)
        for row, entry in enumerate(keep):
            if entry:
                near(kept[entry], after[row], bound)
        kept_of.append(kept)

        alone = {"slots": ints([4]), "starts": ints([0]), "counts": ints([1]), "parent": ints([-1]), "keep": ints([0])}
        row = STARTS[3]
        lone, lone_mixed = poisoned(1, hv, dv), poisoned(1, hv * dv).bfloat16()
        single = tuple(a[row : row + 1].contiguous() for a in record)
        kernel.walk(states[layer], single, lone, kept, alone, z[row : row + 1], weight, 1e-6, lone_mixed, 7)
        assert torch.equal(lone[0], walked[row]) and torch.equal(lone_mixed[0], mixed[row])

    path = torch.zeros(REQUESTS, 32, dtype=torch.int32)
    for request, rows in paths.items():
        path[request, : len(rows)] = ints(rows)
    lengths = ints([len(paths.get(r, [])) for r in range(REQUESTS)])
    record = (layered[0][0], *layered[1:])
    folded, single = states.clone(), states.clone()
    kernel.fold(folded, record, path, lengths, table["slots"])
    for layer in range(LAYERS):
        for request, rows in paths.items():
            assert torch.equal(folded[layer, SLOTS[request]], kept_of[layer][keep[rows[-1]]])
        for slot in set(range(5)) - {SLOTS[r] for r in paths}:
            assert torch.equal(folded[layer, slot], states[layer, slot])
    for row in paths[1]:  # one at a time, as steps of one row would
        path[1, 0] = row
        kernel.fold(single, record, path, ints([0, 1, 0, 0]), table["slots"])
    assert torch.equal(single[:, SLOTS[1]], folded[:, SLOTS[1]])
