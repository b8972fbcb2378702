"""Everything that is to be read off a card, in parts of at most ten minutes each.

    python3 tools/card_run.py tests --out OUT        # all of tests/gpu, test by test
    python3 tools/card_run.py steps --out OUT        # verify steps, and whole steps of the engine's loop, at 27B shape
    python3 tools/card_run.py memory --out OUT       # starts cold and warm, and bytes by name inside 24 GiB
    python3 tools/card_run.py kvarn --out OUT        # KVarN's kernels, contracts and steps
    python3 tools/card_run.py --list

A part is a list of commands; each has a limit of its own and writes OUT/PART.txt as it goes, so that a part that is cut
short leaves what it has. JSON documents (the last line of a benchmark; every one of a benchmark that failed) go to
OUT/PART.json, one more after every command, with the exit codes and seconds. One command that fails ends no other.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

ROOT = Path(__file__).resolve().parent.parent
PART_S = 570  # of ten minutes: the rest is for saying what came of it
MODEL_BYTES = 18 << 30  # a random 27B directory
# The options of pyproject.toml refuse to run where a plugin they name is not installed.
PYTEST = "{python} -m pytest -o addopts=--import-mode=importlib -p no:cacheprovider -v"


@dataclass(frozen=True)
class Step:
    """One command from the repository's root; it may take `limit_s` seconds, or what its part has left."""

    name: str
    command: str
    limit_s: int


PARTS = {
    "tests": [Step("tests/gpu", PYTEST + " -ra --durations=25 -m 'not slow and not full' tests/gpu", 560)],
    "steps": [
        Step("step bf16", "{python} -m soloist.bench.step", 170),
        Step("step fp8 25k", "{python} -m soloist.bench.step --kv fp8 --rows 16 --contexts 25600", 90),
        Step("loop, card", "{python} -m soloist.bench.loop --roads card", 300),
    ],
    "kvarn": [
        Step("kernels", PYTEST + " tests/ops/test_triton_kvarn.py", 120),
        Step("contracts", PYTEST + " tests/gpu/test_engine.py -k tiles", 300),
        Step("step", "{python} -m soloist.bench.step --kv kvarn --rows 1,16 --contexts 1024,25600", 140),
    ],
    "memory": [
        Step("starts", "{python} -m soloist.bench.memory --dir {scratch} --cases cold-start,warm-start,mtp-start", 260),
        Step("fp8", "{python} -m soloist.bench.memory --dir {scratch} --cases fp8-residents --limit 200", 220),
        Step("fp8, one", "{python} -m soloist.bench.memory --dir {scratch} --cases fp8-full-context --limit 200", 220),
    ],
}


def scratch() -> Path:
    """Where the random model directory goes: memory if it has the room."""
    memory = Path("/dev/shm")
    roomy = memory.is_dir() and shutil.disk_usage(memory).free > 2 * MODEL_BYTES
    return (memory if roomy else Path(tempfile.gettempdir())) / "soloist-27b"


def environment() -> dict[str, str]:
    """The package from this checkout, its tests' helpers, and output as it comes."""
    paths = [str(ROOT / "src"), str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(p for p in paths if p),
        "PYTHONUNBUFFERED": "1",
        "PYTHONFAULTHANDLER": "1",
    }


def run(step: Step, left: float, log: TextIO) -> dict[str, Any]:
    """The command's exit code, seconds, and its last line where that is a JSON object. What came to no good end leaves
    every such line: the last one need not hold the others."""
    command = step.command.format(python=sys.executable, scratch=scratch())
    limit = max(1.0, min(step.limit_s, left))
    log.write(f"\n== {step.name} (at most {limit:.0f} s): {command}\n")
    log.flush()
    began = time.monotonic()
    process = subprocess.Popen(
        command, shell=True, cwd=ROOT, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        errors="replace", start_new_session=True,
    )  # fmt: skip
    signal.signal(signal.SIGALRM, lambda *_: _end(process))
    signal.alarm(int(limit))
    last, documents = "", []
    assert process.stdout is not None
    try:
        for line in process.stdout:
            sys.stdout.write(line)
            sys.stdout.flush()
            log.write(line if len(line) < 4000 else line[:200] + " ... (the document is in the JSON file)\n")
            log.flush()
            last = line if line.strip() else last
            if (said := _document(line)) is not None:
                documents.append(said)
        code = process.wait()
    finally:
        signal.alarm(0)
    seconds = time.monotonic() - began
    found: dict[str, Any] = {"name": step.name, "command": command, "code": code, "seconds": round(seconds, 1)}
    found["ended_by_limit"] = code == -signal.SIGKILL and seconds >= limit - 1
    if documents and _document(last) is not None:
        found["document"] = documents[-1]
    if documents and code != 0:
        found["documents"] = documents
    log.write(f"== {step.name}: exit code {code} after {seconds:.0f} s\n")
    return found


def _end(process: subprocess.Popen[str]) -> None:
    """End the command with everything it started; it may have ended this very moment."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def _document(line: str) -> dict[str, Any] | None:
    try:
        found = json.loads(line)
    except ValueError:
        return None
    return found if isinstance(found, dict) else None


def play(part: str, steps: list[Step], out: Path, seconds: float = PART_S) -> int:
    """Run a part; the number of commands that failed."""
    out.mkdir(parents=True, exist_ok=True)
    began, results = time.monotonic(), []
    with (out / f"{part}.txt").open("w", encoding="utf-8") as log:
        for step in steps:
            results.append(run(step, seconds - (time.monotonic() - began), log))
            (out / f"{part}.json").write_text(json.dumps({"part": part, "results": results}, indent=1))
    for one in results:
        print(f"{one['name']}: {'ok' if one['code'] == 0 else 'FAILED'} in {one['seconds']} s")
    return sum(one["code"] != 0 for one in results)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("part", nargs="?", choices=sorted(PARTS))
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", "benchmarks/card-run")))
    parser.add_argument("--list", action="store_true", help="print the commands and stop")
    args = parser.parse_args()
    if args.list or args.part is None:
        for part, steps in PARTS.items():
            print("\n".join(f"{part:8} {s.limit_s:4} s  {s.name:14} {s.command}" for s in steps))
        return 0
    return 1 if play(args.part, PARTS[args.part], args.out) else 0


if __name__ == "__main__":
    sys.exit(main())
