"""The Qwen3.5-family text model: one forward over flat rows.

A verify step leaves the caches alone and returns a record (see `state.py`); a prefill step writes its keys
and state as it goes, because prompt rows are settled the moment they are computed.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence

import torch

from soloist.checkpoint.config import ModelConfig
from soloist.models import tiled
from soloist.models.layers import MLP, Attention, DecoderNorms, DeltaNet, Loader
from soloist.models.state import Caches, Features, Record
from soloist.models.step import GRID, PrefillStep, VerifyStep
from soloist.ops.attention import prefill_attention, verify_attention
from soloist.ops.gated_delta import chunk_scan, walk
from soloist.ops.norms import rms_norm
from soloist.ops.products import Linear
from soloist.ops.rope import inverse_frequencies, rope_tables

Progress = Callable[[int, int], None]


class Qwen35:
    """The loaded target. `layers[i]` is (norms, Attention | DeltaNet, MLP)."""

    def __init__(self, load: Loader, config: ModelConfig, progress: Progress | None = None) -> None:
        self.config, self.dtype, self.device = config, load.dtype, load.device
        self.product = load.product
        # Kept as stored: a step reads a few rows of it, and in 16 bits the table of a large vocabulary costs gigabytes.
        self.embedding = load.table("embed_tokens")
        self.layers: list[tuple[DecoderNorms, Attention | DeltaNet, MLP]] = []
        for i, kind in enumerate(config.layer_types):
            prefix = f"layers.{i}"
            mixer: Attention | DeltaNet
            if kind == "full_attention":
                mixer = Attention(load, f"{prefix}.self_attn", config)
            else:
                mixer = DeltaNet(load, f"{prefix}.linear_attn", config)
            self.layers.append((DecoderNorms(load, prefix, config.eps), mixer, MLP(load, f"{prefix}.mlp")))
            if progress is not None:
                progress(i + 1, config.num_layers)
        self.norm = load.factor("norm.weight")
        self.head = load.linear(["lm_head"])
        self.inverse = inverse_frequencies(config.rope_dim, config.rope_theta, load.device)

    def products(self) -> Iterator[Linear]:
        """Every loaded product of the target, in layer order."""
        for _, mixer, mlp in self.layers:
            yield from mixer.products()
            yield from (mlp.gate_up, mlp.down)
        yield self.head

    def rows_each(self, settled: Sequence[int]) -> int:
        """Rows that each request of one step may have, by the tokens settled of each; 0: they do not fit together."""
        return sys.maxsize

    @torch.inference_mode()
    def forward(self, step: VerifyStep | PrefillStep, caches: Caches, taps: Sequence[int] = ()) -> Features:
        """Run the rows of a step. Returns hidden [T, H] after the final norm and, for `taps` (0-based layer
        indices), the residual stream after those layers, side by side.

        A verify step reads the caches and returns a record; a prefill step (all T rows, padding included) writes
        KV rows and leaves the state of its last valid row in the slot.
        """
        x = self.embedding.rows(step.tokens, self.dtype)
        if isinstance(step, PrefillStep) and step.seen is not None:
            rows, values = step.seen
            x = x.index_copy(0, rows, values.to(x.dtype))
        turns = step.positions if step.rotary is None else step.rotary
        cos, sin = rope_tables(turns, self.inverse, self.config.mrope_section)
        record = Record() if isinstance(step, VerifyStep) else None
        tapped: dict[int, torch.Tensor] = {}
        attention = delta = 0
        for i, (norms, mixer, mlp) in enumerate(self.layers):
            h = norms.mixer(x)
            if isinstance(mixer, Attention):
                x = self._attention(mixer, attention, h, x, cos, sin, step, caches, record)
                attention += 1
            else:
                x = self._delta(mixer, delta, h, x, step, caches, record)
                delta += 1
            x = mlp(norms.mlp(x), x)
            if i in taps:
                tapped[i] = x
        hidden = rms_norm(x, self.norm, self.config.eps)
        return Features(hidden, torch.cat([tapped[i] for i in taps], -1) if taps else None, record)

    @torch.inference_mode()
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [n, H] after the final norm -> raw logits [n, V] fp32."""
        return self.head(hidden).float()

    def _attention(
        self,
        mixer: Attention,
        layer: int,
        h: torch.Tensor,
        x: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        step: VerifyStep | PrefillStep,
        caches: Caches,
        record: Record | None,
    ) -> torch.Tensor:
        q, gate, k, v = mixer.project(h, cos, sin)
        if isinstance(step, VerifyStep):
            assert record is not None
            record.kv.append((k, v))
            k, v = caches.kv.roundtrip(layer, k, v)
            if tiled.is_tiled(caches.kv):
                return mixer.finish(tiled.verify(caches.kv, layer, q, k, v, step, mixer.scale), gate, x)
            settled = [caches.kv.read_rows(layer, rows) for rows in step.page_rows]
            o = verify_attention(q, k, v, settled, step.attention, mixer.scale)
        elif tiled.is_tiled(caches.kv):
            o = tiled.prefill(caches.kv, layer, q, k, v, step, mixer.scale)
        else:
            caches.kv.write(layer, step.page_rows[step.start :], k, v)
            o = self._attend_prompt(layer, q, step, caches, mixer.scale)
        return mixer.finish(o, gate, x)

    def _attend_prompt(
        self, layer: int, q: torch.Tensor, step: PrefillStep, caches: Caches, scale: float
    ) -> torch.Tensor:
        """Prompt rows q [T, H, D] over all keys up to theirs, which are written already."""
        keys, values = caches.kv.read_rows(layer, step.page_rows)
        return prefill_attention(q, keys, values, step.start, GRID, scale)

    def _delta(
        self,
        mixer: DeltaNet,
        layer: int,
        h: torch.Tensor,
        x: torch.Tensor,
        step: VerifyStep | PrefillStep,
        caches: Caches,
        record: Record | None,
    ) -> torch.Tensor:
        states, conv = caches.state.states[layer], caches.state.conv[layer]
        if isinstance(step, VerifyStep):
            assert record is not None
            history = conv.index_select(0, step.slots).flatten(0, 1)
            inputs, z, rows = mixer.verify_inputs(h, history, step.taps)
            settled = states.index_select(0, step.slots).float()
            o, after = walk(settled, inputs, step.levels, caches.state.state_dtype)
            record.conv_rows.append(rows)
            record.states.append(after)
        else:
            inputs, z, columns = mixer.prefill_inputs(h, conv[step.slot], step.valid)
            o, state = chunk_scan(
                states[step.slot].float(),
                inputs.q,
                inputs.k,
                inputs.v,
                inputs.decay,
                inputs.beta,
                caches.state.state_dtype,
            )
            states[step.slot].copy_(state)
            conv[step.slot].copy_(columns)
        return mixer.finish(o, z, x)
