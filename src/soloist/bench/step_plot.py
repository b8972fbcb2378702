"""`python -m soloist.bench.step_plot RUN.json OUT.svg`: milliseconds of a step by class, stacked, beside its floor."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

ORDER = ("products", "head", "dense products", "attention", "recurrence", "small kernels", "gaps")


def draw(document: dict[str, Any], out: Path) -> None:
    """One bar per case of a `soloist bench step` document; a tick marks the floor."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    cases = document["results"]
    labels = [f"{c['requests']} x {c['rows']}\n{c['context'] / 1024:.0f}k" for c in cases]
    figure, axes = pyplot.subplots(figsize=(8, 3.6), layout="constrained")
    bottom = [0.0] * len(cases)
    for name in ORDER:
        heights = [max(0.0, c["classes_ms"].get(name, 0.0)) for c in cases]
        axes.bar(labels, heights, bottom=bottom, width=0.7, label=name)
        bottom = [b + h for b, h in zip(bottom, heights, strict=True)]
    for i, case in enumerate(cases):
        axes.plot([i - 0.4, i + 0.4], [case["floor_ms"]] * 2, color="black", linewidth=1.5)
    axes.set_xlabel("requests x rows of each, at so many settled tokens")
    axes.set_ylabel("ms per verify step")
    axes.set_title(f"{document['shape']}, {document['card']}; black: bytes over copy bandwidth", fontsize=10)
    axes.legend(fontsize=8, ncols=2)
    figure.savefig(out)


if __name__ == "__main__":
    draw(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")), Path(sys.argv[2]))
