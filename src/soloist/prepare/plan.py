"""What a quantised checkpoint will consist of: jobs per module, files, configuration. Nothing is read but headers.

Its indexed files are a checkpoint any reader of compressed-tensors loads. What others would stumble over (a
quantised embedding, a draft head) goes into `soloist.safetensors`, which no index names; see docs/decisions.md.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from soloist.checkpoint import quant_config
from soloist.checkpoint.formats.stored import StoredModule
from soloist.checkpoint.layout import part_of
from soloist.checkpoint.reader import Checkpoint
from soloist.checkpoint.shards import BESIDE, TensorInfo
from soloist.checkpoint.writer import OutFile, OutTensor
from soloist.prepare.recipe import Part, PartRecipe, schemes
from soloist.prepare.rtn import check_group


@dataclass(frozen=True)
class Job:
    """One module of the result: `stem` is its stored name, `stored` its source; recipe None converts the format.

    `beside`: written into `soloist.safetensors` under its canonical name; the source stays where it is.
    """

    module: str
    stem: str
    stored: StoredModule
    recipe: PartRecipe | None
    scale_dtype: torch.dtype
    beside: bool = False


def _stem(stored: StoredModule) -> str:
    return next(iter(stored.tensors.values())).name.rpartition(".")[0]


def plan_jobs(checkpoint: Checkpoint, parts: Mapping[Part, PartRecipe], compact: bool = False) -> list[Job]:
    """Every module whose tensors change, in file order. Scales are fp16; bf16 for an embedding that is no head too.

    `compact` puts a quantised embedding in the place of the dense one instead of beside it.
    """
    tied = checkpoint.kind == "target" and checkpoint.config.tied
    chosen = schemes(checkpoint, parts)
    jobs = []
    for module, stored in checkpoint.modules.items():
        recipe = chosen.get(module)
        if recipe is not None:
            check_group(module, stored.shape[1], recipe.group)
        if recipe is not None or (not stored.dense and stored.form != "pack-quantized"):
            part = part_of(module)
            dtype = torch.bfloat16 if part == "embed" and not tied else torch.float16
            beside = part == "draft_head" or (recipe is not None and part == "embed" and not compact)
            jobs.append(Job(module, module if beside else _stem(stored), stored, recipe, dtype, beside))
    if "lm_head" in chosen and "lm_head" not in checkpoint.modules:
        stored = checkpoint.modules["embed_tokens"]
        check_group("lm_head", stored.shape[1], chosen["lm_head"].group)
        jobs.append(Job("lm_head", "lm_head", stored, chosen["lm_head"], torch.float16))
    return jobs


def out_tensors(job: Job) -> list[OutTensor]:
    """The tensors a job writes, in file order."""
    n, k = job.stored.shape
    bits, group = (job.recipe.bits, job.recipe.group) if job.recipe else (job.stored.bits, job.stored.group)
    scale = job.scale_dtype if job.recipe else job.stored.scale_dtype
    out = [
        OutTensor(f"{job.stem}.weight_packed", torch.int32, (n, -(-k * bits // 32))),
        OutTensor(f"{job.stem}.weight_scale", scale, (n, k // group)),
        OutTensor(f"{job.stem}.weight_shape", torch.int64, (2,)),
    ]
    if job.recipe is None and not job.stored.symmetric:
        out.append(OutTensor(f"{job.stem}.weight_zero_point", torch.int32, (-(-n * bits // 32), k // group)))
    if "bias" in job.stored.tensors:
        info = job.stored.tensors["bias"]
        out.append(OutTensor(info.name, info.dtype, info.shape, info))
    return out


def plan_files(
    stored: Mapping[str, TensorInfo], beside: Mapping[str, TensorInfo], jobs: Sequence[Job], single_file: bool
) -> list[OutFile]:
    """Lay the result out over files: the source's files with changed modules in place, or one file; and what only
    Soloist reads. `stored` and `beside` are the source's tensors, indexed and not."""
    owner: dict[str, Job] = {}
    extra = [job for job in jobs if job.module == "lm_head" and job.stored.name != "lm_head"]
    for job in jobs:
        if job not in extra and not job.beside:
            owner.update({info.name: job for info in job.stored.tensors.values()})
    # A draft head that the source's index names moves: vLLM's MTP loader ends at names it does not know.
    moved = {name: info for name, info in stored.items() if name.startswith("mtp.draft_")}
    rewritten = {info.name for job in jobs if job.beside for info in job.stored.tensors.values()}
    kept = dict(beside) if any(name.startswith("mtp.draft_") for name in beside) else {**beside, **moved}
    kept = {name: info for name, info in kept.items() if name not in rewritten}
    stored = {name: info for name, info in stored.items() if name not in moved}
    files: dict[Path, list[OutTensor]] = {}
    changed: set[Path] = set()
    placed: set[str] = set()
    for name, info in stored.items():
        tensors = files.setdefault(info.shard.path, [])
        if name not in owner:
            tensors.append(OutTensor(name, info.dtype, info.shape, info))
            continue
        changed.add(info.shard.path)
        if owner[name].module not in placed:
            placed.add(owner[name].module)
            tensors += out_tensors(owner[name])
    shards = {info.shard.path: info.shard for info in stored.values()}
    changed |= {path for path, tensors in files.items() if len(tensors) != len(shards[path].header)}
    for job in extra:
        path = job.stored.tensors["weight"].shard.path
        files[path] += out_tensors(job)
        changed.add(path)
    if single_file:
        out = [OutFile("model.safetensors", tuple(tensor for tensors in files.values() for tensor in tensors))]
    else:
        out = [OutFile(path.name, tuple(tensors), None if path in changed else path) for path, tensors in files.items()]
    only_ours = [OutTensor(name, info.dtype, info.shape, info) for name, info in kept.items()]
    only_ours += [tensor for job in jobs if job.beside for tensor in out_tensors(job)]
    return [*out, OutFile(BESIDE, tuple(only_ours))] if only_ours else out


