"""Decode of the bundled demo on this CPU by kind of text: default knobs against SPEC=none LOOKUP=0.

    PYTHONPATH=src:tests python tools/cpu_classes.py --out benchmarks/cpu/classes.json

Rows cost compute on a CPU, so drafting has to earn its place: this says where it does, and what a step costs where it
does not. Both sides decode the same ids (checked), one request at a time, prompt by prompt in turn; a prompt's time is
the fastest of its rounds, since an interruption only ever adds time. `undraftable` is random ids continued at T=1,
where next to nothing is accepted. Take it on a machine that does nothing else.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
from pathlib import Path
from typing import Any

from speculation import decode, tasks

from soloist.bench.machine import commit, machine, versions
from soloist.engine.build import build_engine
from soloist.engine.engine import Engine
from soloist.engine.request import Request
from soloist.settings import resolve

SIDES = {"none": {"spec": "none", "lookup": "0"}, "default": {}}
AT_LEAST = {"chat": 1.15, "copying": 2.5}  # and 0.97 everywhere else


def work() -> dict[str, tuple[list[list[int]], int, dict[str, Any]]]:
    """kind -> (prompts, tokens to decode, sampling)."""
    greedy: dict[str, Any] = {"temperature": 0.0}
    kinds = {name: (task.prompts, task.tokens, greedy) for name, task in tasks().items()}
    rng = random.Random(4)
    noise = [[rng.randrange(16_000) for _ in range(120)] for _ in range(3)]
    kinds["undraftable"] = (noise, 120, {"temperature": 1.0, "seed": 11})
    sampled = {"temperature": 1.0, "seed": 7}
    kinds["chat at T=1"] = (kinds["chat"][0], kinds["chat"][1], sampled)
    return kinds


def build(name: str, threads: int) -> Engine:
    settings = {"model": "demo", "threads": str(threads), "prefix_cache": "0", "settle": "0", **SIDES[name]}
    engine = build_engine(resolve(settings, {}, {}))
    decode(engine, [list(range(100, 140))], 30, {"temperature": 0.0})  # warm
    return engine


def compare(
    engines: dict[str, Engine], prompts: list[list[int]], tokens: int, params: dict[str, Any], rounds: int
) -> dict[str, Any]:
    """One kind of text: every prompt on both sides in turn, `rounds` times. Raises SystemExit if a text differs."""
    seconds: dict[str, list[list[float]]] = {name: [[] for _ in prompts] for name in engines}
    last: dict[str, list[Request]] = {name: [] for name in engines}
    for number in range(rounds):
        for name in engines:
            last[name] = []
        for i, prompt in enumerate(prompts):
            for name in sorted(engines, reverse=bool((number + i) % 2)):
                (done,) = decode(engines[name], [prompt], tokens, params)
                seconds[name][i].append(done.stats.last_token - done.stats.first_token)
                last[name].append(done)
        if any(a.output != b.output for a, b in zip(last["none"], last["default"], strict=True)):
            sys.exit(f"round {number}: the ids differ")
    decoded = sum(len(r.output) - 1 for r in last["none"])
    best = {name: sum(min(of) for of in seconds[name]) for name in engines}
    each = [sum(of[n] for of in seconds["none"]) / sum(of[n] for of in seconds["default"]) for n in range(rounds)]
    row: dict[str, Any] = {"ratio": round(best["none"] / best["default"], 3), "ratios": [round(r, 3) for r in each]}
    for name, requests in last.items():
        steps = sum(r.stats.steps for r in requests)
        row[name] = {
            "tokens_per_s": round(decoded / best[name], 2),
            "ms_per_step": round(1000 * best[name] / steps, 3),
            "tokens_per_step": round(decoded / steps, 3),
            "drafting_steps": round(sum(r.stats.draft_steps for r in requests) / steps, 3),
        }
    return row


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--kinds", default="", help="only these, separated by commas")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    engines = {name: build(name, args.threads) for name in SIDES}
    table = {}
    for kind, (prompts, tokens, params) in work().items():
        if args.kinds and kind not in args.kinds.split(","):
            continue
        row = compare(engines, prompts, tokens, params, args.rounds)
        table[kind] = {"wanted": AT_LEAST.get(kind, 0.97), **row}
        print(f"{kind:24} {row['ratio']:5.2f} x  (wanted {table[kind]['wanted']}; rounds {row['ratios']})", flush=True)
    for engine in engines.values():
        engine.close()
    result = {
        "what": "decode tok/s of one request, default knobs over SPEC=none LOOKUP=0, by kind of text; equal ids",
        "command": " ".join(["tools/cpu_classes.py", *sys.argv[1:]]),
        "machine": machine(),
        "load_average": [round(x, 1) for x in os.getloadavg()],
        "versions": versions(),
        "commit": commit(),
        "threads": args.threads,
        "kinds": table,
    }
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(result, indent=1) + "\n")
    return int(any(row["ratio"] < row["wanted"] for row in table.values()))


if __name__ == "__main__":
    sys.exit(main())
