"""Run tests and keep what they found as data: outcome, CPU seconds and recorded properties of every test.

    python tools/record_tests.py --out benchmarks/cpu/contracts.json -- -m full tests/drafting/test_contracts_demo.py

A test says what it found with pytest's `record_property`. Tests already in the file are kept, or replaced when they ran
again; so a long sweep can be taken in pieces, with `--resume` only those that have not passed yet. The file is written
after every test.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from soloist.bench.machine import commit, machine, versions


class Recorder:
    """A pytest plugin that merges each finished test into `path`; tests name the run they are from by its number."""

    def __init__(self, path: Path, command: str, resume: bool) -> None:
        self.path, self.resume = path, resume
        self.kept: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {"runs": [], "tests": {}}
        run = {"command": command, "commit": commit(), "machine": machine(), "versions": versions()}
        if run not in self.kept["runs"]:
            self.kept["runs"].append(run)
        self.run = self.kept["runs"].index(run)
        self.began = time.process_time()

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        done = {name for name, entry in self.kept["tests"].items() if entry["outcome"] == "passed"}
        if self.resume:
            items[:] = [item for item in items if item.nodeid not in done]

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        used, self.began = time.process_time() - self.began, time.process_time()
        if report.when == "teardown" or (report.when == "setup" and report.passed):
            return
        found = {name: round(v, 3) if isinstance(v, float) else v for name, v in report.user_properties}
        entry = {"outcome": report.outcome, "cpu_s": round(used, 1), **found, "run": self.run}
        self.kept["tests"][report.nodeid] = entry
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_text(json.dumps(self.kept, indent=1) + "\n")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--resume", action="store_true", help="leave out what has passed in --out already")
    parser.add_argument("pytest", nargs="+", help="arguments for pytest, after --")
    args = parser.parse_args()
    command = " ".join(["tools/record_tests.py", *sys.argv[1:]])
    return int(
        pytest.main([*args.pytest, "-p", "no:cacheprovider"], plugins=[Recorder(args.out, command, args.resume)])
    )


if __name__ == "__main__":
    sys.exit(main())
