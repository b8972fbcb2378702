"""What 4 bits cost and a draft vocabulary gains: benchmarks/demo-cpu/quantization.json and its plot, from nothing else.

    python tools/measure_quantization.py MODEL DRAFTER WORK RESULT [SECTION ...]

MODEL and DRAFTER are dense. Calibration answers (180 prompts) and held-out answers (every third of 120, other subjects)
are made by `soloist capture` and kept in WORK; RESULT is written after each section, and a run that finds sections in
it goes on behind them. KL and perplexity are taken on the held-out answers, acceptance on greedy answers to the
held-out prompts (chains only, no lookup), coverage on the held-out answers' tokens. The raw text is the language
reference that comes with Python (pydoc's topics). `difference` is paired over prompts: mean tokens per step less the
dense form's, and its standard error.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import torch
from demo_prompts import prompts as demo_prompts

from soloist import Engine
from soloist.bench.machine import commit, machine, versions
from soloist.checkpoint.reader import Checkpoint, open_checkpoint
from soloist.checkpoint.writer import link_or_copy
from soloist.prepare import draft_vocab
from soloist.prepare.capture import Target, capture
from soloist.prepare.evaluate import compare
from soloist.prepare.gptq import factorise, loss, quantize_gptq
from soloist.prepare.hessians import SUMMARY, Captured
from soloist.prepare.quantize import Gptq, quantize
from soloist.prepare.recipe import OUTPUTS, Part, PartRecipe
from soloist.prepare.rtn import round_to_nearest
from soloist.prepare.texts import Reader
from soloist.sampling.params import SamplingParams

TOKENS, TEXTS = 64, 24
CALIBRATION_TOKENS, HELD_TOKENS = 192, 128
SIZES = (256, 1024, 4096)
CURVE = (256, 512, 1024, 2048, 4096, 8192)
FORMS = {"rtn": ("rtn", False), "gptq, extreme scale": ("gptq", False), "gptq, searched scale": ("gptq", True)}
BEST = "gptq, searched scale"


class Bench:
    """The two checkpoints, what was captured from them, and the prompts acceptance is taken on."""

    def __init__(self, model: Path, drafter: Path, work: Path) -> None:
        self.model, self.drafter = model, drafter
        self.target, self.block = open_checkpoint(model), open_checkpoint(drafter, "drafter")
        self.reader = Reader(model)
        self.held_prompts = self._prompts("held-out")[::3]
        calibration = self._prompts("calibration")
        knobs = {"spec": "mtp"}
        self.calibrated = self._captured(work / "c-mtp", calibration, ["lm_head", "mtp"], 0, CALIBRATION_TOKENS, knobs)
        knobs = {"spec": "dflash2", "drafter": str(drafter)}
        self.blocks = self._captured(work / "c-block", calibration, ["drafter"], 0, CALIBRATION_TOKENS, knobs)
        self.held = self._captured(work / "held", self.held_prompts, ["lm_head"], 777, HELD_TOKENS, {"spec": "mtp"})

    def _prompts(self, name: str) -> list[list[int]]:
        ask = self.reader.chat
        return [ask([{"role": "user", "content": x}], True, enable_thinking=False) for x in demo_prompts(name)]

    def _captured(
        self, out: Path, prompts: list[list[int]], parts: list[Target], seed: int, tokens: int, knobs: dict[str, str]
    ) -> Path:
        if not (out / SUMMARY).exists():
            with Engine(self.model, prefix_cache=False, threads=1, **knobs) as engine:
                capture(engine, prompts, out, parts, tokens=tokens, seed=seed)
        return out

    def made(self, checkpoint: Checkpoint, part: Part, form: str, out: Path) -> Path:
        """`part` as int4 in one of FORMS."""
        method, search = FORMS[form]
        recipe = PartRecipe(4, "gptq" if method == "gptq" else "rtn")
        captured = self.blocks if part == "drafter" else self.calibrated
        quantize(checkpoint, {part: recipe}, out, gptq=Gptq([Captured(captured)], search=search))
        return out

    def acceptance(self, model: Path, **knobs: Any) -> dict[str, Any]:
        """Greedy answers to the held-out prompts, drafted by one chain."""
        fixed = {"tree": False, "lookup": False, "block_rule": "saturated", "prefix_cache": False, "threads": 1}
        with Engine(model, **fixed, **knobs) as engine:
            params = SamplingParams(max_tokens=TOKENS, temperature=0.0, stop_ids=engine.engine.eos_ids)
            stats = [answer.stats for answer in engine.generate(self.held_prompts, params)]
        accepted: Counter[int] = Counter()
        for s in stats:
            accepted.update(dict(enumerate(s.accepted_histogram)))
        rounds, depth = accepted.total(), max(accepted)
        return {
            "acceptance": sum(s.accepted for s in stats) / sum(s.drafted for s in stats),
            "tokens_per_step": sum(s.output_tokens for s in stats) / sum(s.steps for s in stats),
            "per_position": [
                round(sum(accepted[n] for n in range(j, depth + 1)) / rounds, 4) for j in range(1, depth + 1)
            ],
            "prompts": [[s.output_tokens, s.steps] for s in stats],
        }


def paired(row: dict[str, Any], dense: dict[str, Any]) -> None:
    """Add the paired difference in tokens per step to the dense form."""
    gaps = [a[0] / a[1] - b[0] / b[1] for a, b in zip(row["prompts"], dense["prompts"], strict=True)]
    error = statistics.stdev(gaps) / len(gaps) ** 0.5
    row["difference"] = {"mean": round(statistics.mean(gaps), 4), "standard_error": round(error, 4)}


def output_errors(checkpoint: Checkpoint, captured: Path) -> dict[str, dict[str, float]]:
    """Relative error of each module's outputs over its calibration rows: root mean square."""
    source = Captured(captured)
    found: dict[str, dict[str, float]] = {}
    for module in checkpoint.modules:
        hessian = source.hessian(module)
        if hessian is None:
            continue
        weight = checkpoint.weight(module).dequantize()
        whole = loss(weight, torch.zeros_like(weight), hessian)
        forms = {
            "rtn": round_to_nearest(weight, 4, 128),
            BEST: quantize_gptq(weight, factorise(hessian, module), 4, 128, search=True),
        }
        found[module] = {f: round((loss(weight, q.dequantize(), hessian) / whole) ** 0.5, 4) for f, q in forms.items()}
    return found


