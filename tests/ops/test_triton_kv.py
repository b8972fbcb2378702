"""Stored rows in the kernels against the codecs, bit for bit, in every format of keys and of values."""

import pytest
import torch

from soloist.cache.codecs import token_codec
from soloist.cache.kv import KVStore
from soloist.cache.pages import PAGE
from soloist.models.card import CardShapes, Paths, Tables
from soloist.models.state import AcceptedPath
from soloist.models.step import RequestRows, token_rows, verify_step
from soloist.ops.stored_rows import StoredRows
from soloist.ops.triton import attention, kv, prefill, rows

HEADS, KV, DIM, PAGES = 4, 2, 16, 20
PAIRS = [("fp32", "fp32"), ("bf16", "bf16"), ("fp16", "bf16"), ("fp8", "fp8"), ("int8", "int8"), ("fp8", "int8")]
CHAIN, TREE = [-1, 0, 1], [-1, 0, 1, 0, 3]


def store(key: str, value: str, device: torch.device, dtype: torch.dtype = torch.float32) -> KVStore:
    return KVStore(
        layers=2, kv_heads=KV, head_dim=DIM, pages=PAGES, codec_k=token_codec(key, (0.75, 3.0)),
        codec_v=token_codec(value), dtype=dtype, device=device,
    )  # fmt: skip


