"""The DFlash2 block drafter from its definition: one sequence, no cache, fp32.

Context features come from the target's streams after the tapped layers; the block is the anchor and mask tokens;
attention inside the block is bidirectional, context keys are visible within the window; the selector walks greedily.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F

from oracle.mtp import rotate
from soloist.checkpoint.reader import open_checkpoint


@dataclass(frozen=True)
class Block:
    """drafts [S-1]; candidates [S-1, top_k] token ids, best first; scores [S-1, top_k] along the realised path."""

    drafts: list[int]
    candidates: torch.Tensor
    scores: torch.Tensor


def plain_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return x / torch.sqrt(x.square().mean(-1, keepdim=True) + eps) * weight


class Dflash2Oracle:
    """Weights of a drafter directory with the embedding and head of its target."""

    def __init__(self, directory: str | Path, target: str | Path) -> None:
        checkpoint, owner = open_checkpoint(directory, "drafter"), open_checkpoint(target)
        self.config = checkpoint.drafter_config
        self.w = {f"{name}.weight": checkpoint.tensor(f"{name}.weight").float() for name in checkpoint.modules}
        self.w |= {name: checkpoint.tensor(name).float() for name in checkpoint.layout.tensors}
        self.embedding = owner.weight("embed_tokens").dequantize()
        self.head = owner.weight("lm_head").dequantize()

    def _norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return plain_norm(x, self.w[f"{name}.weight"], self.config.eps)

    def _heads(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return (x @ self.w[f"{name}.weight"].T).view(len(x), -1, self.config.head_dim)

    def _convolve(self, prefix: str, side: int, x: torch.Tensor, delta: torch.Tensor) -> torch.Tensor:
        """x [S, H]; delta [S, taps, groups] from the rows themselves; nothing crosses the block's start."""
        kernel = self.w[f"{prefix}.base_kernel"][side]
        weights = kernel[None] + delta.repeat_interleave(self.config.conv_group, -1)
        shifted = torch.stack([F.pad(x, (0, 0, t, 0))[: len(x)] for t in range(self.config.conv_taps)], 1)
        return (weights * shifted).sum(1)

    def hidden(self, features: torch.Tensor, anchor: int) -> torch.Tensor:
        """features [T, taps * H] of positions 0..T-1, anchor the token at T -> normed rows [S, H]."""
        c, w = self.config, self.w
        context = self._norm(features @ w["fc.weight"].T, "hidden_norm")
        past = torch.arange(len(context), dtype=torch.float32)
        here = len(context) + torch.arange(c.block_size, dtype=torch.float32)
        where = torch.cat((past, here))
        visible = (here[:, None] - where[None]).abs() < c.window
        visible[:, len(past) :] = True
        x = self.embedding[torch.tensor([anchor] + [c.mask_token_id] * (c.block_size - 1))] * c.embedding_scale
        for i in range(c.num_layers):
            attention, prefix = f"layers.{i}.self_attn", f"layers.{i}"
            y = self._norm(x, f"{prefix}.input_layernorm")
            delta = y @ w[f"{prefix}.attention_conv.kernel_projection.weight"].T
            delta = delta.view(c.block_size, 2, c.conv_taps, -1)
            y = self._convolve(f"{prefix}.attention_conv", 0, y, delta[:, 0])
            both = torch.cat((context, y))
            query = self._norm(self._heads(y, f"{attention}.q_proj"), f"{attention}.q_norm")
            key = self._norm(self._heads(both, f"{attention}.k_proj"), f"{attention}.k_norm")
            value = self._heads(both, f"{attention}.v_proj")
            query, key = rotate(query, here, c.rope_theta, c.rope_dim), rotate(key, where, c.rope_theta, c.rope_dim)
            groups = c.num_heads // c.num_kv_heads
            mixed = F.scaled_dot_product_attention(
                query.transpose(0, 1)[None],
                key.transpose(0, 1).repeat_interleave(groups, 0)[None],
                value.transpose(0, 1).repeat_interleave(groups, 0)[None],
                attn_mask=visible,
            )[0].transpose(0, 1)
            out = mixed.flatten(1) @ w[f"{attention}.o_proj.weight"].T
            x = x + self._convolve(f"{prefix}.attention_conv", 1, out, delta[:, 1])
            y = self._norm(x, f"{prefix}.post_attention_layernorm")
            delta = (y @ w[f"{prefix}.mlp_conv.kernel_projection.weight"].T).view(c.block_size, 2, c.conv_taps, -1)
            y = self._convolve(f"{prefix}.mlp_conv", 0, y, delta[:, 0])
            up = F.silu(y @ w[f"{prefix}.mlp.gate_proj.weight"].T) * (y @ w[f"{prefix}.mlp.up_proj.weight"].T)
            out = up @ w[f"{prefix}.mlp.down_proj.weight"].T
            x = x + self._convolve(f"{prefix}.mlp_conv", 1, out, delta[:, 1])
        return self._norm(x, "norm")

    def draft(self, features: torch.Tensor, anchor: int) -> Block:
        """One greedy block: top-k candidates of each slot, walked from the anchor."""
        c, w = self.config, self.w
        rows = self.hidden(features, anchor)[1:]
        values, candidates = (rows @ self.head.T).sort(dim=-1, descending=True, stable=True)
        values, candidates = values[:, : c.selector_top_k], candidates[:, : c.selector_top_k]
        unary = values * c.output_multiplier
        if c.softcap > 0:
            unary = c.softcap * torch.tanh(unary / c.softcap)
        projected = rows @ w["candidate_selector.hidden_projection.weight"].T
        before = w["candidate_selector.predecessor_codebook"]
        after = w["candidate_selector.successor_codebook"]
        token, drafts, scores = anchor, [], []
        for slot in range(len(rows)):
            score = unary[slot] + after[candidates[slot]] @ (before[token] * projected[slot])
            token = int(candidates[slot, score.argmax()])
            drafts.append(token)
            scores.append(score)
        return Block(drafts, candidates, torch.stack(scores))
