"""The MTP module: one gated-attention decoder layer that predicts the token after next.

A row pairs a token with the target's hidden state of the token before it (after the final norm) and predicts the token
that follows. It is stored at its token's own position, so what a cache position holds depends on no later token, and
pages of a shared prefix can be shared. Position 0 has no row: nothing precedes it.

Embedding and head are the target's. A truncated head covers `ids` only: candidate i means token ids[i].
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from soloist.checkpoint.config import ModelConfig
from soloist.errors import CheckpointError
from soloist.models.layers import MLP, Attention, DecoderNorms, Loader
from soloist.models.pictures import Seen
from soloist.ops.linear import DenseWeight, Weight
from soloist.ops.norms import rms_norm
from soloist.ops.products import Linear
from soloist.ops.rope import inverse_frequencies, rope_tables

# (q [T, n, D], k [T, kv, D], v [T, kv, D]) -> o [T, n, D]
Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]

STORED_HEAD = "mtp.draft_lm_head"


def truncated_head(load: Loader, ids: torch.Tensor, stored: bool) -> Linear:
    """The head's rows `ids` (int64 [N]) as a product: the stored `mtp.draft_lm_head`, or gathered from `lm_head`."""
    if stored:
        return load.linear([STORED_HEAD])
    rows = load.source.weight("lm_head").rows(ids)
    return load.of(DenseWeight(rows))


class MTPModule:
    """The loaded module. `head` and `ids` may be set to a truncated head; `ids` None means the full vocabulary."""

    def __init__(
        self,
        load: Loader,
        config: ModelConfig,
        embedding: Weight,
        head: Linear,
        ids: torch.Tensor | None = None,
    ) -> None:
        if config.mtp_layers != 1:
            raise CheckpointError(
                f"An MTP module of {config.mtp_layers} layers is not supported.", "Use SPEC=dflash2 or SPEC=none."
            )
        prefix = "mtp.layers.0"
        self.config, self.dtype, self.device = config, load.dtype, load.device
        self.embedding, self.head, self.ids = embedding, head, ids
        self.fc = load.linear(["mtp.fc"])
        self.norms = DecoderNorms(load, prefix, config.eps)
        self.attention = Attention(load, f"{prefix}.self_attn", config)
        self.mlp = MLP(load, f"{prefix}.mlp")
        self.norm = load.factor("mtp.norm.weight")
        # Both halves of fc's input are normed in one call.
        self.pre = torch.stack([load.factor(f"mtp.pre_fc_norm_{part}.weight") for part in ("embedding", "hidden")])
        self.inverse = inverse_frequencies(config.rope_dim, config.rope_theta, load.device)

    @torch.inference_mode()
    def forward(
        self,
        tokens: torch.Tensor,
        hidden: torch.Tensor,
        positions: torch.Tensor,
        attend: Attend,
        seen: Seen | None = None,
    ) -> torch.Tensor:
        """tokens int64 [T]; hidden [T, H], of the token before each; positions int64 [T] or [3, T]: what RoPE turns the
        tokens by; seen: rows of a picture.

        Returns z [T, H] after the module's norm: what the head reads, and the hidden of the next chain row.
        `attend` is given the rows' q, k, v and sees to the cache.
        """
        embedded = self.embedding.rows(tokens, self.dtype)
        if seen is not None:
            embedded = embedded.index_copy(0, seen[0], seen[1].to(self.dtype))
        pair = rms_norm(torch.stack([embedded, hidden.to(self.dtype)], 1), self.pre, self.config.eps)
        x = self.fc(pair.flatten(1))
        cos, sin = rope_tables(positions, self.inverse, self.config.mrope_section)
        q, gate, k, v = self.attention.project(self.norms.mixer(x), cos, sin)
        x = self.attention.finish(attend(q, k, v), gate, x)
        x = self.mlp(self.norms.mlp(x), x)
        return rms_norm(x, self.norm, self.config.eps)

    @torch.inference_mode()
    def logits(self, z: torch.Tensor) -> torch.Tensor:
        """Draft logits fp32 [n, N] over `ids` (or the vocabulary)."""
        return self.head(z).float()

    def token_ids(self, candidates: torch.Tensor) -> torch.Tensor:
        """Head rows int64 [...] -> token ids."""
        return candidates if self.ids is None else self.ids[candidates]
