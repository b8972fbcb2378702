"""The CUDA C++ walk and fold against the Triton ones, and against each other bit for bit."""

import pytest
import torch
import torch.nn.functional as F

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

CHAIN = list(range(-1, 19))
TREE = [-1, 0, 1, 1, 0, 4, 5, 4, 0]
PARENT = [*CHAIN, *(p if p < 0 else p + len(CHAIN) for p in TREE)]
ROWS, REQUESTS = len(PARENT), 3


def ints(values: list[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device="cuda")


def near(a: torch.Tensor, b: torch.Tensor, bound: float) -> None:
    assert torch.isfinite(a.float()).all()
    assert (a.float() - b.float()).norm() <= bound * b.float().norm()


@pytest.mark.parametrize(
    ("hk", "hv", "dim", "state", "act"),
    [
        (16, 48, 128, torch.float16, "silu"),
        (16, 48, 128, torch.float32, "sigmoid"),
        (2, 4, 32, torch.float32, "silu"),
        (2, 4, 64, torch.bfloat16, "silu"),
        (2, 4, 64, torch.float16, "sigmoid"),
        (2, 4, 32, torch.float16, "silu"),
    ],
)
def test_walk_norm_and_fold(hk: int, hv: int, dim: int, state: torch.dtype, act: str) -> None:
    from soloist.ops.delta_cuda import Recurrence
    from soloist.ops.triton import delta

    torch.manual_seed(hv + dim)

    def full(*shape: int) -> torch.Tensor:
        return torch.full(shape, float("nan"), device="cuda")

    q, k = (F.normalize(torch.randn(ROWS, hk, dim, device="cuda"), dim=-1) for _ in range(2))
    gates = torch.rand(2, ROWS, hv, device="cuda")
    record = (q * dim**-0.5, k, torch.randn(ROWS, hv, dim, device="cuda"), 0.7 + 0.3 * gates[0], gates[1])
    states = (torch.randn(4, hv, dim, dim, device="cuda") * 0.3).to(state)
    keep, entries = [0] * ROWS, 0
    for row, above in enumerate(PARENT):
        if above >= 0 and above != row - 1 and keep[above] == 0:
            entries += 1
            keep[above] = entries
    ends = {19: entries + 1, 25: entries + 2}  # where the kept state is what a fold along the path must give
    for row, entry in ends.items():
        keep[row] = entry
    table = {"slots": ints([2, 0, 3]), "starts": ints([0, 20, 0]), "counts": ints([20, 9, 0])}
    table |= {"parent": ints(PARENT), "keep": ints(keep)}
    z = torch.randn(ROWS, hv * dim + 64, device="cuda").bfloat16()[:, 64:]
    weight = torch.rand(dim, device="cuda") + 0.5

    out, scratch = full(ROWS, hv, dim), full(entries + 3, hv, dim, dim)
    truth = full(ROWS, hv * dim).bfloat16()
    delta.walk(states, record, out, scratch, *(table[n] for n in ("slots", "starts", "counts", "parent", "keep")))
    delta.gated_norm(out, z, weight, 1e-6, act, truth)
    recurrence = Recurrence(hk, hv, dim, dim, act, torch.device("cuda"), REQUESTS)
    seen = []
    for _ in range(2):
        walked, kept, mixed = full(ROWS, hv, dim), full(entries + 3, hv, dim, dim), truth.new_full(truth.shape, 7.0)
        recurrence.walk(states, record, walked, kept, table, z, weight, 1e-6, mixed)
        near(walked, out, 1e-3 if state is not torch.float32 else 1e-5)
        near(mixed, truth, 5e-3)
        seen.append((walked, mixed))
    assert torch.equal(seen[0][0], seen[1][0]) and torch.equal(seen[0][1], seen[1][1])

    paths = {0: list(range(20)), 1: [20, 24, 25]}
    path = torch.zeros(REQUESTS, 32, dtype=torch.int32, device="cuda")
    for request, rows in paths.items():
        path[request, : len(rows)] = ints(rows)
    layered = [record[0], *(a[None] for a in record[1:])]
    folded = states.clone()[None]
    recurrence.fold(folded, layered, path, ints([20, 3, 0]), table["slots"])
    entry_of = kept.view(-1).view(state)[: kept.shape[0] * hv * dim * dim].view(kept.shape)
    assert torch.equal(folded[0, 2], entry_of[ends[19]]) and torch.equal(folded[0, 0], entry_of[ends[25]])
    assert torch.equal(folded[0, 1], states[1]) and torch.equal(folded[0, 3], states[3])
    single = states.clone()[None]
    for row in paths[0]:
        path[0, 0] = row
        recurrence.fold(single, layered, path, ints([1, 0, 0]), table["slots"])
    assert torch.equal(single[0, 2], folded[0, 2])
