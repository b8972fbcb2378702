"""Random weights of a named shape, made on the card in the prepared format: 4-bit body and head, 16-bit gates.

Speed does not depend on what a weight says, so a 27B can be timed where no checkpoint is at hand. Scales are chosen
so that activations stay of order one; nothing else about the numbers means anything.
"""

from __future__ import annotations

import torch

from soloist.checkpoint.config import DrafterConfig, ModelConfig
from soloist.ops.linear import DenseWeight, QuantizedWeight, Weight

GROUP = 128
DENSE = ("embed_tokens", "in_proj_b", "in_proj_a")  # modules of 16 bits
DRAFT_ROWS = 40960  # of a truncated head


def qwen38_27b(layers: int = 64) -> ModelConfig:
    """The published Qwen3.8-27B shape; `layers` may be cut to a multiple of 4 for a quick look."""
    return ModelConfig(
        vocab_size=248320,
        hidden_size=5120,
        num_layers=layers,
        intermediate_size=17408,
        num_heads=24,
        num_kv_heads=4,
        head_dim=256,
        rope_dim=64,
        rope_theta=1e7,
        mrope_section=(11, 11, 10),
        linear_key_heads=16,
        linear_value_heads=48,
        linear_key_dim=128,
        linear_value_dim=128,
        conv_kernel=4,
        layer_types=tuple("full_attention" if i % 4 == 3 else "linear_attention" for i in range(layers)),
        eps=1e-6,
        attention_bias=False,
        gate_activation="silu",
        tied=False,
        max_position=262144,
        mtp_layers=1,
        eos_ids=(248044,),
        dtype="bfloat16",
        quantization=None,
        vision=None,
    )


def dflash2_27b(c: ModelConfig) -> DrafterConfig:
    """The published DFlash2 drafter of the 27B, for a target of these widths; its taps are spread over the layers."""
    taps = tuple(min(round((i + 0.5) * c.num_layers / 5), c.num_layers - 1) for i in range(5))
    return DrafterConfig(
        hidden_size=c.hidden_size,
        num_layers=5,
        intermediate_size=c.intermediate_size,
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
        rope_dim=128,
        rope_theta=c.rope_theta,
        vocab_size=c.vocab_size,
        eps=1e-6,
        window=2048,
        causal=False,
        block_size=8,
        mask_token_id=c.vocab_size - 1,
        tap_layers=taps,
        conv_taps=2,
        conv_group=16,
        selector_rank=256,
        selector_top_k=16,
        embedding_scale=1.0,
        output_multiplier=1.0,
        softcap=0.0,
        quantization=None,
    )


SHAPES = {"qwen3.8-27b": qwen38_27b}


