"""`python -m soloist.bench.memory`: does an engine really fit where the plan says it fits, and how soon is it there?

Writes a random model directory of a named shape once (`synthetic_dir.py`), gives this process a share of the card as
large as a smaller card, and builds the engine as `soloist serve` does. Each case runs in a process of its own: phases
of the start-up and the kernels compiled in it, the plan's bytes against the allocator's, then as many residents as the
plan promises, all at once. Cases that are not about time also name every byte (`ledger.py`) and every byte fetched
after the boot. The first case finds no kernel compiled, the others find what it left. One JSON document last; a
resident that did not run or a plan that is off by more than 1 % ends with exit code 1.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import random
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from soloist.bench import ledger
from soloist.bench.compilations import Compilations
from soloist.bench.machine import machine, versions
from soloist.bench.synthetic import SHAPES
from soloist.bench.synthetic_dir import synthetic_directory

STARTED = time.perf_counter()
MARK = "RESULT "
CARD, OTHERS = 24 << 30, int(0.3 * (1 << 30))


@dataclass(frozen=True)
class Case:
    """An engine of these knobs, then `residents` prompts of `context` tokens at once, `tokens` answered by each.

    `names`: every byte is named, which slows the start a little.
    """

    name: str
    knobs: dict[str, str]
    residents: int = 0
    context: int = 0
    tokens: int = 24
    names: bool = True


def cases() -> dict[str, Case]:
    """A start with no kernel known and starts with all of them; what the plan promises for 24 GiB."""
    dflash, mtp = {"spec": "dflash2"}, {"spec": "mtp"}
    # Prompts that come in slowly give the first ones time to end before the last one is there.
    several = dflash | {"prefill_slice_ms": "1000"}
    table = [
        Case("cold-start", dflash | {"kv_format": "fp8"}, names=False),
        Case("warm-start", dflash | {"kv_format": "fp8"}, names=False),
        Case("mtp-start", mtp | {"kv_format": "fp8"}, names=False),
        Case("bf16-residents", several | {"kv_format": "bf16"}, 8, 11_000),
        Case("fp8-residents", several | {"kv_format": "fp8"}, 8, 16_000),
        Case("int8-residents", several | {"kv_format": "int8"}, 8, 16_000),
        Case("bf16-full-context", dflash | {"kv_format": "bf16"}, 1, 0),
        Case("fp8-full-context", dflash | {"kv_format": "fp8"}, 1, 0),
    ]
    return {case.name: case for case in table}


class _Asked:
    """One greedy request of random tokens; ends after `tokens` tokens whatever they are."""

    def __init__(self, engine: Any, length: int, tokens: int, seed: int) -> None:
        from soloist.engine.request import Request
        from soloist.sampling.params import SamplingParams

        rng = random.Random(seed)
        prompt = [rng.randrange(200_000) % engine.vocab_size for _ in range(length)]
        self.events: queue.Queue[Any] = queue.Queue()
        self.request = Request(prompt, SamplingParams(max_tokens=tokens, temperature=0.0), self.events.put)
        self.asked = time.perf_counter()
        self.first = 0.0
        engine.submit(self.request)

    def take(self, until: str, timeout: float = 400.0) -> int:
        """Wait for the first token or the end; returns the tokens that came."""
        count = 0
        while True:
            event = self.events.get(timeout=timeout)
            if event.error is not None:
                raise event.error
            count += len(event.tokens)
            if count and not self.first:
                self.first = time.perf_counter()
            if event.finish_reason is not None or (until == "first" and count):
                return count


def run_case(case: Case, directory: Path, card: int, used: int) -> dict[str, Any]:
    """Build, compare, fill. The process's share of the card is what a card of `card` bytes would leave it."""
    from soloist import planner
    from soloist.checkpoint.reader import open_checkpoint
    from soloist.engine.build import build_engine
    from soloist.engine.capacity import choices, drafter_of
    from soloist.settings import resolve

    device = torch.device("cuda")
    kernels = Compilations()
    kernels.watch()
    if case.names:
        ledger.record()
    share = card - used - planner.DRIVER - planner.CONTEXT
    torch.cuda.set_per_process_memory_fraction(share / torch.cuda.mem_get_info(device)[1])
    settings = resolve({"model": str(directory), "session_dir": "none", **case.knobs}, {}, {})
    checkpoint = open_checkpoint(directory)
    chosen = choices(settings, checkpoint, "bfloat16", device)
    drafter, drafter_bytes = drafter_of(settings, checkpoint, chosen)
    plan = planner.plan(
        checkpoint.config, checkpoint.nbytes(), chosen, card=card, used=used, drafter=drafter,
        drafter_bytes=drafter_bytes,
    )  # fmt: skip
    marks = [("import and headers", time.perf_counter() - STARTED)]

    begun = ["open"]

    def progress(what: str, done: int, total: int) -> None:
        """A part ends where the next one is first heard of."""
        if what != begun[-1]:
            marks.append((begun[-1], time.perf_counter() - STARTED))
            begun.append(what)

    engine = build_engine(settings, progress)
    marks.append((begun[-1], time.perf_counter() - STARTED))
    booted = ledger.held(device)
    at_boot = kernels.report()
    greeting = _Asked(engine, 64, 8, 0)
    greeting.take("first")
    marks.append(("first token", time.perf_counter() - STARTED))
    greeting.take("end")
    served = ledger.held(device)
    torch.cuda.reset_peak_memory_stats(device)
    record: dict[str, Any] = {
        "case": asdict(case),
        "plan": {"pool_tokens": plan.pool_tokens, "items": {i.name: i.nbytes for i in plan.items}},
        "pool_tokens": engine.memory.pages.total * 64,
        "max_len": engine.max_len,
        "phases_s": _phases(marks),
        "first_token_s": round(marks[-1][1], 2),
        "booted": booted,
        "first_answer": served,
        "kernels_at_boot": at_boot,
        "kernels_at_first_answer": kernels.report(),
        "knobs": dict(engine.status().knobs),
        "degraded": list(engine.status().degraded),
    }
    since = 0
    if case.names:
        snapshot = torch.cuda.memory._snapshot()
        since = ledger.latest(snapshot)
        record["bytes"] = ledger.named(snapshot)
        ledger.record(ledger.LATER)
    # What is known so far counts even where the rest does not come to its end.
    print(MARK + json.dumps(record | {"plan_error": 0.0, "ok": False, "error": "not filled in time"}), flush=True)
    if case.residents:
        context = case.context or engine.max_len - case.tokens - 1
        record["filled"] = _fill(engine, case, context, device)
    record["later"] = ledger.held(device)
    record["kernels_later"] = kernels.report()
    if case.names:
        record["fetched_after_first_answer"] = ledger.fetched(torch.cuda.memory._snapshot(), since)
    engine.close()
    off = record["pool_tokens"] / plan.pool_tokens - 1
    record["plan_error"] = round(off, 4)
    # A reading, not a promise: another machine's context may be larger than planned.
    record["ok"] = abs(off) <= 0.01 and record.get("filled", {}).get("ok", True)
    return record


