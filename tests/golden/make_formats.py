"""Writes formats.safetensors: small matrices packed and dequantised by the libraries that define the formats.

Run by hand in an environment with auto-round and gptqmodel:  python tests/golden/make_formats.py
Per case the stored tensors (`case.qweight`, ...) and `case.expected` [N, K] fp16 as the library dequantises.
"""

from __future__ import annotations

from pathlib import Path

import torch
from auto_round.export.export_to_awq.utils import WQLinear_GEMM, dequantize_gemm
from auto_round_extension.torch import qlinear_torch, qlinear_torch_zp
from gptqmodel import QuantizeConfig
from gptqmodel.nn_modules.qlinear.torch import TorchLinear
from gptqmodel.utils.backend import BACKEND
from gptqmodel.utils.model import convert_gptq_v2_to_v1_format_module
from safetensors.torch import save_file

N, K, GROUP = 32, 128, 32


def case(seed: int, bits: int, symmetric: bool) -> tuple[torch.nn.Linear, torch.Tensor, torch.Tensor]:
    """(linear whose weight lies on the grid, scales [N, G] of either sign, zero points [N, G])."""
    generator = torch.Generator().manual_seed(seed)
    groups = K // GROUP
    top = (1 << bits) - 1
    codes = torch.randint(0, top + 1, (N, K), generator=generator)
    zeros = torch.full((N, groups), 1 << (bits - 1))
    if not symmetric:
        zeros = torch.randint(1, top + 1, (N, groups), generator=generator)
    scales = (torch.rand(N, groups, generator=generator) * 0.02 + 0.001).half().float()
    signs = torch.randint(0, 2, (N, groups), generator=generator) * 2 - 1
    scales = scales * signs
    spread = scales.repeat_interleave(GROUP, 1)
    linear = torch.nn.Linear(K, N, bias=False)
    linear.weight.data = spread * (codes - zeros.repeat_interleave(GROUP, 1))
    return linear, scales, zeros


def auto_gptq(bits: int, symmetric: bool, seed: int) -> dict[str, torch.Tensor]:
    linear, scales, zeros = case(seed, bits, symmetric)
    layer = qlinear_torch_zp.QuantLinear(bits, GROUP, K, N, False)
    layer.pack(linear, scales, 1 << (bits - 1) if symmetric else zeros.float(), None, device="cpu")
    expected = layer(torch.eye(K, dtype=torch.float16)).t().contiguous()
    return {"qweight": layer.qweight, "qzeros": layer.qzeros, "scales": layer.scales, "expected": expected}


def raw_zeros(bits: int, seed: int) -> dict[str, torch.Tensor]:
    linear, scales, zeros = case(seed, bits, False)
    layer = qlinear_torch.QuantLinear(bits, GROUP, K, N, False)
    layer.device = torch.device("cpu")  # read by its pack, set by no constructor
    layer.pack(linear, scales, zeros.float(), None, device="cpu")
    expected = layer(torch.eye(K, dtype=torch.float16)).t().contiguous()
    return {"qweight": layer.qweight, "qzeros": layer.qzeros, "scales": layer.scales, "expected": expected}


def auto_awq(seed: int) -> dict[str, torch.Tensor]:
    linear, scales, zeros = case(seed, 4, False)
    layer = WQLinear_GEMM.from_linear(
        linear, 4, GROUP, scales=scales.t().contiguous(), zeros=zeros.t().contiguous(), device="cpu"
    )
    expected = dequantize_gemm(layer.qweight, layer.qzeros, layer.scales, 4, GROUP).t().contiguous()
    return {"qweight": layer.qweight, "qzeros": layer.qzeros, "scales": layer.scales, "expected": expected}


def gptqmodel(bits: int, symmetric: bool, seed: int, version: int) -> dict[str, torch.Tensor]:
    linear, scales, zeros = case(seed, bits, symmetric)
    layer = TorchLinear(
        bits=bits,
        group_size=GROUP,
        sym=symmetric,
        desc_act=False,
        in_features=K,
        out_features=N,
        bias=False,
        backend=BACKEND.GPTQ_TORCH,
        register_buffers=True,
    )
    order = torch.arange(K, dtype=torch.int32) // GROUP
    layer.pack_original(linear.half(), scales.half(), zeros, order)
    layer.post_init()
    expected = layer.dequantize_weight().t().contiguous().half()
    if version == 1:
        convert_gptq_v2_to_v1_format_module(layer, QuantizeConfig(bits=bits, group_size=GROUP, sym=symmetric))
    return {
        "qweight": layer.qweight.clone(),
        "qzeros": layer.qzeros.clone(),
        "scales": layer.scales.clone(),
        "g_idx": layer.g_idx.int().clone(),
        "expected": expected,
    }


def main() -> None:
    cases = {
        "auto_gptq_sym4": auto_gptq(4, True, 1),
        "auto_gptq_asym4": auto_gptq(4, False, 2),
        "auto_gptq_sym8": auto_gptq(8, True, 3),
        "auto_round_asym4": raw_zeros(4, 4),
        "auto_awq": auto_awq(5),
        "gptq_v1_sym4": gptqmodel(4, True, 6, 1),
        "gptq_v1_asym4": gptqmodel(4, False, 7, 1),
        "gptq_v2_asym4": gptqmodel(4, False, 8, 2),
        "gptq_v2_sym8": gptqmodel(8, True, 9, 2),
    }
    flat = {f"{name}.{key}": tensor.contiguous() for name, tensors in cases.items() for key, tensor in tensors.items()}
    save_file(flat, Path(__file__).with_name("formats.safetensors"))
    for name, tensors in cases.items():
        print(name, {key: (tuple(t.shape), str(t.dtype)) for key, t in tensors.items()})


if __name__ == "__main__":
    main()
