"""`soloist doctor`: run the checks, report them, and gather a bundle that makes a fault reproducible."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from soloist.checks import card, host, install, model, vision
from soloist.checks.base import Check, Finding, Status, Subject

CHECKS: tuple[Check, ...] = (
    install.python,
    install.packages,
    install.torch_build,
    install.compiler,
    card.card,
    card.card_memory,
    card.power,
    card.wsl,
    host.settings,
    model.model,
    model.fast_path,
    model.drafter,
    vision.vision,
    model.memory,
    host.port,
    host.keys,
    host.sessions,
    host.disk,
    host.files,
)
TOOL_S = 15.0


def this_machine(flags: Mapping[str, str | None], server_url: str | None = None) -> Subject:
    """The subject that is this process's environment, directory and tools."""
    return Subject(flags, dict(os.environ), Path("."), run_tool, server_url)


def run_tool(arguments: list[str]) -> str | None:
    """A tool's output; None when it is not installed, fails or hangs."""
    try:
        done = subprocess.run(arguments, capture_output=True, text=True, timeout=TOOL_S, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout


def every_check() -> tuple[Check, ...]:
    """All checks, the optional ones included, in the order of the documentation."""
    from soloist.checks.contracts import SELF_CHECKS
    from soloist.checks.live import SERVER_CHECKS

    return (*CHECKS, *SERVER_CHECKS, *SELF_CHECKS)


def examine(subject: Subject, checks: Iterable[Check]) -> list[Finding]:
    """All findings, in order."""
    return [finding for check in checks for finding in check.examine(subject)]


def exit_code(findings: Sequence[Finding]) -> int:
    """1 when something failed, else 0; warnings do not fail."""
    return int(any(f.status is Status.FAIL for f in findings))


def markdown() -> str:
    """docs/troubleshooting.md: every check with every outcome that asks for something."""
    lines = [
        "# Troubleshooting",
        "",
        "`soloist doctor` looks at all of this by itself and prints the remedy; `--server` looks at a running server,",
        "`--self-check` runs the exactness contracts on your model, `--debug-bundle` gathers what a report needs.",
        "This page is generated from the checks (`soloist doctor --markdown`).",
    ]
    for check in every_check():
        lines += ["", f"## {check.title}", "", f"{check.about} (`{check.name}`)"]
        asking = [o for o in check.outcomes.values() if o.status is not Status.PASS]
        if asking:
            lines += ["", "| | what it says | what to do |", "|---|---|---|"]
        lines += [f"| {o.status.value} | {_cell(o.says)} | {_cell(o.remedy)} |" for o in asking]
    return "\n".join(lines) + "\n"


def _cell(text: str) -> str:
    shown = (
        text.replace("|", "\\|").replace("{message}", "*the reader's own words*").replace("{remedy}", "*as it says*")
    )
    for part in ("{", "}"):
        shown = shown.replace(part, {"{": "*", "}": "*"}[part])
    return shown.replace(":.1f", "").replace(":.0f", "").replace(":.2f", "").replace(":g", "")