class SyntheticSource:
    """Answers like a checkpoint: `weight(module)` and `tensor(name)` of the right shape, random, on `device`."""

    def __init__(self, config: ModelConfig, device: torch.device) -> None:
        self.config, self.device = config, device

    def _shape(self, module: str) -> tuple[int, int]:
        c = self.config
        values = c.linear_value_heads * c.linear_value_dim
        heads, kv = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
        table = {
            "embed_tokens": (c.vocab_size, c.hidden_size),
            "lm_head": (c.vocab_size, c.hidden_size),
            "q_proj": (2 * heads, c.hidden_size),
            "k_proj": (kv, c.hidden_size),
            "v_proj": (kv, c.hidden_size),
            "o_proj": (c.hidden_size, heads),
            "in_proj_qkv": (c.conv_channels, c.hidden_size),
            "in_proj_z": (values, c.hidden_size),
            "in_proj_b": (c.linear_value_heads, c.hidden_size),
            "in_proj_a": (c.linear_value_heads, c.hidden_size),
            "out_proj": (c.hidden_size, values),
            "gate_proj": (c.intermediate_size, c.hidden_size),
            "up_proj": (c.intermediate_size, c.hidden_size),
            "down_proj": (c.hidden_size, c.intermediate_size),
        }
        return table[module.rsplit(".", 1)[-1]]

    def weight(self, module: str) -> Weight:
        """Linears are 4-bit with symmetric groups of 128; embedding and gates are 16-bit."""
        n, k = self._shape(module)
        if module.endswith(DENSE):
            return DenseWeight(torch.randn(n, k, device=self.device, dtype=torch.bfloat16) * k**-0.5)
        return self.quantized(n, k, self.device)

    def borrowed(self, module: str) -> QuantizedWeight | None:
        """`weight` where it is quantised: nothing here lies in a file."""
        if module.endswith(DENSE):
            return None
        weight = self.weight(module)
        return weight if isinstance(weight, QuantizedWeight) else None

    @staticmethod
    def quantized(n: int, k: int, device: torch.device) -> QuantizedWeight:
        """Random 4-bit codes [n, k] whose products keep activations of order one."""
        codes = torch.randint(-(2**31), 2**31 - 1, (n, k // 8), dtype=torch.int32, device=device)
        # Uniform codes have a standard deviation of 4.6 steps.
        scales = torch.randn(n, k // GROUP, device=device).mul_(k**-0.5 / 4.6).to(torch.float16)
        return QuantizedWeight(codes, scales, None, 4, GROUP, (n, k))

    def tensor(self, name: str) -> torch.Tensor:
        """Norm weights near zero (they are applied as 1 + w), A_log and dt_bias as trained ones lie, conv taps."""
        c = self.config
        sizes = {
            "A_log": (c.linear_value_heads,),
            "dt_bias": (c.linear_value_heads,),
            "linear_attn.norm.weight": (c.linear_value_dim,),
            "q_norm.weight": (c.head_dim,),
            "k_norm.weight": (c.head_dim,),
            "conv1d.weight": (c.conv_channels, 1, c.conv_kernel),
        }
        shape = next((s for end, s in sizes.items() if name.endswith(end)), (c.hidden_size,))
        return torch.randn(shape, device=self.device) * 0.1


class SyntheticMTP(SyntheticSource):
    """An MTP module and its truncated head."""

    def _shape(self, module: str) -> tuple[int, int]:
        width = self.config.hidden_size
        own = {"mtp.fc": (width, 2 * width), "mtp.draft_lm_head": (DRAFT_ROWS, width)}
        return own.get(module) or super()._shape(module)


class SyntheticDFlash2:
    """A DFlash2 drafter of the published shape: 4-bit layers, the rest in 16 bits."""

    def __init__(self, config: DrafterConfig, device: torch.device) -> None:
        self.config, self.device = config, device

    def weight(self, module: str) -> Weight:
        c = self.config
        heads, kv = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
        n, k = {
            "fc": (c.hidden_size, len(c.tap_layers) * c.hidden_size),
            "q_proj": (heads, c.hidden_size),
            "k_proj": (kv, c.hidden_size),
            "v_proj": (kv, c.hidden_size),
            "o_proj": (c.hidden_size, heads),
            "gate_proj": (c.intermediate_size, c.hidden_size),
            "up_proj": (c.intermediate_size, c.hidden_size),
            "down_proj": (c.hidden_size, c.intermediate_size),
            "kernel_projection": (2 * c.conv_taps * c.hidden_size // c.conv_group, c.hidden_size),
            "hidden_projection": (c.selector_rank, c.hidden_size),
        }[module.rsplit(".", 1)[-1]]
        if module.endswith("projection"):
            return DenseWeight(torch.randn(n, k, device=self.device, dtype=torch.bfloat16) * k**-0.5)
        return SyntheticSource.quantized(n, k, self.device)

    def borrowed(self, module: str) -> QuantizedWeight | None:
        """`weight` where it is quantised: nothing here lies in a file."""
        weight = self.weight(module)
        return weight if isinstance(weight, QuantizedWeight) else None

    def tensor(self, name: str) -> torch.Tensor:
        c = self.config
        if name.endswith("codebook"):
            return torch.randn(c.vocab_size, c.selector_rank, device=self.device, dtype=torch.bfloat16)
        if name.endswith("base_kernel"):
            base = torch.zeros(2, c.conv_taps, c.hidden_size, device=self.device)
            base[:, 0] = 1.0
            return base
        return torch.ones(c.head_dim if name.endswith(("q_norm.weight", "k_norm.weight")) else c.hidden_size)
