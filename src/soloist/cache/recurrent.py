"""Recurrent and convolution state: one slot per request, as of its last settled token.

A Gated DeltaNet layer cannot un-see a rejected token, so a verify step never writes here. It leaves a
`Record` behind; `settle` moves the accepted path's end into the slots.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from soloist.checkpoint.config import ModelConfig


@dataclass
class StateShapes:
    """layers: how many DeltaNet layers; the rest as in the checkpoint's config."""

    layers: int
    value_heads: int
    key_dim: int
    value_dim: int
    conv_channels: int
    conv_kernel: int

    @classmethod
    def of(cls, config: ModelConfig) -> StateShapes:
        """The state a model of this config carries."""
        c = config
        heads, conv = (c.linear_value_heads, c.linear_key_dim, c.linear_value_dim), (c.conv_channels, c.conv_kernel)
        return cls(len(c.linear_layers), *heads, *conv)


class RecurrentState:
    """states[layer] [slots, Hv, dk, dv] in `state_dtype`; conv[layer] [slots, K-1, C] in `dtype`, oldest first."""

    def __init__(
        self,
        shapes: StateShapes,
        slots: int,
        state_dtype: torch.dtype = torch.float32,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        s = shapes
        self.shapes, self.slots, self.state_dtype, self.dtype = shapes, slots, state_dtype, dtype
        # One tensor over all layers: a card settles them in one launch. Layers are views of it.
        self.all_states = torch.zeros(
            s.layers, slots, s.value_heads, s.key_dim, s.value_dim, dtype=state_dtype, device=device
        )
        self.all_conv = torch.zeros(s.layers, slots, s.conv_kernel - 1, s.conv_channels, dtype=dtype, device=device)
        self.states = list(self.all_states.unbind())
        self.conv = list(self.all_conv.unbind())

    def reset(self, slot: int) -> None:
        """Forget everything: the state before the first token."""
        self.all_states[:, slot].zero_()
        self.all_conv[:, slot].zero_()

    def export(self, slot: int) -> list[torch.Tensor]:
        """Host copies of one slot, bit for bit: states [layers, Hv, dk, dv] and conv columns [layers, K-1, C].

        From a card layer by layer into pinned memory: a snapshot of a 27B takes milliseconds and no memory of the card.
        """
        return [_slot_on_host(t, slot) for t in (self.all_states, self.all_conv)]

    def load(self, slot: int, tensors: list[torch.Tensor]) -> None:
        """Put an exported slot back, into any slot."""
        for t, saved in zip((self.all_states, self.all_conv), tensors, strict=True):
            t[:, slot].copy_(saved, non_blocking=True)


def _slot_on_host(layers: torch.Tensor, slot: int) -> torch.Tensor:
    """layers [L, slots, ...] -> a host copy [L, ...] of one slot."""
    if not layers.is_cuda:
        return layers[:, slot].clone()
    host = torch.empty(layers.shape[:1] + layers.shape[2:], dtype=layers.dtype, pin_memory=True)
    for mine, layer in zip(host, layers, strict=True):
        mine.copy_(layer[slot], non_blocking=True)
    torch.cuda.current_stream(layers.device).synchronize()
    return host
