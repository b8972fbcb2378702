"""`soloist bench step`: the verify step on this card at a named shape, against the time its bytes take.

The model code is the engine's own (`models/card.py`); weights are random (`synthetic.py`). The roofline comes first:
the bytes a step must read and the time they take at the measured copy bandwidth. Then ms per step, captured in a
graph, by rows and context, with one step's milliseconds by class from the profiler. Last line: one JSON document.
"""

from __future__ import annotations

import json
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from soloist.bench.device_clock import median_seconds
from soloist.bench.machine import machine, versions
from soloist.bench.products import copy_bandwidth, matrix_rate
from soloist.bench.synthetic import SHAPES, SyntheticSource
from soloist.cache.codecs import TOKEN_FORMATS
from soloist.cache.pages import PAGE, pages_for
from soloist.cache.recurrent import RecurrentState, StateShapes
from soloist.cache.tiles import make_store
from soloist.models.card import CardModel, CardShapes
from soloist.models.card_loader import CardLoader
from soloist.models.state import AcceptedPath, Caches
from soloist.models.step import RequestRows, VerifyStep, prefill_step, verify_step
from soloist.ops.card_products import CardLinear, W4Linear
from soloist.ops.triton import attention, pdl

PROMPTS = (1024, 16384)
CLASSES = (
    ("products", ("w4a16",)),
    ("dense products", ("_dense", "_wide")),
    ("attention", ("_past", "_recent", "_combine", "_qk_prepare", "_turn_rows")),
    ("recurrence", ("delta", "_walk", "_prepare", "_gated_norm", "_fold", "_settle_conv")),
    ("small kernels", ("_add_norm", "_silu_mul", "index", "elementwise", "vectorized")),
)


