"""From process start to the first streamed character of `soloist chat`, server start included.

python tools/first_token.py --runs 3 --out benchmarks/cpu/first_token.json
"""

from __future__ import annotations

import argparse
import json
import os
import pty
import select
import statistics
import subprocess
import sys
import time
from pathlib import Path


def first_token(port: int) -> float:
    """Seconds until the answer to a piped question begins. The chat starts its own server and stops it."""
    began = time.perf_counter()
    command = [str(Path(sys.executable).with_name("soloist")), "chat", "--port", str(port)]
    leader, follower = pty.openpty()  # stderr of a terminal, so that progress does not change how output is buffered
    chat = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=follower)
    assert chat.stdin is not None and chat.stdout is not None
    chat.stdin.write(b"Hello, who are you?\n")
    chat.stdin.close()
    seconds = 0.0
    while not seconds:
        ready, _, _ = select.select([chat.stdout, leader], [], [], 60)
        if not ready:
            raise SystemExit("no answer within a minute")
        if leader in ready:
            os.read(leader, 65536)
        if chat.stdout in ready and os.read(chat.stdout.fileno(), 1):
            seconds = time.perf_counter() - began
    chat.stdout.read()
    chat.wait()
    os.close(leader)
    os.close(follower)
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--port", type=int, default=18971)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    from soloist.bench.machine import machine, versions

    found = [round(first_token(args.port), 2) for _ in range(args.runs)]
    result = {
        "what": "seconds from the start of `soloist chat` to the first streamed character, its server's start included",
        "command": " ".join(["tools/first_token.py", *sys.argv[1:]]),
        "machine": machine(),
        "versions": versions(),
        "seconds": found,
        "median": statistics.median(found),
    }
    text = json.dumps(result, indent=1)
    print(text)
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
