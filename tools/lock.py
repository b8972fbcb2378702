"""Write requirements/{runtime,dev}.txt: the exact releases `make setup` and `make dev` install.

Run with the interpreter of an environment that has pip: `make lock`. pip resolves pyproject.toml's
dependencies from scratch; torch is held at TORCH, without a local version, so that the same lock serves CPU and
CUDA builds. Packages that the CUDA build of torch pulls in get no release here: where torch wants one, it says which.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path

TORCH = "2.13.0"
ROOT = Path(__file__).resolve().parent.parent
# The build backend is locked too, so that the editable install needs no isolated environment.
BACKEND = ["hatchling", "editables"]
CUDA_ONLY = ("nvidia-", "cuda-", "triton")


def resolve(requirements: list[str]) -> dict[str, str]:
    """Name -> release of everything pip would install for `requirements` in an empty environment."""
    command = [sys.executable, "-m", "pip", "install", "--dry-run", "--ignore-installed", "--quiet", "--report", "-"]
    report = json.loads(subprocess.run([*command, *requirements], check=True, capture_output=True, text=True).stdout)
    return {p["metadata"]["name"].lower().replace("_", "-"): p["metadata"]["version"] for p in report["install"]}


def write(path: Path, title: str, pins: dict[str, str], include: str | None = None, loose: Sequence[str] = ()) -> None:
    lines = [f"# {title} Written by `make lock`; edit pyproject.toml instead."]
    if include:
        lines.append(f"-r {include}")
    lines += [f"{name}=={version.split('+')[0]}" for name, version in sorted(pins.items())]
    lines += loose
    path.write_text("\n".join(lines) + "\n")


def main() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    held = [f"torch=={TORCH}"]
    core = [*project["dependencies"], *BACKEND, *held]
    wanted = project["optional-dependencies"]["dev"]
    everything = resolve([*core, *wanted])
    pins = {n: v for n, v in everything.items() if not n.startswith(CUDA_ONLY)}
    # The runtime subset keeps the releases of the full resolution, so that the two files never disagree.
    runtime = {n: pins[n] for n in resolve(core) if n in pins}
    write(ROOT / "requirements/runtime.txt", "What serving and chatting need.", runtime)
    dev = {n: v for n, v in pins.items() if n not in runtime}
    loose = [requirement for requirement in wanted if requirement.startswith(CUDA_ONLY)]
    write(ROOT / "requirements/dev.txt", "What the tests and linters need as well.", dev, "runtime.txt", loose)


if __name__ == "__main__":
    main()