@dataclass(frozen=True)
class Case:
    """`requests` requests with `rows` rows each, every one at `context` settled tokens."""

    requests: int
    rows: int
    context: int

    def step(self, conv_kernel: int, pages: int) -> VerifyStep:
        """Chains of random tokens; request r owns pages r * pages .. on."""
        batch = [
            RequestRows(
                tokens=torch.randint(0, 1000, (self.rows,)).tolist(),
                parents=list(range(-1, self.rows - 1)),
                settled=self.context,
                slot=r,
                pages=list(range(r * pages, r * pages + -(-(self.context + self.rows) // PAGE))),
            )
            for r in range(self.requests)
        ]
        return verify_step(batch, conv_kernel)


class Bench:
    """A synthetic model on the card with caches for the largest case, and for one prompt of `longest` tokens."""

    def __init__(
        self,
        shape: str,
        layers: int,
        cases: list[Case],
        state_dtype: torch.dtype,
        kv: str = "bf16",
        longest: int = 0,
    ) -> None:
        self.device = torch.device("cuda")
        self.config = SHAPES[shape](layers)
        c = self.config
        requests = max(case.requests for case in cases)
        # Whole tiles, whatever the format: KVarN packs two pages together.
        self.pages = max(pages_for(case.context + case.rows, 2) for case in cases)
        self.prompt_pages = max(self.pages, pages_for(longest, 2))
        pool = max(requests * self.pages, self.prompt_pages)
        rows = max(case.requests * case.rows for case in cases)
        splits = max(case.requests * case.rows * (case.context // attention.SPLIT + 2) for case in cases) + rows
        load = CardLoader(SyntheticSource(c, self.device), self.device, torch.bfloat16)
        self.model = CardModel(load, c)
        self.kv = make_store(
            kv,
            kv,
            layers=len(c.attention_layers),
            kv_heads=c.num_kv_heads,
            head_dim=c.head_dim,
            pages=pool,
            slots=requests,
            dtype=torch.bfloat16,
            device=self.device,
        )
        for plane in self.kv.planes.values():
            if plane.dtype is torch.uint8:
                plane.fill_(0x2C)  # a KVarN record whose scales are 0.07
            elif plane.dtype is torch.int8:
                plane.random_(-127, 128)
            elif plane.dtype is torch.float8_e4m3fn:
                for layer in plane:
                    layer.copy_(torch.randn(layer.shape, device=self.device))
            elif plane.dim() == 3:
                plane.uniform_(0.005, 0.02)  # int8 scales
            else:
                plane.normal_()
        self.state = RecurrentState(StateShapes.of(c), requests, state_dtype, torch.bfloat16, self.device)
        self.state.all_states.normal_(std=0.1)
        self.model.prepare(CardShapes(rows, requests, self.prompt_pages, 8, splits), self.kv, self.state, ())

    def weight_bytes(self) -> int:
        """Bytes of all products a step reads once."""
        return sum(p.nbytes for p in card_products(self.model))

    def step_bytes(self, case: Case) -> int:
        """Weights, KV of every request's context, and the states the walk reads."""
        kv = self.kv.bytes_per_token() * case.context * case.requests
        states = self.state.all_states[:, 0].nbytes * case.requests
        return self.weight_bytes() + kv + states

    def prepare(self, case: Case) -> int:
        """Upload the case's tables. Returns its rows."""
        step = case.step(self.config.conv_kernel, self.pages)
        self.model.tables.fill(step, step.rows)
        torch.cuda.synchronize()
        return step.rows

    def settle_calls(self, case: Case) -> Callable[[], None]:
        """The launches that settle every row of the case's chains."""
        paths = [
            AcceptedPath(r, range(r * case.rows, (r + 1) * case.rows), (), case.context) for r in range(case.requests)
        ]
        self.model._path.write(paths)
        return self.model.settle_rows

    def prompt(self, tokens: int, piece: int) -> dict[str, float]:
        """Prefill one prompt in slices of `piece` rows, twice; times of the second run."""
        caches = Caches(self.kv, self.state)
        ids = torch.randint(0, 1000, (tokens,)).tolist()
        for _ in range(2):
            torch.cuda.synchronize()
            begun = time.perf_counter()
            for start in range(0, tokens, piece):
                step = prefill_step(ids[start : start + piece], start, 0, list(range(self.prompt_pages)))
                self.model.forward(step, caches)
            torch.cuda.synchronize()
            seconds = time.perf_counter() - begun
        return {
            "tokens": tokens,
            "slice": piece,
            "ms": round(seconds * 1e3, 2),
            "tokens_per_s": round(tokens / seconds),
        }


def capture(work: Callable[[], None]) -> torch.cuda.CUDAGraph:
    """`work` as a graph, run twice before so that every kernel is compiled."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        work()
        work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph


def replay_ms(graph: torch.cuda.CUDAGraph, repeats: int = 15) -> float:
    """Median milliseconds of a replay."""
    return median_seconds(graph.replay, repeats) * 1e3


@contextmanager
def serial(model: CardModel) -> Iterator[None]:
    """Inside, no kernel starts before the one in front of it has ended."""
    products = [p for p in card_products(model) if isinstance(p, W4Linear)]
    before = pdl.dependent
    pdl.dependent = lambda x: False
    for product in products:
        product._decode.dependent = False
    try:
        yield
    finally:
        pdl.dependent = before
        for product in products:
            product._decode.dependent = True


def card_products(model: CardModel) -> list[CardLinear]:
    """Every product a verify step runs."""
    products: list[Any] = [model.head]
    for _, mixer, mlp in model.layers:
        products += [p for p in vars(mixer).values() if isinstance(p, CardLinear)]
        products += [mlp.gate_up, mlp.down]
    return products


def by_class(graph: torch.cuda.CUDAGraph) -> tuple[dict[str, float], int, dict[str, tuple[int, float]]]:
    """(milliseconds per class, kernels, {kernel: (count, ms)}) of one replay. The longest product is the head."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        graph.replay()
        torch.cuda.synchronize()
    kernels = [e for e in profile.events() if e.device_type == torch.profiler.DeviceType.CUDA]
    kernels = [e for e in kernels if not e.name.startswith(("Memcpy", "Memset"))]
    totals: dict[str, float] = defaultdict(float)
    names: dict[str, list[float]] = defaultdict(list)
    products = []
    for event in kernels:
        ms = event.device_time_total / 1e3
        kind = next((k for k, parts in CLASSES if any(p in event.name for p in parts)), "other")
        totals[kind] += ms
        names[event.name[:60]].append(ms)
        if kind == "products":
            products.append(ms)
    if products:
        totals["head"] = max(products)
        totals["products"] -= max(products)
    table = {n: (len(v), round(sum(v), 4)) for n, v in sorted(names.items(), key=lambda item: -sum(item[1]))}
    return {k: round(v, 4) for k, v in totals.items()}, len(kernels), table


def run(
    shape: str,
    layers: int,
    cases: list[Case],
    state_dtype: torch.dtype,
    kv: str = "bf16",
    lengths: tuple[int, ...] = PROMPTS,
) -> dict[str, Any]:
    """Time every case, then a prompt of each of `lengths` tokens; returns the document that is printed last."""
    torch.manual_seed(0)
    bench = Bench(shape, layers, cases, state_dtype, kv, max(lengths, default=0))
    rate, flops = copy_bandwidth(bench.device), matrix_rate(bench.device)
    weights = bench.weight_bytes()
    print(f"{torch.cuda.get_device_name()}: copy {rate / 1e12:.2f} TB/s, bf16 {flops / 1e12:.0f} TFLOP/s")
    print(f"{shape}, {layers} layers: a step reads {weights / 1e9:.2f} GB of weights, {weights / rate * 1e3:.2f} ms")
    results = []
    for case in cases:
        rows = bench.prepare(case)
        graph = capture(partial(bench.model.sequence, rows))
        step_ms = replay_ms(graph)
        settle_ms = replay_ms(capture(bench.settle_calls(case)))
        floor = bench.step_bytes(case) / rate * 1e3
        with serial(bench.model):
            alone = capture(partial(bench.model.sequence, rows))
        serial_ms = replay_ms(alone)
        classes, kernels, names = by_class(alone)
        classes["gaps"] = round(serial_ms - sum(classes.values()), 4)
        finite = bool(torch.isfinite(bench.model._buffers.logits[:rows].float()).all())
        results.append(
            {
                **vars(case),
                "ms": round(step_ms, 3),
                "settle_ms": round(settle_ms, 3),
                "floor_ms": round(floor, 3),
                "ratio": round(step_ms / floor, 3),
                "bandwidth_share": round(floor / step_ms, 3),
                "kernels": kernels,
                "serial_ms": round(serial_ms, 3),
                "classes_ms": classes,
                "kernel_table": names,
                "finite": finite,
            }
        )
        print(
            f"{case.requests} x {case.rows:2d} rows at {case.context:6d}: {step_ms:.2f} ms (+{settle_ms:.2f} settle), "
            f"floor {floor:.2f}, {step_ms / floor:.2f}x, {kernels} kernels, {classes}"
        )
    prompts = []
    for tokens in lengths:
        prompts.append(bench.prompt(tokens, 2048))
        print(f"prompt of {tokens}: {prompts[-1]['ms']:.0f} ms, {prompts[-1]['tokens_per_s']:.0f} tokens/s", flush=True)
    return {
        "shape": shape,
        "layers": layers,
        "state_dtype": str(state_dtype).removeprefix("torch."),
        "kv_format": kv,
        "card": torch.cuda.get_device_name(),
        "copy_Bps": rate,
        "bf16_flops": flops,
        "weight_bytes": weights,
        "memory_bytes": torch.cuda.max_memory_allocated(),
        "machine": machine(),
        "versions": versions(),
        "results": results,
        "prompts": prompts,
    }


def main(
    shape: str = "qwen3.8-27b",
    layers: int = 64,
    rows: tuple[int, ...] = (1, 5, 8, 16),
    contexts: tuple[int, ...] = (1024, 25600),
    state_dtype: str = "float16",
    kv: str = "bf16",
    prompts: tuple[int, ...] = PROMPTS,
) -> None:
    """Run the command: one request at every row count and context, eight requests of eight rows, then the prompts."""
    cases = [Case(1, r, c) for c in contexts for r in rows] + [Case(8, 8, min(contexts))]
    document = run(shape, layers, cases, getattr(torch, state_dtype), kv, prompts)
    print(json.dumps(document))


if __name__ == "__main__":
    import argparse

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--synthetic", default="qwen3.8-27b", choices=sorted(SHAPES))
    parser.add_argument("--layers", type=int, default=64)
    parser.add_argument("--rows", default="1,5,8,16")
    parser.add_argument("--contexts", default="1024,25600")
    parser.add_argument("--prompts", default="1024,16384", help="lengths of the prompts to prefill, or nothing")
    parser.add_argument("--state", default="float16", choices=("float16", "float32"))
    parser.add_argument("--kv", default="bf16", choices=(*TOKEN_FORMATS, "kvarn"))
    args = parser.parse_args()
    main(
        args.synthetic,
        args.layers,
        tuple(map(int, args.rows.split(","))),
        tuple(map(int, args.contexts.split(","))),
        args.state,
        args.kv,
        tuple(map(int, filter(None, args.prompts.split(",")))),
    )
