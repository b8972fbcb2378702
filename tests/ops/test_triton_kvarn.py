"""KVarN's kernels against its reference: the turn, packing, and attention by the rule of tiles.

The reference keeps keys and values as computed and a card keeps them turned by the Hadamard matrix; here the card's
store is made from the reference's, or lives through the same steps beside it.
"""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl

from soloist.cache.pages import PAGE
from soloist.cache.tiles import TileStore
from soloist.models import tiled
from soloist.models.card import CardShapes, Paths, Tables
from soloist.models.state import AcceptedPath
from soloist.models.step import RequestRows, VerifyStep, Where, prefill_step, token_rows, verify_step
from soloist.ops import kvarn as reference
from soloist.ops.kvarn import TILE, fields, hadamard, record_bytes
from soloist.ops.triton import attention, kvarn, kvarn_attention

CARD = torch.cuda.is_available()
DTYPE = torch.bfloat16 if CARD else torch.float32
# A card rounds to 16 bits what it has turned; the interpreter works in fp32.
BOUND = 2e-2 if CARD else 2e-5
HEADS, KV, DIM, PAGES, SLOTS = 4, 2, 64, 40, 3
CHAIN, TREE = [-1, 0, 1, 2], [-1, 0, 1, 0, 3, 3, 5]
SCALE = DIM**-0.5


def near(a: torch.Tensor, b: torch.Tensor, bound: float = BOUND) -> None:
    a, b = a.cpu().double(), b.cpu().double()
    assert torch.isfinite(a).all()
    error = (a - b).norm() / b.norm()
    assert error <= bound, f"relative error {error:.2e}, max {(a - b).abs().max():.2e}"


def values(*shape: int) -> torch.Tensor:
    """Rows whose channels differ in size, as keys' do."""
    return torch.randn(*shape) * torch.exp(0.7 * torch.randn(shape[-1])) + 0.5 * torch.randn(shape[-1])


def fields_of(record: torch.Tensor, dim: int = DIM) -> dict[str, torch.Tensor]:
    """record uint8 [..., bytes] -> codes as numbers, scales as the integers of their bits."""
    out = {}
    for name, (at, length) in fields(dim).items():
        part = record.cpu()[..., at : at + length].contiguous()
        codes = name.endswith("codes")
        out[name] = reference.unpack(part, 4 if name[0] == "k" else 2).int() if codes else part.view(torch.int16).int()
    return out


def same_records(got: torch.Tensor, expected: torch.Tensor, dim: int = DIM) -> None:
    """Codes equal but for one in a thousand, which are neighbours, and what they stand for equal but for scales' last
    bits.

    The scales themselves may be another iteration's. Deviations are unbiased, so columns and rows of a balanced tile
    cannot both have 1: every further iteration moves a factor of half a percent from the rows' scales to the columns',
    and which of these equals is the least imbalanced is decided by the last digits.
    """
    mine, theirs = fields_of(got, dim), fields_of(expected, dim)
    for name in ("k.codes", "v.codes"):
        apart = (mine[name] - theirs[name]).abs()
        assert apart.max() <= 1 and (apart > 0).float().mean() <= 1e-3, f"{name}: {int((apart > 0).sum())} differ"
    tiles = [reference.decode_turned(x.cpu().reshape(-1, KV, record_bytes(dim)), dim) for x in (got, expected)]
    for x, y, codes in zip(*tiles, ("k.codes", "v.codes"), strict=True):
        flipped = (mine[codes] != theirs[codes]).view(x.mT.shape if codes[0] == "k" else x.shape)
        flipped = flipped.mT if codes[0] == "k" else flipped
        assert ((x - y).abs() <= 4e-3 * y.abs().amax((-1, -2), keepdim=True))[~flipped].all(), codes


def store(device: torch.device, layers: int = 1, dim: int = DIM) -> TileStore:
    return TileStore(layers=layers, kv_heads=KV, head_dim=dim, pages=PAGES, slots=SLOTS, dtype=DTYPE, device=device)