def head(bench: Bench, there: Path) -> dict[str, Any]:
    texts = [json.loads(line)["ids"] for line in (bench.held / OUTPUTS).read_text().splitlines()][:TEXTS]
    return {
        form: asdict(
            compare(
                bench.target,
                open_checkpoint(bench.made(bench.target, "lm_head", form, there / f"head {form}")),
                texts,
                torch.device("cpu"),
            )
        )
        for form in FORMS
    }


def mtp(bench: Bench, there: Path) -> dict[str, Any]:
    rows = {"bf16": bench.acceptance(bench.model, spec="mtp")}
    for form in ("rtn", BEST):
        rows[form] = bench.acceptance(bench.made(bench.target, "mtp", form, there / f"mtp {form}"), spec="mtp")
        paired(rows[form], rows["bf16"])
    return {**rows, "output error": output_errors(bench.target, bench.calibrated)}


def dflash2(bench: Bench, there: Path) -> dict[str, Any]:
    rows = {"bf16": bench.acceptance(bench.model, spec="dflash2", drafter=bench.drafter)}
    for form in ("rtn", BEST):
        made = bench.made(bench.block, "drafter", form, there / f"block {form}")
        rows[form] = bench.acceptance(bench.model, spec="dflash2", drafter=made)
        paired(rows[form], rows["bf16"])
    return {**rows, "output error": output_errors(bench.block, bench.blocks)}


