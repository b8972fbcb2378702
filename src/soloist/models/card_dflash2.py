"""The DFlash2 drafter on a card: new context as one graph per row bucket, a block with its candidates as another.

The ring of context is shared with the drafter's host side (`drafting/card_dflash2.py`), which keeps the last slot of it
for padding. What comes back in one copy is every slot's candidates and the scores of all pairs. Everything between two
products is one kernel, and products are those of a decode step: a block's rows do not depend on its neighbours.
"""

from __future__ import annotations

import bisect
import logging
from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np
import torch

from soloist.models.captured import Graphs, Key, Mode, PinnedTables
from soloist.models.dflash2 import BlockLayer, DFlash2, GroupedConv
from soloist.ops.card_products import DenseLinear, W4Linear, decode
from soloist.ops.top import width
from soloist.ops.triton import grouped_conv, ring, rows
from soloist.ops.triton.dense import DenseProduct
from soloist.ops.triton.embed import Table, embed_block
from soloist.ops.triton.selector import pair_scores
from soloist.ops.triton.top import RowTop

log = logging.getLogger("soloist.models")

CONTEXT = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 24, 32, 48, 64)  # rows of new context that get a graph


class CardDFlash2:
    """`model` over a ring keys, values [layers, slots + 1, kv, window, D]."""

    def __init__(self, model: DFlash2, keys: torch.Tensor, values: torch.Tensor, mode: Mode = "on") -> None:
        self.model, self.keys, self.values = model, keys, values
        c, device, slots = model.config, model.device, keys.shape[1] - 1
        self.slots = slots
        self.requests = tuple(sorted({min(n, slots) for n in (1, 2, 4, 8, 16, 32, 64)}))
        self._embedding = Table.of(model.embedding)
        self._context = PinnedTables({"slots": (CONTEXT[-1],), "positions": (CONTEXT[-1],)}, device)
        self._block = PinnedTables(dict.fromkeys(("anchors", "positions", "firsts", "slots"), (slots,)), device)

        def half(*shape: int) -> torch.Tensor:
            return torch.zeros(shape, dtype=model.dtype, device=device)

        self.taps = half(CONTEXT[-1], len(c.tap_layers) * c.hidden_size)  # filled by the caller before `enter`
        self._tapped, self._features = (half(CONTEXT[-1], c.hidden_size) for _ in range(2))
        self._kv = half(CONTEXT[-1], 2 * c.num_layers * c.num_kv_heads * c.head_dim)
        most, heads = slots * c.block_size, c.num_heads + 2 * c.num_kv_heads
        self._x, self._h, self._inside, self._delta = (half(most, c.hidden_size) for _ in range(4))
        convs = [conv for layer in model.layers for conv in (layer.attention_conv, layer.mlp_conv)]
        self._coefficients = half(most, convs[0].projection.out_features)
        self._qkv = half(most, heads * c.head_dim)
        self._q = half(slots, c.block_size, c.num_heads, c.head_dim)
        self._k = half(slots, c.block_size, c.num_kv_heads, c.head_dim)
        self._mixed = half(most, c.num_heads * c.head_dim)
        self._gate_up, self._inner = half(most, 2 * c.intermediate_size), half(most, c.intermediate_size)
        self._partials = ring.RingPartials.allocate(most, c.window, c.num_heads, c.head_dim, device)
        proposed, k = slots * (c.block_size - 1), c.selector_top_k
        self._y, self._hidden = half(proposed, c.hidden_size), half(proposed, c.selector_rank)
        # The candidates are found among 16-bit values; off a card activations may have 32.
        kind = model.dtype if model.dtype.itemsize == 2 else torch.float16
        self._logits = torch.zeros(proposed, model.head.out_features, dtype=kind, device=device)
        self._top = RowTop(proposed, model.head.out_features, k, device, stats=False)
        self._packed = torch.zeros(proposed, width(k), dtype=torch.int32, device=device)
        self._found = torch.zeros(proposed * (k + k * k), dtype=torch.int32, device=device)
        self._arrived = torch.zeros(self._found.shape, dtype=torch.int32, pin_memory=device.type == "cuda")
        self._done = torch.cuda.Event() if device.type == "cuda" else None
        self._log_form(convs)
        self.graphs = Graphs(device, mode, self._named, self._work, self._results)

    def capture(self) -> None:
        """Compile and capture every bucket; a debug mode runs eagerly instead."""
        self.graphs.capture([*((n, 0) for n in reversed(CONTEXT)), *((n, 1) for n in reversed(self.requests))])

    def _named(self, key: Key) -> str:
        count, block = key
        return f"block of {count} requests" if block else f"context of {count} rows"

    def _work(self, key: Key) -> None:
        count, block = key
        (self._propose if block else self._enter)(count)

    def _results(self, key: Key) -> Mapping[str, torch.Tensor]:
        count, block = key
        if block:
            return {"candidates and scores": self._found}
        slots, positions = (self._context.card[name][:count].long() for name in ("slots", "positions"))
        # Padding rows all write one lane of their slot, in any order.
        real = slots < self.slots
        slots, lanes = slots[real], positions[real] % self.model.config.window
        return {"keys": self.keys[:, slots, :, lanes], "values": self.values[:, slots, :, lanes]}

    def _log_form(self, convs: Sequence[GroupedConv]) -> None:
        """Say once which convolutions stand inside their products, and why the others are kernels."""
        reasons = Counter(grouped_conv.why_not_inside(_narrow(conv), conv.padded) or "" for conv in convs)
        inside = reasons.pop("", 0)
        why = "; ".join(f"{count} are kernels: {reason}" for reason, count in reasons.items())
        log.info("drafter: %d of %d convolutions inside products; %s", inside, len(convs), why)

    # -- the host's side -------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def enter(self, slots: Sequence[int], positions: Sequence[int]) -> None:
        """Put new context rows into the ring; `taps` holds their features. At most CONTEXT[-1] rows."""
        host, count = self._context.open(), len(slots)
        bucket = CONTEXT[bisect.bisect_left(CONTEXT, count)]
        host["slots"][:] = self.slots
        host["positions"][:] = 0
        host["slots"][:count], host["positions"][:count] = slots, positions
        self._context.send()
        self.graphs.run((bucket, 0))

    @torch.inference_mode()
    def block(
        self, anchors: Sequence[int], positions: Sequence[int], firsts: Sequence[int], slots: Sequence[int]
    ) -> tuple[np.ndarray, np.ndarray]:
        """One block per request. Returns ids int64 [R, S, K] and pair scores fp32 [R, S, K, K], and waits for them."""
        host, count = self._block.open(), len(anchors)
        requests = self.requests[bisect.bisect_left(self.requests, count)]
        for name, values in (("anchors", anchors), ("positions", positions), ("firsts", firsts), ("slots", slots)):
            host[name][:] = self.slots if name == "slots" else 0
            host[name][:count] = values
        self._block.send()
        self.graphs.run((requests, 1))
        if self._done is not None:
            self._done.record()
            self._done.synchronize()
        ids, scores = self._views(self._arrived, requests)
        return ids[:count].numpy().astype(np.int64), scores[:count].numpy().copy()

    def _views(self, flat: torch.Tensor, requests: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Ids int32 [R, S, K] and scores fp32 [R, S, K, K] in the flat buffer of results."""
        s, k = self.model.config.block_size - 1, self.model.config.selector_top_k
        ids, scores = flat[: requests * s * (k + k * k)].split([requests * s * k, requests * s * k * k])
        return ids.view(requests, s, k), scores.view(torch.float32).view(requests, s, k, k)

    # -- the card's side -------------------------------------------------------------------------------------------

    def _enter(self, count: int) -> None:
        m, table = self.model, {name: t[:count] for name, t in self._context.card.items()}
        tapped, features, kv = self._tapped[:count], self._features[:count], self._kv[:count]
        decode(m.fc, self.taps[:count], tapped)
        rows.add_norm(tapped, None, m.hidden_norm, m.config.eps, features)
        decode(m.context_kv, features, kv)
        ring.enter(
            kv, m.context_norm, m.inverse, m.config.eps, table["slots"], table["positions"], self.keys, self.values
        )

    def _propose(self, requests: int) -> None:
        m, c = self.model, self.model.config
        table = {name: t[:requests] for name, t in self._block.card.items()}
        count, proposed = requests * c.block_size, requests * (c.block_size - 1)
        x, h, y = self._x[:count], self._h[:count], self._y[:proposed]
        first = m.layers[0].input_norm
        embed_block(self._embedding, table["anchors"], c.mask_token_id, c.embedding_scale, first, c.eps, x, h)
        for i, layer in enumerate(m.layers):
            self._attention(i, layer, table, x, h)
            following = m.layers[i + 1].input_norm if i + 1 < len(m.layers) else m.norm
            self._mlp(layer, x, h, following, h if i + 1 < len(m.layers) else y)
        logits, packed, hidden = self._logits[:proposed], self._packed[:proposed], self._hidden[:proposed]
        decode(m.head, y, logits)
        self._top(logits, packed)
        decode(m.selector, y, hidden)
        pair_scores(
            packed, m.ids, table["anchors"], hidden, (m.predecessors, m.successors), c.output_multiplier, c.softcap,
            *self._views(self._found, requests),
        )  # fmt: skip
        sent = proposed * (c.selector_top_k + c.selector_top_k**2)
        self._arrived[:sent].copy_(self._found[:sent], non_blocking=True)

    def _attention(
        self, index: int, layer: BlockLayer, table: dict[str, torch.Tensor], x: torch.Tensor, h: torch.Tensor
    ) -> None:
        """x += the attention sublayer of h; h = the norm in front of the MLP."""
        m, c, count = self.model, self.model.config, h.shape[0]
        requests, values_at = count // c.block_size, (c.num_heads + c.num_kv_heads) * c.head_dim
        inside = self._convolved(layer.attention_conv, h)
        qkv, mixed, delta = self._qkv[:count], self._mixed[:count], self._delta[:count]
        q, k = self._q[:requests], self._k[:requests]
        decode(layer.qkv, inside, qkv)
        ring.turn(qkv, layer.qk_norm, m.inverse, c.eps, table["positions"], q, k)
        v = qkv[:, values_at:].view(requests, c.block_size, c.num_kv_heads, c.head_dim)
        ring.ring_attention(
            q, k, v, self.keys[index], self.values[index], table["slots"], table["positions"], table["firsts"],
            self._partials, c.causal, mixed,
        )  # fmt: skip
        decode(layer.out, mixed, delta)
        self._added(layer.attention_conv, delta, x, layer.post_norm, h)

    def _mlp(
        self, layer: BlockLayer, x: torch.Tensor, h: torch.Tensor, factor: torch.Tensor, out: torch.Tensor
    ) -> None:
        """x += the MLP sublayer of h; out = the norm that follows."""
        count = h.shape[0]
        inside, delta, inner = self._convolved(layer.mlp_conv, h), self._delta[:count], self._inner[:count]
        if isinstance(layer.gate_up, W4Linear) and layer.gate_up.gates:
            layer.gate_up.gated(inside, inner, None)
        else:
            decode(layer.gate_up, inside, self._gate_up[:count])
            rows.silu_mul(self._gate_up[:count], inner)
        decode(layer.down, inner, delta)
        self._added(layer.mlp_conv, delta, x, factor, out)

    def _convolved(self, conv: GroupedConv, h: torch.Tensor) -> torch.Tensor:
        """The sublayer's input; coefficients of both sides are left for `_added`."""
        count, block = h.shape[0], self.model.config.block_size
        coefficients, inside, narrow = self._coefficients[:count], self._inside[:count], _narrow(conv)
        if narrow is not None and grouped_conv.why_not_inside(narrow, conv.padded) is None:
            grouped_conv.convolve_in(h, narrow, conv.base, conv.padded, block, coefficients, inside)
        else:
            decode(conv.projection, h, coefficients)
            grouped_conv.convolve(h, coefficients, conv.base, conv.padded, block, inside)
        return inside

    def _added(
        self, conv: GroupedConv, delta: torch.Tensor, x: torch.Tensor, factor: torch.Tensor, out: torch.Tensor
    ) -> None:
        c, coefficients = self.model.config, self._coefficients[: delta.shape[0]]
        grouped_conv.convolve_out(
            delta, coefficients, conv.base, conv.padded, c.block_size, x, factor, c.eps, out
        )  # fmt: skip


def _narrow(conv: GroupedConv) -> DenseProduct | None:
    return conv.projection.narrow if isinstance(conv.projection, DenseLinear) else None