def _phases(marks: list[tuple[str, float]]) -> dict[str, float]:
    """Seconds between one mark and the next."""
    return {name: round(at - before, 2) for (name, at), (_, before) in zip(marks, [("", 0.0), *marks], strict=False)}


def _fill(engine: Any, case: Case, context: int, device: torch.device) -> dict[str, Any]:
    """All residents at once: every one must decode while the others do, none parked."""
    begun = time.perf_counter()
    # Several must still be answering when the last one's prompt is in.
    room = min(engine.max_len, engine.memory.pages.total * 64 // case.residents - 64) - context - 1
    tokens = case.tokens if case.residents == 1 else min(4000, room)
    asked = [_Asked(engine, context, tokens, 1 + i) for i in range(case.residents)]
    for one in asked:
        one.take("first")
    prompts = time.perf_counter() - begun
    status = engine.status()
    together, parked = status.running, status.counters.get("preemptions", 0)
    for one in asked:
        engine.cancel(one.request) if case.residents > 1 else one.take("end")
    return {
        "context": context,
        "together": together,
        "parked": parked,
        "pages_used": status.pages_used,
        "prompts_s": round(prompts, 2),
        "prompt_tokens_per_s": round(context * case.residents / prompts),
        "ok": together >= case.residents and not parked,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", default="qwen3.8-27b", choices=sorted(SHAPES))
    parser.add_argument("--layers", type=int, default=64)
    parser.add_argument("--dir", type=Path, help="where the random model directory is, or is to be written")
    parser.add_argument("--cases", default="", help="names, comma-separated (default: all)")
    parser.add_argument("--case", help="run one case in this process")
    parser.add_argument("--limit", type=int, default=240, help="seconds a case may take")
    args = parser.parse_args()
    known = cases()
    if args.case:
        directory = synthetic_directory(args.dir, args.shape, args.layers)
        print(MARK + json.dumps(run_case(known[args.case], directory, CARD, OTHERS)), flush=True)
        return 0
    with tempfile.TemporaryDirectory() as scratch:
        base = args.dir or Path(scratch) / "model"
        begun = time.perf_counter()
        synthetic_directory(base, args.shape, args.layers)
        print(f"{base} written or found in {time.perf_counter() - begun:.1f} s", flush=True)
        # Caches of their own: the first case compiles every kernel, the others find them.
        caches = {"XDG_CACHE_HOME": f"{scratch}/cache", "TRITON_CACHE_DIR": f"{scratch}/triton"}
        results = []
        for name in filter(None, args.cases.split(",")) if args.cases else known:
            command = [
                sys.executable,
                "-m",
                "soloist.bench.memory",
                "--shape",
                args.shape,
                "--layers",
                str(args.layers),
            ]
            command += ["--dir", str(base), "--case", name]
            results.append(_one(name, command, os.environ | caches, args.limit))
            print(json.dumps(results[-1]), flush=True)
    document = {"shape": args.shape, "layers": args.layers, "card_bytes": CARD, "others_bytes": OTHERS}
    document |= {"machine": machine(), "versions": versions(), "results": results}
    print(json.dumps(document))
    return 0 if all(r["ok"] for r in results) else 1


def _one(name: str, command: list[str], environment: dict[str, str], limit: int) -> dict[str, Any]:
    """One case in its own process; what went wrong is a result too."""
    with tempfile.TemporaryFile("w+") as said, tempfile.TemporaryFile("w+") as complained:
        try:
            subprocess.run(command, env=environment, stdout=said, stderr=complained, timeout=limit, check=False)
            reason = ""
        except subprocess.TimeoutExpired:
            reason = f"not done in {limit} s\n"
        said.seek(0), complained.seek(0)
        lines = [x for x in said.read().splitlines() if x.startswith(MARK)]
        reason += complained.read()[-2000:]
    if not lines:
        return {"case": {"name": name}, "ok": False, "error": reason}
    record = json.loads(lines[-1].removeprefix(MARK))
    return record if record["ok"] else record | {"stderr": reason}


if __name__ == "__main__":
    sys.exit(main())
