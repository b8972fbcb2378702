"""What `soloist quantize` does with its options: open, calibrate, write, compare, print."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from soloist import progress
from soloist.checkpoint.reader import Checkpoint, open_checkpoint
from soloist.checkpoint.writer import write_text_atomic
from soloist.errors import SettingError
from soloist.prepare.evaluate import Comparison, compare
from soloist.prepare.hessians import SUMMARY, Captured, HessianSource, Streamed
from soloist.prepare.inspect import kind_of
from soloist.prepare.quantize import REPORT, Gptq, ModuleReport, quantize, summary
from soloist.prepare.recipe import Part, PartRecipe, parse_part
from soloist.prepare.texts import Reader


@dataclass(frozen=True)
class Request:
    """The options of the command, as given."""

    directory: Path
    out: Path
    parts: tuple[str, ...]
    group: int
    capture: Path | None
    text: Path | None
    evaluate: Path | None
    tokens: int
    evaluate_tokens: int
    length: int
    damping: float
    search: bool
    single_file: bool
    compact: bool
    device: str


def run(request: Request) -> None:
    """Carry out the command and print its report. Raises UserErrors; nothing is at `out` then."""
    torch.set_grad_enabled(False)
    parts = _parts(request)
    device = _device(request.device)
    kind = kind_of(request.directory)
    if kind == "drafter" and (request.text or request.evaluate):
        raise SettingError("A drafter reads no text by itself.", "Give --capture; leave out --text and --evaluate.")
    checkpoint = open_checkpoint(request.directory, kind, need_template=False)
    gptq = _gptq(request, checkpoint, parts, device)
    note = f"{request.capture} {request.text} {request.tokens} {request.length} {request.damping} {request.search}"
    evaluation = _texts(request, request.evaluate, request.evaluate_tokens) if request.evaluate else []
    with progress.bar("Quantising") as shown:
        reports = quantize(
            checkpoint,
            parts,
            request.out,
            single_file=request.single_file,
            compact=request.compact,
            gptq=gptq,
            plan_note=note,
            progress=shown,
        )
    print_report(reports)
    if evaluation:
        after = open_checkpoint(request.out, need_template=False)
        with progress.bar("Evaluating") as shown:
            result = compare(checkpoint, after, evaluation, device, _dtype(device), shown)
        report = {
            **summary(reports),
            "evaluation": {"text": request.evaluate.name if request.evaluate else "", **asdict(result)},
        }
        write_text_atomic(request.out / REPORT, json.dumps(report, indent=2) + "\n")
        print_comparison(result)
    print(f"{request.out} is complete.")


def _parts(request: Request) -> dict[Part, PartRecipe]:
    parts: dict[Part, PartRecipe] = {}
    for text in request.parts:
        part, recipe = parse_part(text, request.group)
        if part in parts:
            raise SettingError(f"--part {part} is given twice.", "Name each part once.")
        parts[part] = recipe
    return parts


def _device(name: str) -> torch.device:
    if name not in ("auto", "cpu", "cuda"):
        raise SettingError(f"--device {name} is unknown.", "Choose auto, cpu or cuda.")
    if name == "cuda" and not torch.cuda.is_available():
        raise SettingError("--device cuda, but torch sees no CUDA device.", "Use --device cpu.")
    return torch.device("cuda" if name != "cpu" and torch.cuda.is_available() else "cpu")


def _dtype(device: torch.device) -> torch.dtype:
    return torch.float32 if device.type == "cpu" else torch.bfloat16


def _texts(request: Request, path: Path, tokens: int) -> list[list[int]]:
    return Reader(request.directory).texts(path, request.length, tokens)


def _gptq(request: Request, checkpoint: Checkpoint, parts: dict[Part, PartRecipe], device: torch.device) -> Gptq | None:
    wanted = any(recipe.method == "gptq" for recipe in parts.values())
    if not wanted:
        if request.capture or request.text:
            raise SettingError("Calibration is given, but no part uses gptq.", "Write for example lm_head=int4:gptq.")
        return None
    sources: list[HessianSource] = []
    if request.capture:
        sources.append(Captured(request.capture, device))
    if request.text:
        texts = _texts(request, request.text, request.tokens)
        sources.append(Streamed(checkpoint, texts, device, _dtype(device)))
    if not sources:
        raise SettingError("GPTQ needs calibration.", f"Give --capture (a directory with {SUMMARY}) or --text.")
    return Gptq(sources, request.damping, request.search)


def print_report(reports: list[ModuleReport]) -> None:
    """One line per kind of module (layers folded): how many, form, bytes, mean and largest relative error."""
    folded: dict[tuple[str, str], list[ModuleReport]] = {}
    for report in reports:
        last = report.module.rpartition(".")[2] if "layers." in report.module else report.module
        owner = "mtp." if report.module.startswith("mtp.layers") else ""
        folded.setdefault((owner + last, report.form), []).append(report)
    print(f"{'module':24} {'count':>5}  {'form':24} {'MiB before':>11} {'after':>10} {'error mean':>10} {'largest':>8}")
    for (name, form), group in folded.items():
        before, after = (sum(sizes) / 2**20 for sizes in zip(*((r.bytes_before, r.bytes_after) for r in group)))
        errors = [report.error for report in group]
        print(
            f"{name:24} {len(group):5}  {form:24} {before:11.1f} {after:10.1f} "
            f"{sum(errors) / len(errors):10.4f} {max(errors):8.4f}"
        )


def print_comparison(result: Comparison) -> None:
    """Perplexity before and after, KL, agreement."""
    change = 100 * (result.perplexity_after / result.perplexity_before - 1)
    print(
        f"{result.tokens} tokens: perplexity {result.perplexity_before:.4f} -> {result.perplexity_after:.4f} "
        f"({change:+.2f} %), KL {result.kl:.5f} nats a token, same likeliest token {100 * result.agreement:.2f} %"
    )
