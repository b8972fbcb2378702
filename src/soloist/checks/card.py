"""The card: what it is, what is free on it and who holds the rest, its power limit. All by nvidia-smi."""

from __future__ import annotations

import platform
from collections.abc import Iterator

from soloist.checks.base import Subject, Verdict, check, fail, ok, verdict, warn

OLDEST = 8.0
MOSTLY_FREE = 0.85

CARD_FIELDS = "index,name,driver_version,compute_cap,memory.total,memory.free,power.limit,power.default_limit"


def cards(subject: Subject) -> list[dict[str, str]]:
    """One mapping per card; empty without a card or a driver."""
    out = subject.run_tool(["nvidia-smi", f"--query-gpu={CARD_FIELDS}", "--format=csv,noheader,nounits"])
    names = CARD_FIELDS.split(",")
    return [
        dict(zip(names, [v.strip() for v in row.split(",")], strict=False)) for row in (out or "").splitlines() if row
    ]


def number(text: str | None) -> float | None:
    """A figure of nvidia-smi, or None for `[N/A]` and the like."""
    try:
        return float(text or "")
    except ValueError:
        return None


@check(
    "card",
    "Card",
    "Kernels are built for compute capability 8.0 (Ampere) and newer. Without a card Soloist runs on the CPU.",
    fine=ok("{name}, driver {driver}, compute capability {capability}"),
    none=ok("no NVIDIA card; Soloist uses the CPU"),
    wanted=fail("DEVICE=cuda, but no NVIDIA card is to be seen.", "Install the driver, or leave DEVICE out."),
    old=fail(
        "{name} has compute capability {capability}; 8.0 is the oldest supported.", "Use DEVICE=cpu on this machine."
    ),
)
def card(subject: Subject) -> Iterator[Verdict]:
    found = cards(subject)
    if not found:
        yield verdict("wanted" if subject.settings.device == "cuda" else "none")
    for one in found:
        capability = number(one["compute_cap"])
        old = capability is not None and capability < OLDEST
        yield verdict(
            "old" if old else "fine", name=one["name"], driver=one["driver_version"], capability=one["compute_cap"]
        )


@check(
    "card-memory",
    "Card memory",
    "What other programs hold cannot hold context. A desktop takes a few hundred MiB; another model takes most of it.",
    fine=ok("{free:.1f} of {total:.1f} GiB free on {name}"),
    held=warn(
        "{free:.1f} of {total:.1f} GiB free on {name}; held by {holders}.",
        "Stop those programs for a longer context, or let `soloist plan` show what fits beside them.",
    ),
    none=ok("no card"),
)
def card_memory(subject: Subject) -> Iterator[Verdict]:
    found = cards(subject)
    if not found:
        yield verdict("none")
    for one in found:
        total, free = number(one["memory.total"]) or 0.0, number(one["memory.free"]) or 0.0
        held = total > 0 and free < MOSTLY_FREE * total
        values = {"free": free / 1024, "total": total / 1024, "name": one["name"]}
        yield verdict("held" if held else "fine", **values, holders=_holders(subject))


def _holders(subject: Subject) -> str:
    fields = "pid,process_name,used_memory"
    out = subject.run_tool(["nvidia-smi", f"--query-compute-apps={fields}", "--format=csv,noheader,nounits"]) or ""
    rows = [[v.strip() for v in line.split(",")] for line in out.splitlines() if line.count(",") >= 2]
    return ", ".join(f"{r[1].rsplit('/', 1)[-1]} (pid {r[0]}, {r[2]} MiB)" for r in rows) or "programs it does not name"


@check(
    "power",
    "Power limit",
    "A decode step reads memory more than it computes, so a lower power limit costs little; figures should name it.",
    fine=ok("{name}: {limit:.0f} W"),
    lowered=ok("{name}: limited to {limit:.0f} W of {default:.0f} W; published figures should say so"),
    unknown=ok("not readable"),
)
def power(subject: Subject) -> Iterator[Verdict]:
    found = [(c["name"], number(c["power.limit"]), number(c["power.default_limit"])) for c in cards(subject)]
    if not any(limit for _, limit, _ in found):
        yield verdict("unknown")
    for name, limit, default in found:
        if limit is not None:
            lowered = default is not None and limit < default
            yield verdict("lowered" if lowered else "fine", name=name, limit=limit, default=default or limit)


@check(
    "wsl",
    "WSL2",
    "Under WSL2 the card is shared with Windows and the amount of pinned host memory is limited.",
    fine=ok("not WSL"),
    wsl=warn(
        "This is WSL2: Windows holds part of the card, and pinned memory is limited to about half of the host's.",
        "Keep HOST_CACHE_GB small and put the model inside the Linux file system, not under /mnt.",
    ),
)
def wsl(_: Subject) -> Iterator[Verdict]:
    yield verdict("wsl" if "microsoft" in platform.release().lower() else "fine")
