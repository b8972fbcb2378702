"""Take every figure of the demo on this CPU again, one after the other, and write the pages that show them.

    python tools/retake.py                        # all, 15 to 20 minutes on two quiet cores
    python tools/retake.py decode single          # some
    python tools/retake.py --card                 # single, document and ladder of the demo on a card, some minutes
    python tools/retake.py --list

Nothing else should run meanwhile: every result carries the load average. A run that fails is named at the end, and the
exit code says so. `soak` takes half an hour and is not among them: `make soak`.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PORT = 18955
URL = f"--url http://127.0.0.1:{PORT}"
COMMON = f"{URL} --no-thinking --out benchmarks/demo-cpu"
SERVE = f"soloist serve demo --port {PORT}"

# Need no server, share one, and restart their own.
TOOLS = {
    "decode": "python tools/cpu_decode.py --threads 2 --rounds 3 --tokens 100 --out benchmarks/cpu/decode.json",
    "first-token": "python tools/first_token.py --runs 4 --out benchmarks/cpu/first_token.json",
    "classes": "python tools/cpu_classes.py --threads 2 --rounds 5 --out benchmarks/cpu/classes.json",
    "speculation": "python tools/speculation.py --threads 2 --out benchmarks/cpu/speculation.json",
}
SCENARIOS = {
    "smoke": f"soloist bench smoke {COMMON} --name smoke",
    "single": f"soloist bench single {COMMON} --name single --max-tokens 256 --repeat 2",
    "ladder": f"soloist bench ladder {COMMON} --name ladder --prompt-tokens 600 --max-tokens 96 --rungs 1,2,4,6,8 "
    "--repeat 2",
    "prefill": f"soloist bench prefill {COMMON} --name prefill --lengths 128,512,2048 --cohorts 1,4 --repeat 2",
    "quality": f"soloist bench quality {COMMON} --name quality --lengths 100,200,500",
}
RESTARTING = {
    "document": f"soloist bench document {COMMON} --name document --tokens 150 --max-tokens 256 --repeat 2 "
    f'--serve "{SERVE} --session-dir benchmarks/sessions"',
}
SOAK = (
    f"soloist bench soak {COMMON} --name soak --minutes 30 --max-tokens 120 "
    f'--serve "{SERVE} --session-dir benchmarks/sessions"'
)
ON_CARD = ("single", "ladder", "document")


def environment() -> dict[str, str]:
    """This interpreter's `soloist` comes first; where the package is not installed, one that runs it from src/."""
    beside = Path(sys.executable).parent
    if not (beside / "soloist").exists():
        beside = Path(tempfile.mkdtemp(prefix="soloist-bin-"))
        for name, more in (("soloist", " -m soloist"), ("python", "")):
            shim = beside / name
            shim.write_text(f'#!/bin/sh\nexec "{sys.executable}"{more} "$@"\n')
            shim.chmod(0o755)
    paths = [str(ROOT / "src"), str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")]
    return {
        **os.environ,
        "PATH": os.pathsep.join([str(beside), os.environ["PATH"]]),
        "PYTHONPATH": os.pathsep.join(p for p in paths if p),
        "PORT": str(PORT),
    }


ENVIRONMENT = environment()


def run(name: str, command: str) -> bool:
    """One measurement from the repository's root, its output shown; True if it succeeded."""
    began = time.monotonic()
    print(f"\n== {name}: {command}", flush=True)
    done = subprocess.run(command, shell=True, cwd=ROOT, env=ENVIRONMENT)
    print(f"== {name}: {'done' if done.returncode == 0 else 'FAILED'} in {time.monotonic() - began:.0f} s", flush=True)
    return done.returncode == 0


def with_server(chosen: dict[str, str]) -> list[str]:
    """The scenarios over one server; returns the names of those that failed."""
    server = subprocess.Popen(f"exec {SERVE}", shell=True, cwd=ROOT, env=ENVIRONMENT)
    try:
        deadline = time.monotonic() + 300
        while subprocess.run(["soloist", "service", "ready"], env=ENVIRONMENT, cwd=ROOT).returncode:
            if server.poll() is not None or time.monotonic() > deadline:
                return list(chosen)
            time.sleep(0.5)
        return [name for name, command in chosen.items() if not run(name, command)]
    finally:
        server.terminate()
        server.wait(60)


def on_card(out: Path) -> int:
    """The demo's scenarios on the card, written to `out`; the server is told to use it, so that it cannot be missed."""
    os.environ["DEVICE"] = ENVIRONMENT["DEVICE"] = "cuda"
    plot = "" if importlib.util.find_spec("matplotlib") else " --no-plot"
    chosen = {
        name: command.replace("benchmarks/demo-cpu", str(out)) + plot
        for name, command in {**SCENARIOS, **RESTARTING}.items()
        if name in ON_CARD
    }
    shutil.rmtree(ROOT / "benchmarks/sessions", ignore_errors=True)
    failed = with_server({name: chosen[name] for name in chosen if name in SCENARIOS})
    failed += [name for name in RESTARTING if not run(name, chosen[name])]
    print(f"failed: {', '.join(failed) or 'none'}")
    return 1 if failed else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", help="some of the measurements; default: all")
    parser.add_argument("--list", action="store_true", help="print the commands and stop")
    parser.add_argument("--soak", action="store_true", help="only the half-hour soak")
    parser.add_argument("--card", action="store_true", help=f"only {', '.join(ON_CARD)}, on the card")
    parser.add_argument("--out", type=Path, help="with --card: directory; default: benchmarks/demo-gpu")
    args = parser.parse_args()
    everything = {**TOOLS, **SCENARIOS, **RESTARTING}
    if args.card:
        return on_card(args.out or ROOT / "benchmarks/demo-gpu")
    if args.list:
        print("\n".join(f"{name:12} {command}" for name, command in {**everything, "(--soak)": SOAK}.items()))
        return 0
    unknown = set(args.names) - set(everything)
    if unknown:
        parser.error(f"unknown: {', '.join(sorted(unknown))}; known: {', '.join(everything)}")
    if os.getloadavg()[0] > 0.5:
        print(
            f"The load average is {os.getloadavg()[0]:.1f}: figures taken now are of a busy machine.", file=sys.stderr
        )
    began = time.monotonic()
    shutil.rmtree(ROOT / "benchmarks/sessions", ignore_errors=True)  # what an earlier run left would be warm
    if args.soak:
        failed = [] if run("soak", SOAK) else ["soak"]
    else:
        wanted = {name: command for name, command in everything.items() if not args.names or name in args.names}
        failed = [name for name in TOOLS if name in wanted and not run(name, wanted[name])]
        scenarios = {name: command for name, command in wanted.items() if name in SCENARIOS}
        failed += with_server(scenarios) if scenarios else []
        failed += [name for name in RESTARTING if name in wanted and not run(name, wanted[name])]
    pages = subprocess.run([sys.executable, "tools/generate_docs.py"], cwd=ROOT, env=ENVIRONMENT).returncode
    print(f"\n{(time.monotonic() - began) / 60:.1f} minutes; failed: {', '.join(failed) or 'none'}")
    return 1 if failed or pages else 0


if __name__ == "__main__":
    sys.exit(main())