def output_config(checkpoint: Checkpoint, jobs: Sequence[Job], stored: Mapping[str, TensorInfo]) -> dict[str, Any]:
    """config.json of the result: the source's, with the new quantization_config, untied if the head was split off."""
    config: dict[str, Any] = json.loads((checkpoint.directory / "config.json").read_text(encoding="utf-8"))
    planned = {job.module: job for job in jobs}
    modules: dict[str, tuple[str, quant_config.Scheme | None, int]] = {}
    for module, source in checkpoint.modules.items():
        job = planned.get(module)
        recipe = job.recipe if job else None
        scheme = (recipe.bits, recipe.group, True) if recipe else (source.bits, source.group, source.symmetric)
        dense = source.dense and recipe is None
        part = "drafter" if checkpoint.kind == "drafter" else part_of(module)
        if source.beside or (job is not None and job.beside) or part == "draft_head":
            continue  # not for the readers of this configuration
        if dense and part == "embed":
            continue  # an Embedding is no Linear; it needs no entry
        modules[_stem(source)] = (part, None if dense else scheme, source.shape[1])
    if "lm_head" in planned and "lm_head" not in checkpoint.modules:
        recipe = planned["lm_head"].recipe
        assert recipe is not None
        modules["lm_head"] = ("lm_head", (recipe.bits, recipe.group, True), planned["lm_head"].stored.shape[1])
        config["tie_word_embeddings"] = False
        if isinstance(config.get("text_config"), dict):
            config["text_config"]["tie_word_embeddings"] = False
    elif checkpoint.kind == "target" and "lm_head" not in checkpoint.modules:
        modules["lm_head"] = ("lm_head", None, 0)  # tied: the class group must not reach it
    quantization = quant_config.build(modules)
    config.pop("quantization_config", None)
    if quantization is not None:
        if any(".visual." in f".{name}" for name in stored):
            quantization["ignore"].append("re:.*visual.*")
        config["quantization_config"] = quantization
    return config
