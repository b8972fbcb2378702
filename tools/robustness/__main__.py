"""The command line: run one check, print its result, file it under its name."""

from __future__ import annotations

import argparse
import json
import os
from datetime import UTC, datetime
from importlib import import_module
from pathlib import Path

from soloist.bench.machine import commit, machine, versions

CHECKS = ("schemas", "malformed", "leaving", "gap")


def main() -> None:
    parser = argparse.ArgumentParser(prog="tools.robustness", description="What the server withstands.")
    parser.add_argument("check", choices=CHECKS)
    parser.add_argument("--count", type=int, help="how many requests (default: the check's own number)")
    parser.add_argument("--out", type=Path, help="file the result under its name in this JSON")
    args = parser.parse_args()
    check = import_module(f"tools.robustness.{args.check}")
    count = args.count or check.COUNT
    result = {
        "what": check.WHAT,
        "command": f"PYTHONPATH=src:tests python -m tools.robustness {args.check} --count {count}",
        "taken": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": commit(),
        "machine": machine(),
        "load_average": [round(x, 1) for x in os.getloadavg()],
        "versions": versions(),
        "result": check.run(count),
    }
    print(json.dumps(result["result"], indent=1, ensure_ascii=False))
    if args.out:
        sections = json.loads(args.out.read_text()) if args.out.is_file() else {}
        sections[args.check] = result
        args.out.write_text(json.dumps(sections, indent=1, ensure_ascii=False, sort_keys=True) + "\n")


main()
