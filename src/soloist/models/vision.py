"""The vision tower: transformers' own module over the checkpoint's tensors, resident or streamed from host memory.

Streamed, a submodule (patch embedding, one block, merger) exists on the device only while it runs: its host tensors
are copied there and handed to the same module code, so rows are equal bit for bit to a resident tower's. It costs a
copy of the tower's bytes over the bus per picture and frees its memory for KV.

What can go wrong: transformers is an extra and imports slowly, so nothing of it is touched before a tower is built.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.func import functional_call

from soloist.checkpoint.processor import Processor
from soloist.checkpoint.shards import TensorInfo
from soloist.errors import CheckpointError, SettingError
from soloist.models.pictures import Picture


class _Streamed(nn.Module):
    """A module whose parameters stay on the host and visit the device for the time of a call."""

    def __init__(self, module: nn.Module, device: torch.device) -> None:
        super().__init__()
        pin = device.type == "cuda"
        held = {n: p.detach().pin_memory() if pin else p.detach() for n, p in module.named_parameters()}
        # In a tuple, out of nn.Module's own tables: the shell is empty, and the tensors must not move with a parent.
        self._held = (module.to("meta"), held)
        self._device = device

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        shell, tensors = self._held
        here = {name: tensor.to(self._device, non_blocking=True) for name, tensor in tensors.items()}
        return functional_call(shell, here, args, kwargs)


class VisionTower:
    """`encode` turns a picture into its rows of the residual stream, one at a time, so that a row's bits depend on its
    picture alone."""

    def __init__(
        self,
        config: Mapping[str, Any],
        tensors: Mapping[str, TensorInfo],
        processor: Processor,
        hidden_size: int,
        device: torch.device,
        dtype: torch.dtype,
        offload: bool = False,
    ) -> None:
        self.processor, self.device, self.dtype, self.offload = processor, device, dtype, offload
        module = _module(config)
        c = module.config
        shape = (c.patch_size, c.temporal_patch_size, c.spatial_merge_size)
        if shape != (processor.patch, processor.frames, processor.merge):
            raise CheckpointError(
                f"The vision tower has patch, temporal and merge sizes {shape}, the preprocessor config "
                f"{(processor.patch, processor.frames, processor.merge)}.",
                "config.json and preprocessor_config.json belong to different models; download both again.",
            )
        if c.out_hidden_size != hidden_size:
            raise CheckpointError(
                f"The vision tower gives rows of {c.out_hidden_size}, the model reads {hidden_size}.",
                "config.json is damaged; download it again.",
            )
        self._load(module, tensors)
        self._module = self._stream(module) if offload else module.to(device)
        self._mean = torch.tensor(processor.mean, device=device).view(3, 1, 1)
        self._std = torch.tensor(processor.std, device=device).view(3, 1, 1)

    @property
    def nbytes(self) -> int:
        """Bytes that stay on the device."""
        return sum(p.nbytes for p in self._module.parameters())

    def _load(self, module: nn.Module, tensors: Mapping[str, TensorInfo]) -> None:
        state = {}
        for name, wanted in module.state_dict().items():
            info = tensors.get(name)
            if info is None or info.shape != tuple(wanted.shape):
                found = "missing" if info is None else f"{list(info.shape)}, the config implies {list(wanted.shape)}"
                raise CheckpointError(f"visual.{name} is {found}.", "Download the checkpoint again, or set VISION=0.")
            state[name] = info.view().to(self.dtype, copy=True)
        module.load_state_dict(state, strict=True, assign=True)

    def _stream(self, module: Any) -> nn.Module:
        """Every part that owns parameters is streamed; buffers (rotary frequencies) stay."""
        module.rotary_pos_emb.to(self.device)
        module.patch_embed = _Streamed(module.patch_embed, self.device)
        module.pos_embed = _Streamed(module.pos_embed, self.device)
        module.merger = _Streamed(module.merger, self.device)
        module.blocks = nn.ModuleList([_Streamed(block, self.device) for block in module.blocks])
        return module

    @torch.inference_mode()
    def encode(self, picture: Picture) -> torch.Tensor:
        """Rows [picture.tokens, H] of the residual stream, in the order of the placeholders."""
        p = self.processor
        grid = torch.tensor([[1, picture.rows * p.merge, picture.columns * p.merge]], device=self.device)
        return self._module(self.patches(picture), grid_thw=grid).pooler_output

    def patches(self, picture: Picture) -> torch.Tensor:
        """Normalised patches [n, 3 * frames * patch * patch], merged patches together, as the tower reads them."""
        p = self.processor
        x = picture.pixels.to(self.device).permute(2, 0, 1).float() * p.scale
        x = (x - self._mean) / self._std
        x = x.reshape(3, picture.rows, p.merge, p.patch, picture.columns, p.merge, p.patch)
        # Row, column, both within the merge, channel, frame (a still picture repeats), y, x.
        x = x.permute(1, 4, 2, 5, 0, 3, 6).unsqueeze(5)
        return x.expand(-1, -1, -1, -1, -1, p.frames, -1, -1).reshape(picture.tokens * p.merge**2, -1).to(self.dtype)


def _module(config: Mapping[str, Any]) -> Any:
    """transformers' tower of these shapes, without memory for parameters."""
    try:
        from transformers.utils import logging

        loudness = logging.get_verbosity()
        logging.set_verbosity_error()  # its notes on import are about the text model's kernels
        try:
            from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5VisionConfig
            from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5VisionModel
        finally:
            logging.set_verbosity(loudness)
    except ImportError as error:
        raise SettingError(
            f"VISION=1 needs the vision extra ({error}).", "Run `pip install 'soloist[vision]'`, or set VISION=0."
        ) from None
    known = {k: v for k, v in config.items() if k not in ("model_type", "dtype", "torch_dtype")}
    settings = Qwen3_5VisionConfig(**known)
    settings._attn_implementation = "sdpa"
    with torch.device("meta"):
        module = Qwen3_5VisionModel(settings)
    # Buffers are not in the checkpoint; they follow from the shapes.
    module.rotary_pos_emb = type(module.rotary_pos_emb)(settings)
    return module.eval().requires_grad_(False)
