"""`python -m soloist.bench.products`: W4A16 candidates on the 27B's shapes, against this card's copy bandwidth.

Weights are random and rotated so that no replay finds them in the cache; every product runs in a captured
graph, so a figure includes the launch gap that a step pays. Before a candidate is timed it is compared with the
dequantised fp32 product, and its rows are compared bit for bit across row counts. Last line: one JSON document.
"""

from __future__ import annotations

import argparse
import json
import time
import traceback
from collections.abc import Callable
from functools import partial

import torch

from soloist.bench.device_clock import median_seconds
from soloist.ops.linear import QuantizedWeight
from soloist.ops.linear_cuda import W4Prefill, W4Product, Workspace, pack

SHAPES = {
    "gdn_in": (16384, 5120),
    "out": (5120, 6144),
    "gate_up": (34816, 5120),
    "down": (5120, 17408),
    "attn_in": (14336, 5120),
    "head": (248320, 5120),
}
ROWS = (1, 5, 8, 16)
Product = Callable[[torch.Tensor], torch.Tensor]
Build = Callable[[list[QuantizedWeight]], list[Product]]


def random_weight(n: int, k: int, group: int, zeros: bool, device: torch.device) -> QuantizedWeight:
    """Random codes and scales of either sign, on the device."""
    words = torch.randint(-(2**31), 2**31 - 1, (n, k // 8), dtype=torch.int32, device=device)
    scales = (torch.randn(n, k // group, device=device) * 0.01).to(torch.float16)
    z = torch.randint(0, 16, (n, k // group), dtype=torch.uint8, device=device) if zeros else None
    return QuantizedWeight(words, scales, z, 4, group, (n, k))


def time_graph(calls: list[Callable[[], object]], repeats: int = 7) -> float:
    """Seconds per call of a captured graph that runs `calls` in order; median of `repeats` replays."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for call in calls[:2]:
            call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    return median_seconds(graph.replay, repeats) / len(calls)


def copy_bandwidth(device: torch.device, nbytes: int = 2 << 30) -> float:
    """Bytes per second read plus written by a large device-to-device copy."""
    source = torch.randn(nbytes // 4, device=device)
    target = torch.empty_like(source)
    return 2 * nbytes / median_seconds(lambda: target.copy_(source), repeats=10, warm_up=2)


def matrix_rate(device: torch.device, size: int = 8192) -> float:
    """FLOP per second of a bf16 product through torch on random data."""
    a, b = (torch.randn(size, size, device=device).to(torch.bfloat16) for _ in range(2))
    return 2 * size**3 / time_graph([lambda: a @ b] * 8)


def relative_error(y: torch.Tensor, x: torch.Tensor, weight: QuantizedWeight) -> float:
    """||y - x W^T|| / ||x W^T|| against fp32 over the dequantised weight, 8192 columns at a time."""
    wrong = total = 0.0
    for first in range(0, weight.shape[0], 8192):
        part = QuantizedWeight(
            weight.codes[first : first + 8192],
            weight.scales[first : first + 8192],
            None if weight.zeros is None else weight.zeros[first : first + 8192],
            weight.bits,
            weight.group,
            (min(8192, weight.shape[0] - first), weight.shape[1]),
        )
        truth = x.to(torch.float64) @ part.dequantize(torch.float64).T
        wrong += float((y[:, first : first + 8192].to(torch.float64) - truth).square().sum())
        total += float(truth.square().sum())
    return (wrong / total) ** 0.5


def row_invariant(product: Product, k: int, device: torch.device, most: int) -> bool:
    """Whether a row's bits are the same alone, in every batch size and at every place, up to `most` rows."""
    x = torch.randn(most, k, device=device).to(torch.bfloat16)
    whole = product(x)
    for rows in {1, 2, 3, 5, 7, 8, 9, 13, 16, 17, 31, 32, 33, 63, most}:
        if rows <= most and not torch.equal(product(x[:rows].contiguous()), whole[:rows]):
            return False
    return torch.equal(product(x[most - 1 :].contiguous())[0], whole[most - 1])


def soloist_candidates(weights: list[QuantizedWeight], space: Workspace, dependent: bool) -> list[Product]:
    """This house's kernel over every rotated weight."""
    return [W4Product(pack(w), space, dependent=dependent) for w in weights]


def _int4pack(x: torch.Tensor, packed: torch.Tensor, group: int, table: torch.Tensor) -> torch.Tensor:
    return torch.ops.aten._weight_int4pack_mm(x, packed, group, table)


def torch_candidates(weights: list[QuantizedWeight]) -> list[Product]:
    """torch's int4 product, (code - 8) * scale + zero form, from torch core."""
    out: list[Product] = []
    for w in weights:
        codes = w.unpack().to(torch.int32)
        packed = torch.ops.aten._convert_weight_to_int4pack((codes[:, ::2] << 4 | codes[:, 1::2]).to(torch.uint8), 8)
        scale = w.scales.to(torch.bfloat16).T.contiguous()
        table = torch.stack((scale, torch.zeros_like(scale)), -1).contiguous()
        out.append(partial(_int4pack, packed=packed, group=w.group, table=table))
    return out


def humming_candidates(weights: list[QuantizedWeight], invariant: bool) -> list[Product]:
    """humming-kernels over the same codes, its own heuristics."""
    from humming.layer import HummingLayer

    config = {"use_batch_invariant": True} if invariant else None
    out: list[Product] = []
    for w in weights:
        n, k = w.shape
        form = {"quant_method": "humming", "dtype": "uint4", "group_size": w.group}
        layer = HummingLayer(shape_n=n, shape_k=k, weight_config=form, torch_dtype=torch.bfloat16).cuda()
        layer.load_from_tensors({"weight": w.codes, "weight_scale": w.scales.to(torch.bfloat16)})
        layer.transform()
        out.append(partial(layer, compute_config=config))
    return out


def measure(
    name: str,
    build: Build,
    weights: list[QuantizedWeight],
    rows: tuple[int, ...],
    results: list[dict[str, object]],
    rate: float,
    most: int,
) -> None:
    """Check, then time, one candidate on one shape; append to `results`."""
    n, k = weights[0].shape
    nbytes = n * k // 2 + n * (k // weights[0].group) * 2
    record: dict[str, object] = {"candidate": name, "n": n, "k": k, "bytes": nbytes}
    record["zeros"] = weights[0].zeros is not None
    try:
        started = time.perf_counter()
        products = build(weights)
        x = torch.randn(16, k, device="cuda").to(torch.bfloat16)
        record["error"] = relative_error(products[0](x), x, weights[0])
        record["build_s"] = round(time.perf_counter() - started, 2)
        record["row_invariant"] = row_invariant(products[0], k, x.device, most)
        for m in rows:
            x = torch.randn(m, k, device="cuda").to(torch.bfloat16)
            seconds = time_graph([partial(p, x) for p in products])
            record[f"us_{m}"] = round(seconds * 1e6, 2)
            record[f"share_{m}"] = round(nbytes / seconds / rate, 3)
    except Exception as error:  # a candidate that cannot run is a row of the table, not the end of it
        record["failed"] = f"{type(error).__name__}: {error}"[:300]
        traceback.print_exc(limit=4)
    results.append(record)
    print(json.dumps(record), flush=True)


def candidate_table(space: Workspace) -> dict[str, tuple[Build, tuple[int, ...], int, bool]]:
    """name -> (build, extra row counts, rows of the invariance check, asymmetric weights)."""
    return {
        "soloist": (lambda w: soloist_candidates(w, space, False), (32, 64), 64, False),
        "soloist-pdl": (lambda w: soloist_candidates(w, space, True), (), 64, False),
        "soloist-zeros": (lambda w: soloist_candidates(w, space, False), (), 64, True),
        "torch-int4pack": (torch_candidates, (), 16, False),
        "humming": (lambda w: humming_candidates(w, False), (), 16, False),
        "humming-invariant": (lambda w: humming_candidates(w, True), (), 16, False),
    }


def measure_prefill(shape: str, weight: QuantizedWeight, space: Workspace, flops: float) -> dict[str, object]:
    """The prefill product's error, invariance and share of the matrix rate at several row counts."""
    n, k = weight.shape
    prefill = W4Prefill(pack(weight), space)

    def rows_of(m: int) -> torch.Tensor:
        return torch.randn(m, k, device="cuda").to(torch.bfloat16)

    x = rows_of(200)
    whole = prefill(x)
    record: dict[str, object] = {"prefill": shape, "n": n, "k": k, "error": relative_error(whole, x, weight)}
    record["row_invariant"] = all(torch.equal(prefill(x[:m]), whole[:m]) for m in (1, 64, 127, 129, 199))
    for m in (64, 128, 512, 1024, 2048, 8192):
        call = partial(prefill, rows_of(m))
        seconds = time_graph([call] * 4, 3)
        record[f"us_{m}"] = round(seconds * 1e6, 1)
        record[f"share_{m}"] = round(2 * m * n * k / seconds / flops, 3)
    return record


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shapes", default=",".join(SHAPES))
    parser.add_argument("--rows", default=",".join(map(str, ROWS)))
    parser.add_argument("--candidates", default="soloist,soloist-pdl,torch-int4pack,humming")
    parser.add_argument("--rotate-bytes", type=int, default=400 << 20)
    parser.add_argument("--prefill", action="store_true")
    args = parser.parse_args()
    torch.manual_seed(0)
    device = torch.device("cuda")
    results: list[dict[str, object]] = []
    space = Workspace(device)
    rate, flops = copy_bandwidth(device), matrix_rate(device)
    card = {"card": torch.cuda.get_device_name(), "torch": torch.__version__, "copy_Bps": rate, "bf16_flops": flops}
    print(json.dumps(card), flush=True)
    table, rows = candidate_table(space), tuple(map(int, args.rows.split(",")))
    for shape in args.shapes.split(","):
        n, k = SHAPES[shape]
        count = max(2, min(24, args.rotate_bytes // (n * k // 2)))
        for name in filter(None, args.candidates.split(",")):
            build, extra, most, zeros = table[name]
            weights = [random_weight(n, k, 128, zeros, device) for _ in range(count)]
            measure(name, build, weights, (*rows, *extra), results, rate, most)
        if args.prefill:
            record = measure_prefill(shape, random_weight(n, k, 128, False, device), space, flops)
            results.append(record)
            print(json.dumps(record), flush=True)
        torch.cuda.empty_cache()
    print(json.dumps({**card, "results": results}))


if __name__ == "__main__":
    main()
