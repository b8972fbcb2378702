"""Panels to PNG. matplotlib is an extra and is imported only when a plot is drawn."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from soloist.bench.result import Panel, Series
from soloist.errors import UserError

COLOURS = ("#2a6fbb", "#d1662f", "#3d8f5f", "#8a5aa8", "#b8a12c", "#c0485f", "#4fa3b5", "#6b6b6b")
WIDTH, HEIGHT = 5.2, 3.6  # inches per panel


def require_matplotlib() -> Any:
    """The pyplot-free parts of matplotlib, or a UserError that names the extra."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise UserError(
            "Plots need matplotlib, which is not installed.",
            "Install it with: pip install 'soloist[bench]', or add --no-plot.",
        ) from None
    return Figure, FigureCanvasAgg


def draw(panels: Sequence[Panel], path: Path, *, title: str, footer: str = "") -> None:
    """Draw the panels in rows of at most two and write a PNG."""
    figure_class, canvas_class = require_matplotlib()
    columns = min(2, len(panels))
    rows = -(-len(panels) // columns)
    figure = figure_class(figsize=(WIDTH * columns, HEIGHT * rows + 0.7), layout="constrained")
    canvas_class(figure)
    figure.suptitle(title, fontsize=12, fontweight="bold")
    axes = figure.subplots(rows, columns, squeeze=False)
    for axis, panel in zip(axes.flat, panels, strict=False):
        (_lines if panel.kind == "line" else _bars)(axis, panel)
        axis.set_title(panel.title, fontsize=10)
        axis.set_xlabel(panel.x_label, fontsize=9)
        axis.set_ylabel(panel.y_label, fontsize=9)
        axis.tick_params(labelsize=8)
        axis.grid(True, axis="y", alpha=0.3, linewidth=0.6)
        axis.spines[["top", "right"]].set_visible(False)
        axis.set_ylim(bottom=0)
        if sum(1 for s in panel.series if any(v is not None for v in s.y)) > 1:
            axis.legend(fontsize=8, frameon=False)
    for axis in list(axes.flat)[len(panels) :]:
        axis.set_visible(False)
    if footer:
        figure.supxlabel(footer, fontsize=7, color="#555555")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


def _known(series: Series) -> list[int]:
    return [i for i, value in enumerate(series.y) if value is not None]


def _whiskers(series: Series, points: list[int]) -> Any:
    if not series.error:
        return None
    y = [series.y[i] or 0.0 for i in points]
    low = [max(0.0, v - series.error[i][0]) for v, i in zip(y, points, strict=True)]
    high = [max(0.0, series.error[i][1] - v) for v, i in zip(y, points, strict=True)]
    return [low, high]


def _lines(axis: Any, panel: Panel) -> None:
    for n, series in enumerate(panel.series):
        points = _known(series)
        axis.errorbar(
            [series.x[i] for i in points],
            [series.y[i] for i in points],
            yerr=_whiskers(series, points),
            marker="o",
            markersize=4,
            linewidth=1.6,
            capsize=3,
            color=COLOURS[n % len(COLOURS)],
            label=series.label,
        )
    ticks = sorted({x for s in panel.series for x in s.x if isinstance(x, (int, float))})
    if 0 < len(ticks) <= 10:
        axis.set_xticks(ticks)


def _bars(axis: Any, panel: Panel) -> None:
    names = list(dict.fromkeys(str(x) for s in panel.series for x in s.x))
    width = 0.8 / max(1, len(panel.series))
    for n, series in enumerate(panel.series):
        points = _known(series)
        axis.bar(
            [names.index(str(series.x[i])) + (n - (len(panel.series) - 1) / 2) * width for i in points],
            [series.y[i] for i in points],
            width=width * 0.92,
            yerr=_whiskers(series, points),
            capsize=2,
            color=COLOURS[n % len(COLOURS)],
            label=series.label,
        )
    long = max((len(name) for name in names), default=0) > 6 and len(names) > 3
    axis.set_xticks(range(len(names)), names, rotation=25 if long else 0, ha="right" if long else "center")
