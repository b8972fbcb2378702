"""`python -m soloist.bench.kernels`: what compiling an engine's kernels takes, for a card that need not be here.

Writes a directory of a named shape without bytes, rehearses a start on the card (`ops/rehearsal.py`), and compiles what
was asked for three times: into an empty cache with one worker, which is what first launches did one after the other;
into an empty cache with all of them; and into that cache again. Last line: one JSON document.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

from soloist.bench.machine import machine, versions
from soloist.bench.synthetic import SHAPES
from soloist.bench.synthetic_dir import write_synthetic
from soloist.cores import usable_cores
from soloist.ops.aot import SHARED_LIMIT
from soloist.ops.rehearsal import Card, Job, compile_all

# Multiprocessors of a card of each kind; they decide no variant.
PROCESSORS = {80: 108, 86: 82, 89: 128, 90: 132, 120: 170}


def card(arch: int) -> Card:
    """A card of 24 GiB with the limits of sm_`arch`."""
    return Card(f"sm_{arch}", arch, PROCESSORS[arch], SHARED_LIMIT[arch], 24 << 30)


def timed(jobs: list[Job], workers: int, base: Path) -> dict[str, Any]:
    """Compile into `base`; seconds on the clock and of all processes' work."""
    os.environ["TRITON_CACHE_DIR"] = str(base / "triton")
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    outcomes = compile_all(jobs, workers, base / "kernels")
    seconds, after = time.perf_counter() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
    work = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    longest = sorted(((o.seconds, o.name) for o in outcomes), reverse=True)[:5]
    return {
        "workers": workers,
        "seconds": round(seconds, 2),
        "cpu_seconds": round(work, 2),
        "known": sum(o.known for o in outcomes),
        "failed": [f"{o.name}: {o.error}" for o in outcomes if o.error],
        "longest": [f"{name} {took} s" for took, name in longest],
    }


def main() -> None:
    """Run the command."""
    from soloist.engine.rehearsal import rehearse
    from soloist.settings import resolve

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--arch", type=int, default=86, choices=sorted(SHARED_LIMIT))
    parser.add_argument("--shape", default="qwen3.8-27b", choices=sorted(SHAPES))
    parser.add_argument("--knobs", default="spec=dflash2,kv_format=fp8", help="name=value, comma-separated")
    parser.add_argument("--workers", type=int, default=usable_cores())
    args = parser.parse_args()
    knobs = dict(pair.split("=") for pair in args.knobs.split(","))
    with tempfile.TemporaryDirectory() as scratch:
        base = Path(scratch)
        write_synthetic(base / "model", SHAPES[args.shape](64), hollow=True)
        settings = resolve({"model": str(base / "model"), "device": "cuda", **knobs}, {}, {})
        began, work = time.perf_counter(), time.process_time()
        jobs = list(rehearse(settings, card(args.arch)).jobs.values())
        rehearsal = {
            "seconds": round(time.perf_counter() - began, 2),
            "cpu_seconds": round(time.process_time() - work, 2),
            "variants": len(jobs),
            "by_kernel": dict(Counter(job.name for job in jobs).most_common()),
        }
        print("rehearsal", rehearsal, flush=True)
        runs = {}
        for name, workers, where in (
            ("one after the other", 1, "serial"),
            ("side by side", args.workers, "parallel"),
            ("known", args.workers, "parallel"),
        ):
            runs[name] = timed(jobs, workers, base / where)
            print(name, runs[name], flush=True)
    document = {
        "command": f"python -m soloist.bench.kernels --arch {args.arch} --knobs {args.knobs}",
        "shape": args.shape,
        "arch": args.arch,
        "knobs": knobs,
        "rehearsal": rehearsal,
        "runs": runs,
        "load_average": os.getloadavg()[0],
        "machine": machine(),
        "versions": versions(),
    }
    print(json.dumps(document))


if __name__ == "__main__":
    main()
