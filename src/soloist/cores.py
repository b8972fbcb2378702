"""How many cores this process may keep busy: what the machine has, less affinity and a container's share."""

from __future__ import annotations

import os
from pathlib import Path

CGROUP = Path("/sys/fs/cgroup")  # a container's own group is mounted here


def usable_cores(cgroup: Path = CGROUP) -> int:
    """At least 1. A quota of cgroup v2 (`cpu.max`) or v1 (`cpu.cfs_*`) is rounded up."""
    affinity = getattr(os, "sched_getaffinity", None)
    cores = os.cpu_count() or 1 if affinity is None or _bound() else len(affinity(0))
    share = _quota(cgroup)
    return max(1, cores if share is None else min(cores, share))


def _bound() -> bool:
    """Whether OpenMP binds threads to places: whoever imported torch is bound to the first one then, and what that
    thread may use says nothing about the process."""
    placed = os.environ.get("GOMP_CPU_AFFINITY") or os.environ.get("OMP_PLACES")
    return bool(placed) or os.environ.get("OMP_PROC_BIND", "false").lower() not in ("", "false")


def _quota(cgroup: Path) -> int | None:
    """Cores' worth of time that the group gets, or None without a limit."""
    try:
        if (cgroup / "cpu.max").exists():
            quota, period = (cgroup / "cpu.max").read_text().split()
        else:
            quota = (cgroup / "cpu" / "cpu.cfs_quota_us").read_text().strip()
            period = (cgroup / "cpu" / "cpu.cfs_period_us").read_text().strip()
        limit, each = int(quota), int(period)  # "max", and -1 in v1, are no limit
    except (OSError, ValueError):
        return None
    return -(-limit // each) if limit > 0 and each > 0 else None
