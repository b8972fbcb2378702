"""Decode of the bundled demo on this CPU: Soloist against transformers' generate, alternating in one run.

    PYTHONPATH=src:tests python tools/cpu_decode.py --out benchmarks/cpu/decode.json

Same weights (the bundle dequantised to fp32), threads and prompts, greedy. Every round measures both sides one
after the other; ratios are of medians over rounds. Also C1, C4, C8 aggregates and the
milliseconds of one step by function.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import os
import pstats
import statistics
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch

from soloist import demo
from soloist.bench.machine import machine, versions
from soloist.engine.build import build_engine
from soloist.engine.engine import Engine
from soloist.engine.request import Event, Request
from soloist.sampling.params import SamplingParams
from soloist.settings import resolve

GOLDEN = Path(__file__).parent.parent / "tests" / "golden" / "demo.json"
PLAIN = {"spec": "none", "lookup": "0", "prefix_cache": "0"}


def ask(engine: Engine, prompts: list[list[int]], tokens: int) -> tuple[float, list[Request]]:
    """Decode tok/s (C x 1000 / mean TPOT) of the prompts run together."""
    done = [threading.Event() for _ in prompts]
    requests = []
    for prompt, flag in zip(prompts, done, strict=True):

        def told(event: Event, flag: threading.Event = flag) -> None:
            if event.finish_reason:
                flag.set()

        request = Request(list(prompt), SamplingParams(max_tokens=tokens, temperature=0.0), told)
        requests.append(request)
        engine.submit(request)
    for flag in done:
        flag.wait()
    times = [(r.stats.last_token - r.stats.first_token) / (len(r.output) - 1) for r in requests]
    return len(prompts) / statistics.mean(times), requests


def oracle_rate(model: Any, prompt: list[int], tokens: int) -> tuple[float, list[int]]:
    """transformers' generate, timed from the first new token's prefill excluded by a one-token run."""

    def timed(count: int) -> tuple[float, list[int]]:
        began = time.perf_counter()
        out = model.generate(
            torch.tensor([prompt]), max_new_tokens=count, do_sample=False, eos_token_id=None, pad_token_id=0
        )
        return time.perf_counter() - began, out[0, len(prompt) :].tolist()

    first, _ = timed(1)
    whole, ids = timed(tokens)
    return (tokens - 1) / (whole - first), ids


def profile(engine: Engine, prompt: list[int]) -> list[dict[str, float | str]]:
    """Self milliseconds per decode step by function, one request, as the Python profiler sees them (it adds its own
    cost to every call, so the sum is larger than a step)."""
    steps = 0
    trace = cProfile.Profile()
    decode = engine.runner.decode

    def traced(requests: Any) -> None:
        nonlocal steps
        steps += 1
        trace.enable()
        decode(requests)
        trace.disable()

    engine.runner.decode = traced  # type: ignore[method-assign]
    ask(engine, [prompt], 60)
    engine.runner.decode = decode  # type: ignore[method-assign]
    rows = sorted(pstats.Stats(trace).stats.items(), key=lambda row: -row[1][2])[:16]  # type: ignore[attr-defined]
    return [
        {"function": f"{Path(file).name}:{name}", "ms_per_step": round(1000 * own / steps, 3), "calls": calls // steps}
        for (file, _, name), (calls, _, own, _, _) in rows
    ]


def soloist_side(args: argparse.Namespace, knobs: dict[str, str], prompts: list[list[int]]) -> dict[str, Any]:
    """Rates and ids of one engine in this process."""
    engine = build_engine(resolve({"model": "demo", "threads": str(args.threads), **knobs}, {}, {}))
    ask(engine, prompts[:1], 30)
    rates: dict[str, float] = {}
    rates["C1"], (request,) = ask(engine, [prompts[args.round]], args.tokens)
    for c in (4, 8):
        rates[f"C{c}"], _ = ask(engine, prompts[:c], args.tokens)
    traced = profile(engine, prompts[0]) if args.round == 1 else []
    engine.close()
    return {"rates": rates, "ids": request.output, "profile": traced}


def transformers_side(args: argparse.Namespace, prompts: list[list[int]]) -> dict[str, Any]:
    from oracle.target import load_target

    torch.set_num_threads(args.threads)
    oracle = load_target(demo.path())
    oracle_rate(oracle, prompts[0], 10)
    rate, ids = oracle_rate(oracle, prompts[args.round], args.tokens)
    return {"rates": {"C1": rate}, "ids": ids, "profile": []}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=160)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--side", choices=("transformers", "plain", "default"), help=argparse.SUPPRESS)
    parser.add_argument("--round", type=int, default=0, help=argparse.SUPPRESS)
    args = parser.parse_args()
    prompts = [e["prompt_ids"] for e in json.loads(GOLDEN.read_text())["entries"]][:8]
    if args.side == "transformers":
        print(json.dumps(transformers_side(args, prompts)))
        return
    if args.side:
        print(json.dumps(soloist_side(args, PLAIN if args.side == "plain" else {"prefix_cache": "0"}, prompts)))
        return
    # A process per side: an OpenMP team left over from one library would slow the other down.
    rates: dict[str, list[float]] = {}
    traced: list[Any] = []
    for round_ in range(args.rounds):
        ids: dict[str, list[int]] = {}
        for side in ("transformers", "plain", "default"):
            flags = [
                "--side",
                side,
                "--round",
                str(round_),
                "--tokens",
                str(args.tokens),
                "--threads",
                str(args.threads),
            ]
            # Here torch is imported before soloist, which would have set this; transformers keeps OpenMP's default.
            spin = {} if side == "transformers" else {"GOMP_SPINCOUNT": "10000"}
            command = [sys.executable, __file__, *flags]
            done = subprocess.run(command, capture_output=True, text=True, check=True, env={**os.environ, **spin})
            found = json.loads(done.stdout.splitlines()[-1])
            ids[side] = found["ids"]
            traced = found["profile"] or traced
            for name, rate in found["rates"].items():
                rates.setdefault(f"{side} {name}", []).append(round(rate, 1))
        if not ids["transformers"] == ids["plain"] == ids["default"]:
            sys.exit(f"round {round_}: the ids differ")
    middle = {name: statistics.median(values) for name, values in rates.items()}
    result = {
        "what": "decode tok/s (C x 1000 / mean TPOT), greedy, fp32, bundled demo; equal ids on all sides",
        "command": " ".join(["tools/cpu_decode.py", *sys.argv[1:]]),
        "machine": machine(),
        "versions": versions(),
        "threads": args.threads,
        "tokens_per_s": rates,
        "median": middle,
        "ratios": {
            "C1, SPEC=none, over transformers": round(middle["plain C1"] / middle["transformers C1"], 2),
            "C1, default knobs (MTP, lookup), over transformers": round(
                middle["default C1"] / middle["transformers C1"], 2
            ),
            "C8 over C1, SPEC=none": round(middle["plain C8"] / middle["plain C1"], 2),
        },
        "profile_ms_per_step": traced,
    }
    text = json.dumps(result, indent=1)
    print(text)
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
