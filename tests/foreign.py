"""Checkpoints in the formats other tools write, made from a tiny dense one, with the weights they stand for.

The packers here are written from the formats' definitions; tests/golden/formats.safetensors pins the same
layouts to the libraries themselves.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def pack_fields(values: torch.Tensor, bits: int, order: tuple[int, ...] | None = None) -> torch.Tensor:
    """Unsigned values [R, C] -> int32 words [R, C / f] along dim 1; field p of a word holds column order[p]."""
    factor = 32 // bits
    fields = values.to(torch.int64).view(values.shape[0], -1, factor)
    if order is not None:
        fields = fields[..., list(order)]
    words = sum(fields[..., p] << (bits * p) for p in range(factor))
    assert isinstance(words, torch.Tensor)
    return torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)


def random_codes(
    shape: tuple[int, int], bits: int, group: int, symmetric: bool, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(codes [N, K], scales [N, K/g] of either sign in fp16, zeros [N, K/g])."""
    n, k = shape
    top = 1 << bits
    codes = torch.randint(0, top, (n, k), generator=generator)
    zeros = torch.full((n, k // group), top // 2)
    if not symmetric:
        zeros = torch.randint(1, top, (n, k // group), generator=generator)
    scales = (torch.rand(n, k // group, generator=generator) + 0.1) * k**-0.5 * 4 / top
    signs = torch.randint(0, 2, (n, k // group), generator=generator) * 2 - 1
    return codes, (scales * signs).half(), zeros


def stored_form(
    form: str, codes: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor, bits: int, symmetric: bool
) -> dict[str, torch.Tensor]:
    """The tensors of one module by suffix."""
    n, k = codes.shape
    if form == "pack-quantized":
        tensors = {
            "weight_packed": pack_fields(codes, bits),
            "weight_scale": scales,
            "weight_shape": torch.tensor([n, k]),
        }
        if not symmetric:
            tensors["weight_zero_point"] = pack_fields(zeros.t(), bits).t().contiguous()
        return tensors
    if form == "awq":
        return {
            "qweight": pack_fields(codes.t(), 4, AWQ_ORDER),
            "qzeros": pack_fields(zeros.t(), 4, AWQ_ORDER),
            "scales": scales.t().contiguous(),
        }
    shift = 1 if form == "gptq" else 0
    return {
        "qweight": pack_fields(codes, bits).t().contiguous(),
        "qzeros": pack_fields(((zeros - shift) % (1 << bits)).t(), bits),
        "scales": scales.t().contiguous(),
        "g_idx": torch.arange(k, dtype=torch.int32) // (k // scales.shape[1]),
    }


def foreign_config(form: str, bits: int, group: int, symmetric: bool) -> dict[str, object]:
    """A quantization_config as the tools write it; its ignore list leaves out the MTP names."""
    if form == "pack-quantized":
        weights = {"num_bits": bits, "type": "int", "symmetric": symmetric, "strategy": "group", "group_size": group}
        return {
            "quant_method": "compressed-tensors",
            "format": "pack-quantized",
            "quantization_status": "compressed",
            "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": None}},
            "ignore": ["lm_head", "re:.*in_proj_[ab]$"],
        }
    if form == "awq":
        return {"quant_method": "awq", "bits": 4, "group_size": group, "zero_point": True, "version": "gemm"}
    if form == "auto-round":
        return {
            "quant_method": "auto-round",
            "bits": bits,
            "group_size": group,
            "sym": symmetric,
            "packing_format": "auto_round",
        }
    version = "gptq" if form == "gptq" else "gptq_v2"
    return {
        "quant_method": "gptq",
        "bits": bits,
        "group_size": group,
        "sym": symmetric,
        "desc_act": False,
        "checkpoint_format": version,
    }


def make_foreign(
    source: Path, out: Path, form: str, *, bits: int = 4, group: int = 32, symmetric: bool = True
) -> dict[str, torch.Tensor]:
    """Quantise the decoder's linears of `source` at random into `form`. Returns stored module name -> weight fp32."""
    shutil.copytree(source, out)
    generator = torch.Generator().manual_seed(11)
    expected: dict[str, torch.Tensor] = {}
    placed: dict[str, str] = {}
    for path in sorted(out.glob("*.safetensors")):
        tensors = load_file(path)
        for name in sorted(tensors):
            module = name.removesuffix(".weight")
            linear = name.endswith("_proj.weight") or "in_proj_qkv" in name or "in_proj_z" in name
            if not linear or ".layers." not in name or name.startswith("mtp."):
                continue
            n, k = tensors.pop(name).shape
            codes, scales, zeros = random_codes((n, k), bits, group, symmetric, generator)
            spread = scales.float().repeat_interleave(group, 1)
            expected[module] = spread * (codes - zeros.repeat_interleave(group, 1))
            packed = stored_form(form, codes, scales, zeros, bits, symmetric)
            tensors |= {f"{module}.{suffix}": tensor.contiguous() for suffix, tensor in packed.items()}
        save_file(tensors, path, {"format": "pt"})
        placed |= dict.fromkeys(tensors, path.name)
    index = out / "model.safetensors.index.json"
    if index.exists():
        index.write_text(json.dumps({"metadata": {}, "weight_map": placed}))
    config = json.loads((out / "config.json").read_text())
    config["quantization_config"] = foreign_config(form, bits, group, symmetric)
    (out / "config.json").write_text(json.dumps(config))
    return expected
