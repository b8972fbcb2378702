"""`soloist quantize`: a checkpoint in, a compressed-tensors checkpoint out, one block of rows in memory at a time.

Modules of the chosen parts are quantised, modules stored in another quantised format are converted without loss,
everything else is copied byte for byte (a file in which nothing changes is hard-linked). The result appears in one
step; an interrupted run goes on where it stopped.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from soloist.checkpoint import formats
from soloist.checkpoint.formats import pack_quantized
from soloist.checkpoint.reader import Checkpoint
from soloist.checkpoint.shards import INDEX_NAME, read_beside, read_directory
from soloist.checkpoint.writer import DirectoryWriter
from soloist.errors import CheckpointError, SettingError
from soloist.ops.linear import DenseWeight, QuantizedWeight, Weight
from soloist.prepare.gptq import DAMPING, Factor, Hessian, factorise, quantize_gptq
from soloist.prepare.hessians import HessianSource, Streamed
from soloist.prepare.plan import Job, out_tensors, output_config, plan_files, plan_jobs
from soloist.prepare.recipe import Part, PartRecipe
from soloist.prepare.rtn import check_finite, round_to_nearest
from soloist.progress import Progress, silent

ROUNDED_AT_ONCE = 1 << 23  # elements: a block and its temporaries stay near the caches
GPTQ_ROWS = 16384  # rows: the loop over columns is paid once per block
REPORT = "quantize_report.json"


@dataclass(frozen=True)
class ModuleReport:
    """What became of one module. `error` is |W - Q| / |W| in the Frobenius norm; `rows` the calibration rows."""

    module: str
    form: str
    bytes_before: int
    bytes_after: int
    error: float
    rows: int = 0


@dataclass(frozen=True)
class Gptq:
    """How GPTQ runs: where Hessians come from, the damping, and whether scales are searched."""

    sources: Sequence[HessianSource]
    damping: float = DAMPING
    search: bool = True

    def hessian(self, module: str) -> Hessian:
        for source in self.sources:
            found = source.hessian(module)
            if found is not None:
                return found
        raise CheckpointError(
            f"There is no calibration for {module}.",
            "Give --capture with a directory of `soloist capture`, or --text for decoder layers and head.",
        )


class Quantiser:
    """Quantises blocks of rows of one module after another; keeps the factor modules with one input share."""

    def __init__(self, gptq: Gptq | None) -> None:
        self.gptq = gptq
        self._factor: Factor | None = None
        self._of: Hessian | None = None

    def prepare(self, job: Job) -> int:
        """Get ready for a module; returns its calibration rows (0 for rounding)."""
        if job.recipe is None or job.recipe.method == "rtn":
            return 0
        if self.gptq is None:
            raise SettingError("GPTQ needs calibration.", "Give --capture or --text, or use rtn.")
        hessian = self.gptq.hessian(job.module)
        if hessian.matrix.shape[0] != job.stored.shape[1]:
            raise CheckpointError(
                f"The calibration of {job.module} is over {hessian.matrix.shape[0]} inputs, the module has "
                f"{job.stored.shape[1]}.",
                "Give a capture of this model.",
            )
        if hessian is not self._of:
            self._factor = factorise(hessian, job.module, self.gptq.damping)
            self._of = hessian
        return hessian.rows

    def block(self, rows: torch.Tensor, recipe: PartRecipe, scale_dtype: torch.dtype) -> QuantizedWeight:
        if recipe.method == "rtn":
            return round_to_nearest(rows, recipe.bits, recipe.group, scale_dtype)
        assert self.gptq is not None and self._factor is not None
        return quantize_gptq(rows, self._factor, recipe.bits, recipe.group, scale_dtype, self.gptq.search)


def _row_blocks(weight: torch.Tensor, recipe: PartRecipe) -> Iterator[tuple[int, torch.Tensor]]:
    rows = GPTQ_ROWS if recipe.method == "gptq" else max(1, ROUNDED_AT_ONCE // weight.shape[1])
    for start in range(0, weight.shape[0], rows):
        yield start, weight[start : start + rows]


def _convert(job: Job, writer: DirectoryWriter, before: int) -> ModuleReport:
    weight = formats.load(job.stored, copy=False)
    assert isinstance(weight, QuantizedWeight)
    tensors = pack_quantized.stored_tensors(weight)
    for suffix, tensor in tensors.items():
        writer.put(f"{job.stem}.{suffix}", tensor)
    after = sum(tensor.nbytes for tensor in tensors.values())
    return ModuleReport(job.module, f"int{weight.bits}, converted from {job.stored.form}", before, after, 0.0)


def _run(job: Job, writer: DirectoryWriter, quantiser: Quantiser) -> ModuleReport:
    before = sum(info.nbytes for info in job.stored.tensors.values())
    if job.recipe is None:
        return _convert(job, writer, before)
    weight = formats.load(job.stored, copy=False)
    assert isinstance(weight, DenseWeight)
    calibrated = quantiser.prepare(job)
    lost = total = 0.0
    after = 0
    for start, rows in _row_blocks(weight.weight, job.recipe):
        block = rows.float()
        check_finite(job.module, block)
        quantised = quantiser.block(block, job.recipe, job.scale_dtype)
        writer.put(f"{job.stem}.weight_packed", quantised.codes, start)
        writer.put(f"{job.stem}.weight_scale", quantised.scales, start)
        after += quantised.nbytes
        lost += float((quantised.dequantize() - block).norm()) ** 2
        total += float(block.norm()) ** 2
    writer.put(f"{job.stem}.weight_shape", torch.tensor(job.stored.shape, dtype=torch.int64))
    if weight.bias is not None:
        writer.copy(job.stored.tensors["bias"].name)
    error = (lost / total) ** 0.5 if total else 0.0
    return ModuleReport(job.module, str(job.recipe), before, after, error, calibrated)


def _read_back(job: Job, writer: DirectoryWriter) -> Weight:
    """The module as it stands in the unfinished result."""
    assert job.recipe is not None
    codes, scales = writer.get(f"{job.stem}.weight_packed"), writer.get(f"{job.stem}.weight_scale")
    bias = job.stored.tensors["bias"].view().clone() if "bias" in job.stored.tensors else None
    return QuantizedWeight(codes, scales, None, job.recipe.bits, job.recipe.group, job.stored.shape, bias)


def quantize(
    checkpoint: Checkpoint,
    parts: Mapping[Part, PartRecipe],
    out: Path,
    *,
    single_file: bool = False,
    compact: bool = False,
    gptq: Gptq | None = None,
    plan_note: str = "",
    progress: Progress = silent,
) -> list[ModuleReport]:
    """Write `out` from `checkpoint`; the report, one entry per module changed, is also kept in it.

    The indexed files load in vLLM and transformers. A quantised embedding does not, so it goes beside the dense one,
    into `soloist.safetensors`; with `compact` it replaces the dense one, which no other reader takes.
    `plan_note` names what else the result depends on (the calibration used), so that a partial run with other
    inputs is not resumed. Raises CheckpointError, SettingError or CapacityError; nothing appears at `out` then.
    """
    stored = read_directory(checkpoint.directory)
    jobs = plan_jobs(checkpoint, parts, compact)
    files = plan_files(stored, read_beside(checkpoint.directory), jobs, single_file)
    config = output_config(checkpoint, jobs, stored)
    key = json.dumps([checkpoint.fingerprint(), [(job.module, str(job.recipe), job.beside) for job in jobs], plan_note])
    writer = DirectoryWriter(out, files, key)
    writer.open()
    _follow_result(gptq, jobs, writer)
    changing = {tensor.name for job in jobs for tensor in out_tensors(job)}
    for file in files:
        if file.link is None and f"{file.name}: copied" not in writer.done:
            for tensor in file.tensors:
                if tensor.name not in changing:
                    writer.copy(tensor.name)
            writer.finished(f"{file.name}: copied")
    work = sum(job.stored.shape[0] * job.stored.shape[1] for job in jobs)
    done = 0
    quantiser = Quantiser(gptq)
    for job in jobs:
        if job.module not in writer.done:
            writer.finished(job.module, asdict(_run(job, writer, quantiser)))
        done += job.stored.shape[0] * job.stored.shape[1]
        progress(job.module, done, work)
    reports = [ModuleReport(**writer.done[job.module]) for job in jobs]
    keep = [p for p in sorted(checkpoint.directory.iterdir()) if p.is_file() and _is_sidecar(p)]
    writer.commit({"config.json": _json(config), REPORT: _json(summary(reports))}, keep)
    return reports


def summary(reports: Sequence[ModuleReport]) -> dict[str, Any]:
    """The report as data: totals, then one entry per module."""
    return {
        "bytes_before": sum(report.bytes_before for report in reports),
        "bytes_after": sum(report.bytes_after for report in reports),
        "largest_error": max((report.error for report in reports), default=0.0),
        "modules": [asdict(report) for report in reports],
    }


def _follow_result(gptq: Gptq | None, jobs: Sequence[Job], writer: DirectoryWriter) -> None:
    """Let streamed calibration run on the layers as quantised so far."""
    by_module = {job.module: job for job in jobs}

    def finished(module: str) -> Weight | None:
        job = by_module.get(module)
        return None if job is None or job.recipe is None or module not in writer.done else _read_back(job, writer)

    for source in gptq.sources if gptq else ():
        if isinstance(source, Streamed):
            source.finished = finished


def _json(table: Any) -> str:
    return json.dumps(table, indent=2, ensure_ascii=False) + "\n"


def _is_sidecar(path: Path) -> bool:
    return path.suffix != ".safetensors" and path.name not in ("config.json", INDEX_NAME, REPORT)