def owned(count: int) -> list[list[int]]:
    """Pages of `count` requests, scattered tile by tile."""
    blocks = torch.randperm(PAGES // 2).view(count, -1).tolist()
    return [[page for block in mine for page in (2 * block, 2 * block + 1)] for mine in blocks]


def turned(kv: TileStore, device: torch.device) -> TileStore:
    """The card's store of what a reference store holds."""
    card = store(device, kv.layers, kv.head_dim)
    card.planes["k.record"].copy_(kv.planes["k.record"])
    card.window_k.copy_(kv.window_k.float() @ hadamard(kv.head_dim))
    card.window_v.copy_(kv.window_v.float() @ hadamard(kv.head_dim))
    return card


@pytest.mark.parametrize("dim", [2, 64, 256])
def test_turn(device: torch.device, dim: int) -> None:
    torch.manual_seed(dim)
    q, k, v = (torch.randn(3, heads, dim) for heads in (4, 2, 2))
    mine = [x.to(device, DTYPE, copy=True) for x in (q, k, v)]
    kvarn.turn_rows(*mine)
    for got, x in zip(mine, (q, k, v), strict=True):
        near(got, x @ hadamard(dim), 4e-3 if CARD else 1e-6)
        alone = x[1:2].to(device, DTYPE, copy=True)
        kvarn.turn_rows(*(alone if y is x else y[1:2].to(device, DTYPE, copy=True) for y in (q, k, v)))
        assert torch.equal(alone, got[1:2])


@pytest.mark.parametrize("dim", [64, pytest.param(256, marks=pytest.mark.slow)])
def test_a_tile_is_packed_as_the_reference_packs_it(device: torch.device, dim: int) -> None:
    """Ordinary tiles, a constant one, one of zeros and one with a dead channel, through a prompt's slice."""
    torch.manual_seed(dim)
    kinds = 5
    k, v = values(kinds * TILE, KV, dim).to(DTYPE), values(kinds * TILE, KV, dim).to(DTYPE)
    k[2 * TILE : 3 * TILE], v[2 * TILE : 3 * TILE] = 3.0, -1.0
    k[3 * TILE : 4 * TILE], v[3 * TILE : 4 * TILE] = 0.0, 0.0
    k[4 * TILE :, :, 5], v[4 * TILE :, :, 7] = 0.0, 0.0
    kv = store(device, dim=dim)
    kv.planes["k.record"].fill_(0xAA)
    (pages,) = owned(1)
    places = token_rows(pages, kinds * TILE).to(device)
    kvarn.pack_prompt(k.to(device), v.to(device), kv.tiles(0), 0, kinds * TILE, 1, places)
    records = kv.planes["k.record"][0].view(-1, KV, record_bytes(dim))
    for tile in range(1, kinds):
        at = slice(tile * TILE, (tile + 1) * TILE)
        expected = reference.encode_turned(k[at].float().transpose(0, 1), v[at].float().transpose(0, 1))
        same_records(records[pages[2 * tile] // 2], expected, dim)
    untouched = [b for b in range(PAGES // 2) if b not in {pages[2 * t] // 2 for t in range(1, kinds)}]
    assert (records[untouched] == 0xAA).all()


def test_a_tile_is_packed_alike_by_prompts_and_by_steps(device: torch.device) -> None:
    """From a slice, from window and slice, and from the window alone when a step completes it: the same bits."""
    torch.manual_seed(4)
    k, v = (values(2 * TILE, KV, DIM).to(device, DTYPE) for _ in range(2))
    (pages,) = owned(1)
    places = token_rows(pages, 2 * TILE).to(device)
    stores = [store(device) for _ in range(3)]
    kvarn.pack_prompt(k, v, stores[0].tiles(0), 0, 2 * TILE, 2, places)
    cut = TILE + PAGE
    kvarn.pack_prompt(k[:cut].contiguous(), v[:cut].contiguous(), stores[1].tiles(0), 0, cut, 2, places)
    kvarn.keep_window(k[:cut], v[:cut], stores[1].tiles(0), 0, cut, 2)
    kvarn.pack_prompt(k[cut:].contiguous(), v[cut:].contiguous(), stores[1].tiles(0), cut, PAGE, 2, places)
    most = 2 * TILE - 3
    kvarn.keep_window(k[:most], v[:most], stores[2].tiles(0), 0, most, 2)
    table = torch.tensor([pages], dtype=torch.int32, device=device)
    number = lambda *x: torch.tensor(x, dtype=torch.int32, device=device)  # noqa: E731
    kvarn.settle(
        k[None, most:].contiguous(), v[None, most:].contiguous(), stores[2].tiles(None), number(0, 1, 2)[None],
        number(3), number(most), number(2), table,
    )  # fmt: skip
    first = stores[0].planes["k.record"]
    assert first.any()
    assert all(torch.equal(kv.planes["k.record"], first) for kv in stores[1:])


@triton.jit
def _decode(codes, scales, k, v, D: tl.constexpr):
    record, half = tl.program_id(0).to(tl.int64), tl.program_id(1)
    at = (record * 128 + half * 64 + tl.arange(0, 64)) * D
    cols = tl.arange(0, D)
    tl.store(k + at[None, :] + cols[:, None], kvarn.packed_keys(codes, scales, record, half, D, k.dtype.element_ty))
    tl.store(v + at[:, None] + cols[None, :], kvarn.packed_values(codes, scales, record, half, D, v.dtype.element_ty))


def test_what_is_packed_is_decoded_bit_for_bit(device: torch.device) -> None:
    torch.manual_seed(5)
    kv = store(device)
    kv.planes["k.record"].copy_(torch.randint(0, 256, kv.planes["k.record"].shape, dtype=torch.uint8))
    records = kv.planes["k.record"][0].view(-1, KV, record_bytes(DIM))
    for name in ("k.a", "k.zp", "k.c", "v.a", "v.zp", "v.c"):  # ordinary numbers in place of random bits
        at, length = fields(DIM)[name]
        scales = torch.randn(*records.shape[:2], length // 2).half().view(torch.uint8)
        records[..., at : at + length] = scales.to(device)
    keys, vals = reference.decode_turned(records.cpu(), DIM)
    got_k = torch.full((PAGES // 2, KV, TILE, DIM), float("nan"), device=device, dtype=DTYPE)
    got_v = got_k.clone()
    _decode[(PAGES // 2 * KV, 2)](*kvarn.record_views(kv.tiles(0)), got_k, got_v, DIM)
    assert torch.equal(got_k.cpu(), keys.to(DTYPE)) and torch.equal(got_v.cpu(), vals.to(DTYPE))


class Rig:
    """Requests with a past, in a reference store and in the card's, and one step of rows."""

    def __init__(
        self, settled: tuple[int, ...], parents: tuple[list[int], ...], device: torch.device, layers: int = 1
    ) -> None:
        self.device = device
        self.kv = store(torch.device("cpu"), layers)
        self.pages = owned(len(settled))
        self.slots = list(range(SLOTS))[::-1][: len(settled)]
        for layer in range(layers):
            for n, pages, slot in zip(settled, self.pages, self.slots, strict=True):
                where = Where(torch.full((n,), slot), torch.arange(n))
                k, v = (values(n, KV, DIM).to(DTYPE) for _ in range(2))
                self.kv.write(layer, token_rows(pages, n), k, v, where)
        self.card = turned(self.kv, device)
        self.batch = [
            RequestRows([1] * len(p), p, n, slot, pages)
            for p, n, slot, pages in zip(parents, settled, self.slots, self.pages, strict=True)
        ]
        self.step: VerifyStep = verify_step(self.batch, 4)
        self.shapes = CardShapes(rows=32, requests=SLOTS + 1, pages=PAGES // len(settled), branches=8, splits=400)
        self.tables = Tables(self.shapes, 4, device)
        self.tables.fill(self.step, self.step.rows)

    def attend(
        self, layer: int, rows: tuple[torch.Tensor, ...], planes: dict[str, torch.Tensor],
        qkv: torch.Tensor | None = None, reference: bool = True,
    ) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
        """(the card's output, the reference's) of q, k, v rows; the card's rows stay in `planes`."""
        q, k, v = rows
        count = self.step.rows
        own = self.card.stored(layer, planes)
        for part, x in zip(own, (k, v), strict=True):
            part.data[:count] = x.to(self.device)
        table = {
            n: t[:count] if n in ("positions", "request", "parts", "lanes") else t for n, t in self.tables.card.items()
        }
        if qkv is None:
            qkv = torch.randn(count, 2 * (HEADS + KV) * DIM)
        partials = attention.Partials.allocate(self.shapes.splits, HEADS, DIM, self.device)
        for part in (partials.acc, partials.top, partials.total):
            part.fill_(float("nan"))
        out = torch.full((count, HEADS * DIM), float("nan"), device=self.device, dtype=DTYPE)
        kvarn_attention.verify_attention(
            q.to(self.device, copy=True), *(part.data[:count] for part in own), self.card.tiles(layer), table, partials,
            qkv.to(self.device, DTYPE), out, SCALE,
        )  # fmt: skip
        if not reference:
            return out.view(count, HEADS, DIM), out
        truth = tiled.verify(self.kv, layer, q.float(), k.float(), v.float(), self.step, SCALE)
        gate = qkv[:, : 2 * HEADS * DIM].to(DTYPE).float().view(count, HEADS, 2 * DIM)[..., DIM:]
        return out.view(count, HEADS, DIM), truth * torch.sigmoid(gate)


def rows_of(step: VerifyStep) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return tuple(torch.randn(step.rows, heads, DIM).to(DTYPE) for heads in (HEADS, KV, KV))  # type: ignore[return-value]


QUICK = [(127, 128), (383, 384), (385, 510)]
EDGES = [(0, 5), (129, 255), (256, 257), (511, 512), (640, 767), (895, 900)]


@pytest.mark.parametrize("settled", QUICK + [pytest.param(edge, marks=pytest.mark.slow) for edge in EDGES])
def test_a_row_reads_what_its_tile_lets_it_read(device: torch.device, settled: tuple[int, int]) -> None:
    """A chain and a tree side by side, many of whose rows stand in the next tile."""
    torch.manual_seed(sum(settled))
    layers = 2 if settled == QUICK[0] else 1
    rig = Rig(settled, (CHAIN, TREE), device, layers)
    planes = rig.card.row_planes(rig.shapes.rows)
    for layer in range(layers):
        near(*rig.attend(layer, rows_of(rig.step), planes))


def test_a_row_gets_the_same_from_a_chain_and_alone(device: torch.device) -> None:
    """Positions 379 .. 390 as one chain and one at a time: the chain's rows find tile 1 between packed and not."""
    torch.manual_seed(8)
    start, count = 379, 12
    chain = [i - 1 for i in range(count)]
    rig = Rig((start,), (chain,), device)
    planes = rig.card.row_planes(rig.shapes.rows)
    q, k, v = rows_of(rig.step)
    torch.manual_seed(9)
    whole, _ = rig.attend(0, (q, k, v), planes)
    gates = torch.Generator().manual_seed(9)
    everything = torch.randn(count, 2 * (HEADS + KV) * DIM, generator=gates)
    settle(rig, planes, [AcceptedPath(0, list(range(count - 1)), rig.pages[0], start)])
    last = RequestRows([1], [-1], start + count - 1, rig.slots[0], rig.pages[0])
    rig.step = verify_step([last], 4)
    rig.tables.fill(rig.step, 1)
    alone, _ = rig.attend(0, (q[-1:], k[-1:], v[-1:]), planes, everything[-1:], reference=False)
    if CARD:
        assert torch.equal(alone, whole[-1:])
    else:
        near(alone, whole[-1:], 1e-6)


def settle(rig: Rig, planes: dict[str, torch.Tensor], paths: list[AcceptedPath]) -> None:
    """Settle the accepted rows of all layers in the card's store."""
    path, lengths = Paths(rig.shapes, rig.device).fill(paths)
    card = rig.tables.card
    kvarn.settle(
        planes["k.data"], planes["v.data"], rig.card.tiles(None), path, lengths, card["settled"], card["slots"],
        card["page_table"],
    )  # fmt: skip


@pytest.mark.parametrize("settled", [(126, 255), (383, 300), (511, 250)])
def test_settled_rows_enter_the_window_and_complete_tiles_are_packed(
    device: torch.device, settled: tuple[int, int]
) -> None:
    """A whole chain and one branch of a tree; every other lane and record keeps its bits, and no rejected row is
    anywhere."""
    torch.manual_seed(sum(settled))
    rig = Rig(settled, (CHAIN, TREE), device, layers=2)
    planes = rig.card.row_planes(rig.shapes.rows)
    k, v = values(2, rig.step.rows, KV, DIM).to(DTYPE), values(2, rig.step.rows, KV, DIM).to(DTYPE)
    planes["k.data"][:, : rig.step.rows] = (k.float() @ hadamard(DIM)).to(device, DTYPE)
    planes["v.data"][:, : rig.step.rows] = (v.float() @ hadamard(DIM)).to(device, DTYPE)
    paths = [
        AcceptedPath(0, [0, 1, 2, 3], rig.pages[0], settled[0]),
        AcceptedPath(1, [4, 7, 9, 10], rig.pages[1], settled[1]),
    ]
    before = {name: part.clone() for name, part in vars(rig.card.tiles(None)).items()}
    settle(rig, planes, paths)
    for p in paths:
        index = token_rows(p.pages, p.settled + 4)[p.settled :]
        where = Where(torch.full((4,), rig.slots[p.request]), torch.arange(4) + p.settled)
        for layer in range(2):
            rig.kv.write(layer, index, k[layer, p.rows], v[layer, p.rows], where)
    expected = turned(rig.kv, device)
    written = {name: (part != before[name]) for name, part in vars(rig.card.tiles(None)).items()}
    near(rig.card.window_k, expected.window_k, 4e-3 if CARD else 1e-6)
    near(rig.card.window_v, expected.window_v, 4e-3 if CARD else 1e-6)
    assert written["window_k"].any(-1).sum() == 2 * KV * 8
    full = [p.pages[2 * (p.settled // TILE)] // 2 for p in paths if (p.settled + 4) // TILE > max(1, p.settled // TILE)]
    touched = written["records"].view(2, PAGES // 2, -1).any(-1)
    assert touched.nonzero().tolist() == [[layer, block] for layer in range(2) for block in sorted(full)]
    for p in paths:
        if p.pages[2 * (p.settled // TILE)] // 2 in full:
            packed_from_the_window(rig, rig.slots[p.request], p.settled // TILE, p.pages)


def packed_from_the_window(rig: Rig, slot: int, tile: int, pages: list[int]) -> None:
    """The tile's records of every layer are what the reference makes of what stands in the window."""
    lanes = reference.lane(torch.arange(tile * TILE, (tile + 1) * TILE))
    records = rig.card.planes["k.record"].view(rig.card.layers, PAGES // 2, KV, -1)
    for layer in range(rig.card.layers):
        k, v = (w[layer, slot].cpu()[lanes].float().transpose(0, 1) for w in (rig.card.window_k, rig.card.window_v))
        same_records(records[layer, pages[2 * tile] // 2], reference.encode_turned(k, v))


def begin(kv: TileStore, tokens: list[torch.Tensor], cuts: list[int], slot: int, pages: list[int]) -> None:
    """What a card's prompt leaves behind up to the last cut, computed in slices that end at `cuts`; nobody attends."""
    device, start = kv.window_k.device, 0
    places = token_rows(pages, cuts[-1]).to(device)
    for end in cuts:
        k, v = ((x[start:end].float() @ hadamard(DIM)).to(device, DTYPE) for x in tokens[1:])
        kvarn.pack_prompt(k, v, kv.tiles(0), start, end - start, slot, places)
        kvarn.keep_window(k, v, kv.tiles(0), start, end - start, slot)
        start = end


def slices(
    kv: TileStore, tokens: list[torch.Tensor], start: int, cuts: list[int], slot: int, pages: list[int], card: bool
) -> torch.Tensor:
    """Prompt rows q, k, v from `start` on, computed in slices that end at `cuts`; the last one's padding is noise."""
    out = []
    attend = tiled.prefill_on_card if card else tiled.prefill
    device = kv.window_k.device
    for end in cuts:
        step = prefill_step([1] * (end - start), start, slot, pages).to(device)
        padding = (0, 0, 0, 0, 0, step.tokens.numel() - (end - start))
        q, k, v = (torch.nn.functional.pad(x[start:end], padding, value=7.5).to(device) for x in tokens)
        out.append(attend(kv, 0, q, k, v, step, SCALE)[: end - start])
        start = end
    return torch.cat(out)


@pytest.mark.slow
def test_a_prompt_in_slices_and_what_is_decoded_behind_it(device: torch.device) -> None:
    """Life of a request: slices that end inside tiles, then steps that complete one; against the reference all along,
    and against fewer slices bit for bit."""
    torch.manual_seed(11)
    start, length = 384, 508
    tokens = [x.to(DTYPE) for x in (torch.randn(length, HEADS, DIM), values(length, KV, DIM), values(length, KV, DIM))]
    rig, other = Rig((0,), ([-1],), device), store(device)
    pages, slot = rig.pages[0], rig.slots[0]
    begin(rig.card, tokens, [192, 320, start], slot, pages)
    begin(other, tokens, [start], slot, pages)
    got = slices(rig.card, tokens, start, [448, length], slot, pages, card=True)
    assert torch.equal(got, slices(other, tokens, start, [length], slot, pages, card=True))
    for name, part in vars(rig.card.tiles(0)).items():
        assert torch.equal(part, getattr(other.tiles(0), name)), name
    where = Where(torch.full((start,), slot), torch.arange(start))
    rig.kv.write(0, token_rows(pages, start), *(x[:start] for x in tokens[1:]), where)
    rig.kv.planes["k.record"].copy_(rig.card.planes["k.record"])
    near(got, slices(rig.kv, tokens, start, [length], slot, pages, card=False))
    rounds = [4, 3, 2]
    for rows in rounds:
        rig.kv.planes["k.record"].copy_(rig.card.planes["k.record"])  # from here on both read the same codes
        settled = length
        rig.step = verify_step([RequestRows([1] * rows, [i - 1 for i in range(rows)], settled, slot, pages)], 4)
        rig.tables.fill(rig.step, rows)
        q, k, v = rows_of(rig.step)
        planes = rig.card.row_planes(rig.shapes.rows)
        near(*rig.attend(0, (q, k, v), planes))
        settle(rig, planes, [AcceptedPath(0, list(range(rows)), pages, settled)])
        index = token_rows(pages, settled + rows)[settled:]
        rig.kv.write(0, index, k, v, Where(torch.full((rows,), slot), torch.arange(rows) + settled))
        length += rows
    packed_from_the_window(rig, slot, 3, pages)


def test_a_prompt_goes_on_from_a_snapshot_in_another_slot(device: torch.device) -> None:
    """What `export_slot` gives at a grid point is all that a prompt needs there, in another slot of an empty store."""
    torch.manual_seed(12)
    cut, length = 384, 440
    tokens = [x.to(DTYPE) for x in (torch.randn(length, HEADS, DIM), values(length, KV, DIM), values(length, KV, DIM))]
    first, second = store(device), store(device)
    (pages,) = owned(1)
    begin(first, tokens, [cut], 0, pages)
    window = first.export_slot(0, cut)
    second.planes["k.record"].copy_(first.planes["k.record"])
    for part in (second.window_k, second.window_v):
        part.fill_(float("nan"))
    second.load_slot(2, cut, window)
    resumed = slices(second, tokens, cut, [length], 2, pages, card=True)
    assert torch.equal(resumed, slices(first, tokens, cut, [length], 0, pages, card=True))
    kv = store(torch.device("cpu"))
    where = Where(torch.zeros(cut, dtype=torch.int64), torch.arange(cut))
    kv.write(0, token_rows(pages, cut), *(x[:cut] for x in tokens[1:]), where)
    kv.planes["k.record"].copy_(first.planes["k.record"])
    near(resumed, slices(kv, tokens, cut, [length], 0, pages, card=False))
