"""Several runs side by side: one Markdown page and one picture per scenario."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from soloist.bench.plots import draw
from soloist.bench.result import Column, Panel, Result, Series, Table
from soloist.errors import UserError


def label_runs(paths: Sequence[Path]) -> list[str]:
    """Short distinct labels: the file stems, with the parent folder where stems repeat."""
    stems = [p.stem for p in paths]
    return [s if stems.count(s) == 1 else f"{p.parent.name}/{s}" for p, s in zip(paths, stems, strict=True)]


def merge_tables(runs: Sequence[tuple[str, Result]]) -> list[Table]:
    """Tables of the same title joined, with a leading column that says which run a row is of."""
    merged: dict[str, Table] = {}
    for label, run in runs:
        for table in run.tables:
            target = merged.setdefault(table.title, Table(table.title, [Column("run", "run")]))
            known = {c.key for c in target.columns}
            target.columns += [c for c in table.columns if c.key not in known]
            target.rows += [{"run": label, **row} for row in table.rows]
    return list(merged.values())


def merge_panels(runs: Sequence[tuple[str, Result]]) -> list[Panel]:
    """Panels of the same title drawn over each other; a series is named after its run."""
    merged: dict[str, Panel] = {}
    for label, run in runs:
        for panel in run.panels:
            target = merged.setdefault(panel.title, Panel(panel.title, panel.x_label, panel.y_label, panel.kind))
            for s in panel.series:
                name = label if len(panel.series) == 1 else f"{label}: {s.label}"
                target.series.append(Series(name, s.x, s.y, s.error))
    return list(merged.values())


def write_report(paths: Sequence[Path], out: Path, *, plot: bool = True) -> list[Path]:
    """Write `out` (Markdown) and `out` + scenario `.png`; returns the files written."""
    if not paths:
        raise UserError("A report needs at least one run.", "Give files that `soloist bench` wrote.")
    labelled = list(zip(label_runs(paths), [Result.read(p) for p in paths], strict=True))
    written: list[Path] = []
    parts = ["# Benchmark report", "", _runs_table(labelled).markdown()]
    for scenario in dict.fromkeys(run.scenario for _, run in labelled):
        runs = [(label, run) for label, run in labelled if run.scenario == scenario]
        parts += ["", f"## {scenario}"]
        panels = merge_panels(runs)
        if plot and panels:
            picture = out.with_name(f"{out.stem}-{scenario}.png")
            draw(panels, picture, title=f"{scenario}: " + " vs ".join(label for label, _ in runs))
            written.append(picture)
            parts += ["", f"![{scenario}]({picture.name})"]
        for table in merge_tables(runs):
            parts += ["", table.markdown()]
        remarks = [f"- {label}: {note}" for label, run in runs for note in run.notes]
        remarks += [f"- {label} FAILED: {failure}" for label, run in runs for failure in run.failures]
        parts += ["", *remarks] if remarks else []
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text("\n".join(parts) + "\n", encoding="utf-8")
    return [out, *written]


def _runs_table(labelled: Sequence[tuple[str, Result]]) -> Table:
    columns = [
        Column("run", "run"),
        Column("scenario", "scenario"),
        Column("model", "model"),
        Column("server", "server"),
        Column("machine", "machine"),
        Column("commit", "commit"),
        Column("taken", "taken"),
        Column("command", "command"),
    ]
    rows = []
    for label, run in labelled:
        about, server = run.about, run.about.get("server", {})
        machine = about.get("machine", {})
        cards = ", ".join(g.get("name", "?") for g in machine.get("gpus", []))
        version = f"{server.get('owned_by') or 'unknown'} {server.get('version') or ''}".strip()
        rows.append(
            {
                "run": label,
                "scenario": run.scenario,
                "model": server.get("model"),
                "server": version,
                "machine": cards or f"{machine.get('cpu', '?')}, {machine.get('cores', '?')} cores",
                "commit": about.get("commit"),
                "taken": about.get("taken"),
                "command": f"`{about.get('command', '')}`",
            }
        )
    return Table("Runs", columns, rows)
