"""Decode of the bundled demo on this CPU by kind of text: default knobs against SPEC=none LOOKUP=0.

    PYTHONPATH=src:tests python tools/cpu_classes.py --out benchmarks/cpu/classes.json

Rows cost compute on a CPU, so drafting has to earn its place: this says where it does, and what a step costs where it
does not. Both sides decode the same ids (checked), one request at a time, in a process of their own, in turn; the
ratio of a kind is the median over rounds. `undraftable` is random ids continued at T=1, where next to nothing is
accepted. Take it on a machine that does nothing else.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from speculation import decode, tasks

from soloist.bench.machine import commit, machine, versions
from soloist.engine.build import build_engine
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


def side(name: str, threads: int) -> dict[str, Any]:
    """Every kind on one engine: tok/s, ms per step, what was drafted and accepted, and the ids for comparison."""
    settings = {"model": "demo", "threads": str(threads), "prefix_cache": "0", "settle": "0", **SIDES[name]}
    engine = build_engine(resolve(settings, {}, {}))
    decode(engine, [list(range(100, 140))], 30, {"temperature": 0.0})  # warm
    found = {}
    for kind, (prompts, tokens, params) in work().items():
        done = [decode(engine, [prompt], tokens, params)[0] for prompt in prompts]
        seconds = sum(r.stats.last_token - r.stats.first_token for r in done)
        steps = sum(r.stats.steps for r in done)
        decoded = sum(len(r.output) - 1 for r in done)
        found[kind] = {
            "tokens_per_s": decoded / seconds,
            "ms_per_step": 1000 * seconds / steps,
            "tokens_per_step": decoded / steps,
            "drafting_steps": sum(r.stats.draft_steps for r in done) / steps,
            "ids": [r.output for r in done],
        }
    engine.close()
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--side", choices=tuple(SIDES), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.side:
        print(json.dumps(side(args.side, args.threads)))
        return 0
    rounds: list[dict[str, Any]] = []
    for number in range(args.rounds):
        found: dict[str, Any] = {}
        # One side after the other, and the other way round the next time.
        for name in sorted(SIDES, reverse=bool(number % 2)):
            command = [sys.executable, __file__, "--side", name, "--threads", str(args.threads)]
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
            found[name] = json.loads(done.stdout.splitlines()[-1])
        for kind in found["none"]:
            if found["none"][kind].pop("ids") != found["default"][kind].pop("ids"):
                sys.exit(f"round {number}, {kind}: the ids differ")
        rounds.append(found)
    table = {}
    for kind in rounds[0]["none"]:
        middle = {
            name: {k: round(statistics.median(r[name][kind][k] for r in rounds), 3) for k in rounds[0][name][kind]}
            for name in SIDES
        }
        ratios = [r["default"][kind]["tokens_per_s"] / r["none"][kind]["tokens_per_s"] for r in rounds]
        table[kind] = {
            "ratio": round(statistics.median(ratios), 3),
            "ratios": [round(r, 3) for r in ratios],
            "wanted": AT_LEAST.get(kind, 0.97),
            **middle,
        }
        print(f"{kind:24} {table[kind]['ratio']:5.2f} x  (wanted {table[kind]['wanted']})")
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
