"""The MTP module from its definition, with no cache: every draft recomputes all rows in fp32.

Row t joins the embedding of token t+1 with the target's post-norm hidden of token t (embedding half first) and
predicts token t+2; a chain appends a row made of its own output and its own draft.
"""

from __future__ import annotations

from pathlib import Path

import torch
import torch.nn.functional as F

from soloist.checkpoint.reader import open_checkpoint


def offset_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return x / torch.sqrt(x.square().mean(-1, keepdim=True) + eps) * (1 + weight)


def rotate(x: torch.Tensor, positions: torch.Tensor, theta: float, width: int) -> torch.Tensor:
    """Half-split rotary embedding of x [T, heads, D] over the first `width` channels."""
    half = width // 2
    angles = positions[:, None, None] * theta ** (-torch.arange(half, dtype=torch.float32) / half)
    first, second = x[..., :half], x[..., half:width]
    turned = (first * angles.cos() - second * angles.sin(), second * angles.cos() + first * angles.sin())
    return torch.cat((*turned, x[..., width:]), -1)


class MtpOracle:
    """`rows` gives hiddens, `draft` a greedy chain. Head and embedding are the target's."""

    def __init__(self, directory: str | Path) -> None:
        checkpoint = open_checkpoint(directory)
        self.config = checkpoint.config
        names = [name for name in checkpoint.modules if name.startswith("mtp.")]
        self.w = {f"{name}.weight": checkpoint.tensor(f"{name}.weight").float() for name in names}
        self.w |= {n: checkpoint.tensor(n).float() for n in checkpoint.layout.tensors if n.startswith("mtp.")}
        self.embedding = checkpoint.weight("embed_tokens").dequantize()
        self.head = checkpoint.weight("lm_head").dequantize()

    def rows(self, hidden: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """hidden [T, H], tokens [T] (each the successor of its hidden) -> outputs [T, H] after the last norm."""
        c, w, layer = self.config, self.w, "mtp.layers.0."
        count = len(tokens)
        positions = torch.arange(count, dtype=torch.float32)

        def norm(x: torch.Tensor, name: str) -> torch.Tensor:
            return offset_norm(x, w[f"{name}.weight"], c.eps)

        embedded = norm(self.embedding[tokens], "mtp.pre_fc_norm_embedding")
        x = torch.cat((embedded, norm(hidden, "mtp.pre_fc_norm_hidden")), -1) @ w["mtp.fc.weight"].T
        y = norm(x, layer + "input_layernorm")
        both = (y @ w[layer + "self_attn.q_proj.weight"].T).view(count, c.num_heads, 2, c.head_dim)
        query, gate = both[:, :, 0], both[:, :, 1]
        key = (y @ w[layer + "self_attn.k_proj.weight"].T).view(count, c.num_kv_heads, c.head_dim)
        value = (y @ w[layer + "self_attn.v_proj.weight"].T).view(count, c.num_kv_heads, c.head_dim)
        query = rotate(norm(query, layer + "self_attn.q_norm"), positions, c.rope_theta, c.rope_dim)
        key = rotate(norm(key, layer + "self_attn.k_norm"), positions, c.rope_theta, c.rope_dim)
        mixed = F.scaled_dot_product_attention(
            query.transpose(0, 1)[None],
            key.transpose(0, 1).repeat_interleave(c.kv_groups, 0)[None],
            value.transpose(0, 1).repeat_interleave(c.kv_groups, 0)[None],
            is_causal=True,
        )[0].transpose(0, 1)
        x = x + (mixed * gate.sigmoid()).flatten(1) @ w[layer + "self_attn.o_proj.weight"].T
        y = norm(x, layer + "post_attention_layernorm")
        up = F.silu(y @ w[layer + "mlp.gate_proj.weight"].T) * (y @ w[layer + "mlp.up_proj.weight"].T)
        return norm(x + up @ w[layer + "mlp.down_proj.weight"].T, "mtp.norm")

    def draft(self, hidden: torch.Tensor, tokens: list[int], k: int) -> list[int]:
        """Greedy chain of k drafts. hidden [T, H] are the target's for tokens x_0..x_{T-1}, tokens x_1..x_T."""
        drafts: list[int] = []
        for _ in range(k):
            out = self.rows(hidden, torch.tensor([*tokens, *drafts]))
            drafts.append(int((out[-1] @ self.head.T).argmax()))
            hidden = torch.cat((hidden, out[-1:]))
        return drafts
