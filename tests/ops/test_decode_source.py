"""The decode product's source (`cuda/w4a16.cu`) on the CPU, behind its real caller: its deal, its sharing, its bits."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import cast

import pytest
import torch

from products_on_host import Host, holds_in_child
from soloist.ops.cuda import nvrtc
from soloist.ops.linear import QuantizedWeight
from soloist.ops.linear_cuda import ROW_TILES, TILE_N, Residual, Squares, W4Product, Workspace, pack, parts_of

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")

LIMITS = {80: 166912, 86: 101376, 90: 232448}  # shared memory of an A100, an RTX 3090 and an H100
ARCHS = {False: (86, 90), True: (80, 90)}  # the roads before sm_90 and since, without and with zero points
EPS = 0.25


@dataclass(frozen=True)
class Case:
    """N of a paired weight counts both halves. `zeros`: explicit zero points and bf16 scales, else fp16 scales."""

    n: int
    k: int
    group: int
    ctas: int
    rows: int
    zeros: bool = False
    epilogue: int = 0
    squares: bool = False

    def __str__(self) -> str:
        return f"{self.n}x{self.k} by {self.ctas}"

    @property
    def paired(self) -> bool:
        return self.epilogue in (1, 2)

    @property
    def tiles(self) -> int:
        return -(-self.n // 2 // (TILE_N // 2)) if self.paired else -(-self.n // TILE_N)


CASES = [
    Case(256, 320, 64, 13, 1),
    Case(256, 1664, 128, 13, 9, zeros=True, epilogue=3),
    Case(700, 640, 128, 5, 17),
    Case(1700, 192, 64, 3, 5, zeros=True, squares=True),
    Case(300, 1536, 256, 1, 8),
    Case(400, 640, 128, 3, 12, epilogue=2, squares=True),
    Case(272, 640, 64, 7, 20, zeros=True, epilogue=1),
    Case(512, 832, 64, 7, 3, epilogue=3, squares=True),
    Case(512, 3136, 64, 4, 2),
    Case(2304, 1984, 64, 11, 1),
    Case(6400, 384, 64, 3, 3, zeros=True, epilogue=3, squares=True),
    Case(256, 768, 256, 3, 32, epilogue=3),
    Case(512, 512, 128, 8, 20, zeros=True, epilogue=2, squares=True),
    Case(296, 1024, 512, 2, 40, epilogue=3, squares=True),
]
CHAIN = [
    Case(512, 832, 64, 7, 5, epilogue=3),
    Case(512, 512, 64, 7, 5, epilogue=2, squares=True),
    Case(512, 256, 64, 7, 5, epilogue=3),
]
SEEDS = range(1, 5)
LONE = [Case(512, 3136, 64, 4, 2), Case(2304, 1984, 64, 11, 1)]
# What the source must not do without: (text, what stands in its place).
FAULTS = [
    ("barrier_wait(full + slot * 16, parity);", ""),
    ("barrier_wait(empty + old * 16, parity ^ (slot == 0));", ""),
    ("while (count_acquire(arrivals + with.tile) < with.parts());", ""),
    ("__syncthreads();\n        segment = tile * per_tile + last;", "segment = tile * per_tile + last;"),
    ("return gathered ? parts() + 1 : 2 * parts();", "return parts();"),
    ("(u64)(u32)(cta * 2 + !continued) * PART_CELLS", "(u64)(u32)(cta * 2) * PART_CELLS"),
    ("unit < begin(cta) ? cta - 1 : unit >= begin(cta + 1) ? cta + 1 : cta", "cta"),
    ("if (!rooted) wait_copies();", ""),
    ("    wait_for_grid();\n", ""),
]


def runs(case: Case) -> tuple[list[int], list[int]]:
    """Where runs would begin in equal shares, and where they do: at the edge of a tile if that is near."""
    per_tile = case.k // 64
    length, extra = divmod(case.tiles * per_tile, case.ctas)
    equal = [c * length + min(c, extra) for c in range(case.ctas + 1)]
    edges = [(at + per_tile // 2) // per_tile * per_tile for at in equal]
    near = min(3, length // 24)
    return equal, [edge if abs(edge - at) <= near else at for at, edge in zip(equal, edges, strict=True)]


def features(case: Case) -> set[str]:
    """What the deal of a product makes its CTAs go through."""
    equal, begin = runs(case)
    per_tile, found = case.k // 64, set()
    sharing: list[set[int]] = [set() for _ in range(case.tiles)]
    for cta in range(case.ctas):
        for unit in range(begin[cta], begin[cta + 1]):
            sharing[unit // per_tile].add(cta)
    for cta in range(case.ctas):
        first, end = begin[cta], begin[cta + 1]
        touched = [t for t in range(case.tiles) if cta in sharing[t]]
        if first != equal[cta]:
            found.add("snapped on" if first > equal[cta] else "snapped back")
        found.add(f"{min(3, len(touched))} segments")
        for unit in {t * per_tile for t in touched} | {(t + 1) * per_tile - 1 for t in touched}:
            shared = len(sharing[unit // per_tile]) > 1
            if shared and first <= unit < end and not equal[cta] <= unit < equal[cta + 1]:
                found.add("an end of a shared tile dealt " + ("on" if unit < equal[cta] else "back"))
        if len(touched) == 1 and first % per_tile and end % per_tile:
            found.add("inside a tile")
        if len(touched) > 1 and len(sharing[touched[0]]) > 3 and len(sharing[touched[-1]]) > 3:
            found.add("two tiles shared out")
    return found | {f"{min(9, len(s))} CTAs a tile" for s in sharing}


def test_the_cases_meet_all_ways_of_sharing() -> None:
    found = set().union(*map(features, CASES))
    assert found >= {f"{count} CTAs a tile" for count in (1, 2, 3, 4, 9)} | {f"{count} segments" for count in range(4)}
    assert found >= {f"an end of a shared tile dealt {way}" for way in ("on", "back")}
    assert found >= {"snapped on", "snapped back", "inside a tile", "two tiles shared out"}


def weight_of(case: Case, exact: bool) -> QuantizedWeight:
    """Random codes. `exact`: scales are powers of two, so that with `rows_of` no sum is rounded, whatever its order.

    Else the last groups are the first ones with the other sign: with `rows_of` sums cancel, and any other order shows.
    """
    g = torch.Generator().manual_seed(case.n + case.k)
    shape = case.n, case.k // case.group
    words = torch.randint(-(2**31), 2**31 - 1, (case.n, case.k // 8), dtype=torch.int32, generator=g)
    if exact:
        scales = torch.exp2(-torch.randint(2, 5, shape, generator=g)) * (
            torch.randint(0, 2, shape, generator=g) * 2 - 1
        )
    else:
        scales = torch.randn(*shape, generator=g) * 0.1
    zeros = torch.randint(0, 16, shape, dtype=torch.uint8, generator=g) if case.zeros else None
    if not exact:
        half = shape[1] // 2
        scales[:, shape[1] - half :] = -scales[:, :half]
        words[:, (case.k - half * case.group) // 8 :] = words[:, : half * case.group // 8]
        if zeros is not None:
            zeros[:, shape[1] - half :] = zeros[:, :half]
    return QuantizedWeight(
        words, scales.to(torch.bfloat16 if case.zeros else torch.float16), zeros, 4, case.group, (case.n, case.k)
    )


@dataclass(frozen=True)
class Rows:
    """Inputs by row: x [M, K] bf16, sums of squares fp32 [M, `parts_of(K)`], what a product is added to [M, N] bf16."""

    x: torch.Tensor
    sums: torch.Tensor
    residual: torch.Tensor

    def only(self, row: int) -> Rows:
        return Rows(*(t[row : row + 1] for t in (self.x, self.sums, self.residual)))


def rows_of(case: Case, exact: bool) -> Rows:
    """`exact`: small multiples of 1/16, and sums of squares that make a root of 1, 1/2 or 1/4."""
    g = torch.Generator().manual_seed(case.rows)
    parts = parts_of(case.k)
    if exact:
        x = torch.randint(-3, 4, (case.rows, case.k), generator=g) / 16
        total = ((4.0 ** torch.randint(0, 3, (case.rows, 1), generator=g) - EPS) * case.k).long()
        sums = (total // parts + (torch.arange(parts) < total % parts)).float()
    else:
        x, sums = torch.randn(case.rows, case.k, generator=g).bfloat16(), torch.rand(case.rows, parts, generator=g) * 64
        half = case.k // case.group // 2 * case.group
        x[:, half : case.k - half] = 0
        x[:, case.k - half :] = x[:, :half]
        x[:, 0] *= 1 + 2**-7
    return Rows(x.bfloat16(), sums, torch.randn(case.rows, case.n, generator=g).bfloat16() * (1 if exact else 2**-8))


def factor_of(n: int) -> torch.Tensor:
    return torch.rand(n, generator=torch.Generator().manual_seed(n)) + 0.5


def poisoned(rows: int, columns: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.full((rows, columns), float("nan"), dtype=dtype)


class Product:
    """`W4Product` on a card that the host stands for, with memory around its outputs that must stay as it was."""

    def __init__(self, case: Case, weight: QuantizedWeight, arch: int, space: Workspace | None = None) -> None:
        self.case, self.space = case, workspace(arch, case.ctas) if space is None else space
        self.product = W4Product(pack(weight, case.paired), self.space)

    def queue(self, rows: Rows) -> Callable[[], list[torch.Tensor]]:
        """Launch; what comes back gives the results once the host has run."""
        case, count = self.case, rows.x.shape[0]
        width = case.n // 2 if case.epilogue == 2 else case.n
        y, h = (poisoned(count + 2, width + 8, torch.bfloat16) for _ in range(2))
        stride = max(parts_of(case.n), parts_of(case.k))
        out, given = poisoned(count + 2, stride, torch.float32), poisoned(count, stride, torch.float32)
        given[:, : parts_of(case.k)] = rows.sums
        h[:count, :width] = rows.residual[:, :width]
        squares = Squares(given[:, : parts_of(case.k)], case.k, EPS) if case.squares else None
        residual = Residual(h[:count, :width], factor_of(width), out[:count]) if case.epilogue == 3 else None
        self.product(rows.x, y[:count, :width], squares=squares, gated=case.epilogue == 2, residual=residual)
        held = (rows, squares, residual)

        def results() -> list[torch.Tensor]:
            assert held and y[:count, width:].isnan().all() and y[count:].isnan().all()
            written = -(-case.n // 64) if case.epilogue == 3 else 0
            assert out[:, written:].isnan().all() and out[count:].isnan().all()
            if case.epilogue != 3:
                return [y[:count, :width]]
            assert h[:count, width:].isnan().all() and h[count:].isnan().all()
            return [y[:count, :width], h[:count, :width].clone(), out[:count, :written]]

        return results

    def run(self, host: Host, rows: Rows, row_tiles: tuple[int, ...], seed: int) -> list[torch.Tensor]:
        """y, and with a residual that and its sums of squares. Tiles of other sizes than `row_tiles` are not used."""
        self.space.row_tiles = row_tiles
        self.space.partials.fill_(-1)
        results = self.queue(rows)
        assert host.run(seed), "some threads wait for what never comes"
        assert not self.space.arrivals.any()
        return results()


def the_same(one: list[torch.Tensor] | None, other: list[torch.Tensor] | None) -> bool:
    return one is not None and other is not None and all(map(torch.equal, one, other))


def workspace(arch: int, ctas: int) -> Workspace:
    space = SimpleNamespace(arch=arch, ctas=ctas, shared_limit=LIMITS[arch], row_tiles=ROW_TILES, device=None)
    space.partials = torch.full((ctas * 2 * max(ROW_TILES) * TILE_N,), -1, dtype=torch.int32)
    space.arrivals = torch.zeros(64, dtype=torch.int32)
    return cast(Workspace, space)


def truth(case: Case, weight: QuantizedWeight, rows: Rows) -> list[torch.Tensor]:
    v = rows.x.double() @ weight.dequantize(torch.float64).T
    if case.squares:
        v *= torch.rsqrt(rows.sums.double().sum(-1, keepdim=True) / case.k + EPS)
    y = v.bfloat16()
    if case.epilogue == 2:
        gate, up = y.float().chunk(2, dim=-1)
        return [((gate / (1 + torch.exp(-gate))).bfloat16() * up).bfloat16()]
    if case.epilogue < 3:
        return [y]
    h = (rows.residual.float() + y.float()).bfloat16()
    squares = torch.nn.functional.pad(h.double().square(), (0, -case.n % 64)).unflatten(1, (-1, 64)).sum(-1)
    return [(h.float() * factor_of(case.n)).bfloat16(), h, squares.float()]


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Host]:
    """All kernels of this file, compiled once."""
    host = Host(tmp_path_factory.mktemp("decode"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(nvrtc, "load", host.load)
        patch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=0))
        for case in CASES[:2]:
            for arch in ARCHS[case.zeros]:
                Product(case, weight_of(case, True), arch).product.warm()
        for fault in FAULTS:
            host.edit = fault
            product = Product(CASES[0], weight_of(CASES[0], True), 90)
            product.space.row_tiles = (8,)
            product.product.warm()
        host.edit = ("", "")
        yield host


def check_right(host: Host, case: Case, seed: int) -> None:
    """No sum is rounded in here, so every value but SiLU's must be the exact one."""
    weight, rows = weight_of(case, True), rows_of(case, True)
    wanted = truth(case, weight, rows)
    for arch in ARCHS[case.zeros]:
        got = Product(case, weight, arch).run(host, rows, ROW_TILES, arch // 10 + seed)
        if case.epilogue == 2:
            torch.testing.assert_close(got[0], wanted[0], rtol=2**-7, atol=1e-6)
        else:
            assert the_same(got[:2], wanted[:2])
        if case.epilogue == 3:
            torch.testing.assert_close(got[2], wanted[2], rtol=1e-6, atol=0)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_right(host: Host, case: Case) -> None:
    check_right(host, case, 0)


@pytest.mark.parametrize("case", [c for c in CASES if c.tiles * c.k < 90 * 64], ids=str)
def test_a_row_has_the_same_bits_in_any_company(host: Host, case: Case) -> None:
    """In tiles of any size, alone, beside rows of NaN, and on a card with another ring; the workspace is used again."""
    weight, rows = weight_of(case, False), rows_of(case, False)
    row = case.rows - 1
    wanted: list[torch.Tensor] = []
    for arch in ARCHS[case.zeros]:
        product = Product(case, weight, arch)
        for seed, row_tile in enumerate(ROW_TILES, arch):
            got = product.run(host, rows, (row_tile,), seed)
            wanted = wanted or got
            assert the_same(got, wanted), (arch, row_tile)
    alone = product.run(host, rows.only(row), ROW_TILES, 3)
    assert the_same([a[0] for a in alone], [b[row] for b in wanted])
    rows.x[:row] = float("nan")
    beside = product.run(host, rows, ROW_TILES, 4)
    assert the_same([a[row] for a in beside], [b[row] for b in wanted])


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(120))
def test_any_deal_is_right(host: Host, seed: int) -> None:
    draw = random.Random(seed)
    group = draw.choice((64, 128, 256))
    k, ctas = group * draw.randint(1, 1536 // group), draw.randint(1, 20)
    epilogue, rows = draw.randrange(4), draw.randint(1, 33)
    n = 16 * draw.randint(1, min(80, 16 * 90 * 64 // k))
    case = Case(n, k, group, ctas, rows, draw.random() < 0.5, epilogue, draw.random() < 0.5)
    check_right(host, case, seed)


def chain(host: Host, seed: int, apart: bool = False) -> list[torch.Tensor] | None:
    """Three products of a layer over one workspace; each may begin before that whose output it reads has ended.

    `apart`: it does not. None: some threads wait for what never comes, or the counters were not left at zero.
    """
    adds, adds_again = CHAIN[0], CHAIN[2]
    space, rows = workspace(90, adds.ctas), rows_of(adds, False)
    space.row_tiles = (8,)
    first, second, third = (W4Product(pack(weight_of(case, False), case.paired), space) for case in CHAIN)
    h, factor = rows.residual.clone(), factor_of(adds.n)
    y, out = (poisoned(adds.rows, adds.n, torch.bfloat16) for _ in range(2))
    z = poisoned(adds.rows, adds_again.k, torch.bfloat16)
    sums, last_sums = (poisoned(adds.rows, parts_of(adds.n), torch.float32) for _ in range(2))
    residual, last_residual, squares = (
        Residual(h, factor, sums),
        Residual(h, factor, last_sums),
        Squares(sums, adds.n, EPS),
    )
    finished = True
    for launch in (
        lambda: first(rows.x, y, residual=residual),
        lambda: second(y, z, squares=squares, gated=True),
        lambda: third(z, out, residual=last_residual),
    ):
        launch()
        finished = finished and (not apart or host.run(seed))
    finished = finished and (apart or host.run(seed))
    return [y, z, out, h, sums, last_sums] if finished and not space.arrivals.any() else None


def test_products_follow_each_other(host: Host) -> None:
    wanted = chain(host, 0, apart=True)
    assert wanted is not None and not any(t.isnan().any() for t in wanted)
    for seed in SEEDS:
        assert the_same(chain(host, seed), wanted), seed


@pytest.fixture(scope="module")
def sound(host: Host) -> Callable[[], bool]:
    """Whether some products give what they give without a fault."""
    wanted, products = chain(host, 0, apart=True), [Product(case, weight_of(case, True), 90) for case in LONE]
    rows = [rows_of(case, True) for case in LONE]
    right = [product.run(host, its, (8,), 0) for product, its in zip(products, rows, strict=True)]

    def unchanged() -> bool:
        return all(the_same(chain(host, seed), wanted) for seed in SEEDS) and all(
            the_same(product.run(host, its, (8,), 1), result)
            for product, its, result in zip(products, rows, right, strict=True)
        )

    return unchanged


@pytest.mark.parametrize("fault", [("", ""), *FAULTS], ids=range(len(FAULTS) + 1))
def test_a_fault_shows(host: Host, sound: Callable[[], bool], fault: tuple[str, str]) -> None:
    """What the tests above rest on: that the host is as careless as a card."""

    def unchanged() -> bool:
        host.edit = fault
        return sound()

    assert holds_in_child(unchanged) == (fault == ("", "")), fault