def values(*shape: int, device: torch.device, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return (torch.randn(*shape) * torch.exp(2 * torch.randn(*shape[:-1], 1))).to(device, dtype)


def filled(into: KVStore, index: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    """The reference's codes, computed on the CPU, at rows `index` of every layer."""
    for layer in range(into.layers):
        for part, codec, x in (("k", into.codec_k, k), ("v", into.codec_v, v)):
            for name, codes in codec.encode(x.cpu(), layer).items():
                raw(into.planes[f"{part}.{name}"])[layer, index] = raw(codes).to(k.device)


def raw(x: torch.Tensor) -> torch.Tensor:
    return x.view(torch.uint8) if x.dtype is torch.float8_e4m3fn else x


def same(a: KVStore, b: KVStore) -> bool:
    return all(torch.equal(raw(a.planes[n]), raw(b.planes[n])) for n in a.planes)


def test_every_bf16_number_in_fp8(device: torch.device) -> None:
    x = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    x = torch.nn.functional.pad(x[x.isfinite()], (0, 256)).view(-1, 1, 1024)
    codes = torch.empty(x.shape, dtype=torch.float8_e4m3fn, device=device)
    kv.write(x.to(device), torch.arange(x.shape[0], device=device), StoredRows(codes))
    assert torch.equal(raw(codes).cpu(), raw(token_codec("fp8").encode(x)["data"]))


@pytest.mark.parametrize("key,value", PAIRS)
def test_written_codes_are_the_codecs(device: torch.device, key: str, value: str) -> None:
    """Every lane of every page of a small pool, in a shuffled order."""
    torch.manual_seed(0)
    index = torch.randperm(PAGES * PAGE, device=device)[:100]
    k, v = (values(index.numel(), KV, DIM, device=device, dtype=torch.bfloat16) for _ in range(2))
    k[7] = 0.0
    expected, got = (store(key, value, device, torch.bfloat16) for _ in range(2))
    filled(expected, index, k, v)
    for layer in range(2):
        for x, into in zip((k, v), got.stored(layer), strict=True):
            kv.write(x, index, into)
    assert same(expected, got)


@pytest.mark.parametrize("key,value", PAIRS)
def test_a_projection_is_stored_as_the_codec_stores_it(device: torch.device, key: str, value: str) -> None:
    torch.manual_seed(1)
    count = 5
    qkv = values(count, 2 * (HEADS + KV) * DIM, device=device, dtype=torch.bfloat16)
    factors, inverse = torch.rand(HEADS + KV, DIM, device=device) + 0.5, torch.rand(8, device=device)
    where = torch.arange(count, dtype=torch.int32, device=device) + 9
    q, k, v = (torch.empty(count, h, DIM, dtype=torch.bfloat16, device=device) for h in (HEADS, KV, KV))
    rows.qk_prepare(qkv, factors, where, inverse, 1e-6, q, k, v)
    expected, got = (store(key, value, device, torch.bfloat16) for _ in range(2))
    filled(expected, torch.arange(count), k, v)
    planes = got.row_planes(count)
    again = torch.empty_like(q)
    for layer in range(2):
        rows.qk_prepare(qkv, factors, where, inverse, 1e-6, again, *got.stored(layer, planes))
    assert torch.equal(q, again)
    for name, plane in planes.items():
        assert torch.equal(raw(plane), raw(expected.planes[name][:, :count])), name


@pytest.mark.parametrize("key,value", PAIRS)
@pytest.mark.parametrize("settled", [(70, 255), pytest.param((255, 512), marks=pytest.mark.slow)])
def test_attention_reads_what_the_codec_decodes(
    device: torch.device, key: str, value: str, settled: tuple[int, int]
) -> None:
    """Pages, rows of the step and settling: the same bits as over decoded keys and values, before and after."""
    torch.manual_seed(2)
    owned = torch.randperm(PAGES).view(2, -1).tolist()
    parents = (CHAIN, TREE)
    batch = [RequestRows([1] * len(p), p, s, 0, o) for p, s, o in zip(parents, settled, owned, strict=True)]
    step = verify_step(batch, 4)
    shapes = CardShapes(rows=24, requests=3, pages=10, branches=8, splits=200)
    tables = Tables(shapes, 4, device)
    tables.fill(step, step.rows)
    table = {
        n: t[: step.rows] if n in ("positions", "request", "parts", "lanes") else t for n, t in tables.card.items()
    }
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    cache = store(key, value, device, dtype)
    everywhere = torch.arange(PAGES * PAGE)
    filled(cache, everywhere, *(values(PAGES * PAGE, KV, DIM, device=device, dtype=dtype) for _ in range(2)))
    k, v = (values(step.rows, KV, DIM, device=device, dtype=dtype) for _ in range(2))
    own = store(key, value, device, dtype)
    filled(own, torch.arange(step.rows), k, v)
    planes = {n: p[:, : step.rows].contiguous() for n, p in own.planes.items()}
    q = torch.randn(step.rows, HEADS, DIM, device=device).to(dtype)
    qkv = torch.randn(step.rows, 2 * (HEADS + KV) * DIM, device=device).to(dtype)
    partials = attention.Partials.allocate(200, HEADS, DIM, device)

    def attend(k_rows: object, v_rows: object, keys: object, values: object) -> torch.Tensor:
        for part in (partials.acc, partials.top, partials.total):
            part.fill_(float("nan"))
        out = torch.full((step.rows, HEADS * DIM), float("nan"), device=device, dtype=dtype)
        return attention.verify_attention(
            q,
            k_rows,
            v_rows,
            keys,
            values,
            table,
            partials,
            qkv,
            out,
            DIM**-0.5,  # type: ignore[arg-type]
        )

    for layer in range(2):
        plain = [x.contiguous() for x in cache.read_rows(layer, everywhere)]
        mine = [x.contiguous() for x in own.read_rows(layer, torch.arange(step.rows))]
        expected = attend(*mine, *plain)
        assert torch.isfinite(expected).all()
        assert torch.equal(attend(*cache.stored(layer, planes), *cache.stored(layer)), expected)

    paths = [AcceptedPath(0, [0, 1], (), settled[0]), AcceptedPath(1, [3, 6, 7], (), settled[1])]
    path, lengths = Paths(shapes, device).fill(paths)
    before = {n: raw(p).clone() for n, p in cache.planes.items()}
    attention.settle_kv(
        cache.stored(None, planes), cache.stored(None), path, lengths, tables.card["settled"],
        tables.card["page_table"],
    )  # fmt: skip
    for p, part in zip(paths, batch, strict=True):
        index = token_rows(part.pages, part.settled + len(p.rows))[part.settled :]
        for name, plane in cache.planes.items():
            assert torch.equal(raw(plane)[:, index], raw(planes[name])[:, p.rows])
            before[name][:, index] = raw(plane)[:, index]
    assert all(torch.equal(raw(cache.planes[n]), b) for n, b in before.items())


@pytest.mark.parametrize("key,value", PAIRS)
def test_prompts_read_pages_as_they_are_decoded(device: torch.device, key: str, value: str) -> None:
    torch.manual_seed(3)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    cache, start, tokens = store(key, value, device, dtype), 128, 128
    pages = torch.randperm(PAGES)[: (start + tokens) // PAGE].tolist()
    places = token_rows(pages, start + tokens)
    filled(cache, torch.arange(PAGES * PAGE), *(values(PAGES * PAGE, KV, DIM, device=device) for _ in range(2)))
    q = torch.randn(tokens, HEADS, DIM, device=device).to(dtype)
    for layer in range(2):
        plain = cache.read_rows(layer, places)
        expected = prefill.prefill_attention(q, *plain, start, 64, DIM**-0.5)
        got = prefill.prefill_attention(q, *cache.stored(layer), start, 64, DIM**-0.5, places.to(device))
        assert torch.isfinite(expected).all() and torch.equal(got, expected)