def vocabulary(bench: Bench, there: Path) -> dict[str, Any]:
    vocab = bench.target.config.vocab_size
    always = draft_vocab.control_ids(bench.reader.tokenizer.added, bench.target.config.eos_ids)
    spoken = draft_vocab.read_counts(bench.held)
    raw = Counter(bench.reader.tokenizer.encode("\n\n".join(topics[name] for name in sorted(topics))))
    lists = {"own answers": draft_vocab.read_counts(bench.calibrated), "raw text": raw}
    found: dict[str, Any] = {"counted": {name: counts.total() for name, counts in lists.items()}, "rows": []}
    found["counted"]["held-out answers"] = spoken.total()
    for size in CURVE:
        row: dict[str, Any] = {"size": size}
        for name, counts in lists.items():
            ids = draft_vocab.choose(counts, always, size, vocab)
            row[name] = {"coverage": draft_vocab.coverage(spoken, ids)}
            if size in SIZES:
                copy = there / f"{size} {name}"
                copy.mkdir()
                for path in bench.model.iterdir():
                    link_or_copy(path, copy / path.name)
                draft_vocab.write(copy, ids)
                drafted = bench.acceptance(copy, spec="mtp")
                row[name] |= {key: drafted[key] for key in ("acceptance", "tokens_per_step", "per_position")}
        found["rows"].append(row)
    return found


SECTIONS: Mapping[str, Callable[[Bench, Path], dict[str, Any]]] = {
    "dflash2 int4": dflash2,
    "mtp int4": mtp,
    "draft vocabulary": vocabulary,
    "head int4": head,
}


def plot(found: Mapping[str, Any], path: Path) -> None:
    """Coverage and tokens per step over the size of the draft vocabulary, for both lists."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.6))
    left, right = figure.subplots(1, 2)
    rows = found["draft vocabulary"]["rows"]
    for name in ("own answers", "raw text"):
        left.plot([r["size"] for r in rows], [100 * r[name]["coverage"] for r in rows], marker="o", label=name)
        some = [r for r in rows if "tokens_per_step" in r[name]]
        right.plot([r["size"] for r in some], [r[name]["tokens_per_step"] for r in some], marker="o", label=name)
    right.axhline(found["mtp int4"]["bf16"]["tokens_per_step"], color="grey", linestyle="--", label="whole vocabulary")
    left.set(xscale="log", xlabel="draft vocabulary, tokens", ylabel="held-out tokens covered, %")
    right.set(xscale="log", xlabel="draft vocabulary, tokens", ylabel="tokens per step, MTP")
    for axes in (left, right):
        axes.grid(alpha=0.3)
        axes.legend()
    figure.savefig(path, dpi=120, bbox_inches="tight")


def main() -> None:
    model, drafter, work, result = map(Path, sys.argv[1:5])
    wanted = sys.argv[5:] or list(SECTIONS)
    for name in wanted:
        if name not in SECTIONS:
            sys.exit(f"{name} is no section; they are: {', '.join(SECTIONS)}")
    torch.set_grad_enabled(False)
    found: dict[str, Any] = json.loads(result.read_text()) if result.exists() else {}
    found |= {
        "command": "python tools/measure_quantization.py MODEL DRAFTER WORK RESULT",
        "model": f"{model.name}, bf16",
        "machine": machine(),
        "versions": versions(),
        "commit": commit(),
    }
    bench = Bench(model, drafter, work)
    for name in wanted:
        if name not in found:
            with tempfile.TemporaryDirectory() as scratch:
                measured = SECTIONS[name](bench, Path(scratch))
            if result.exists():  # another process may have added its sections meanwhile
                found = json.loads(result.read_text()) | found
            found[name] = measured
            result.write_text(json.dumps(found, indent=1) + "\n")
            print(name, "done", flush=True)
    if set(SECTIONS) <= set(found):
        plot(found, result.with_suffix(".png"))


if __name__ == "__main__":
    main()
