"""The target on a card: the verify step as one fixed sequence of kernels over static buffers.

Nothing in the sequence depends on a host value except the number of rows: tables of the step are uploaded in one
copy, results are left in buffers. That makes it capturable (engine/graphs.py); run eagerly it is the same
sequence. Prompt slices take the reference's road (`Qwen35.forward`) with the card's products.

The state is settled by `fold` in two launches over all layers after acceptance, rather than inside the next verify
kernels: it costs one more read of the state per step (0.5 % of the bytes of a 4-bit 27B) and keeps every kernel free of
pending work, so that a snapshot, a parked request and a profile always see settled state.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from soloist.checkpoint.config import ModelConfig
from soloist.models import tiled
from soloist.models.card_stream import Stream, why_not_folded
from soloist.models.layers import Attention, DeltaNet, Loader
from soloist.models.qwen3_5 import Progress, Qwen35
from soloist.models.state import KV, AcceptedPath, Caches, Features, State
from soloist.models.step import GRID, PrefillStep, VerifyStep
from soloist.ops import delta_cuda
from soloist.ops.card_products import CardLinear, DenseLinear, W4Linear
from soloist.ops.delta_cuda import Recurrence
from soloist.ops.linear_cuda import Squares, parts_of
from soloist.ops.triton import attention, delta, gates, kvarn, kvarn_attention, prefill, rows
from soloist.ops.triton.embed import Table, embed

log = logging.getLogger("soloist.models")

MAX_DEPTH = 32  # rows along a path, unless VERIFY_ROWS asks for more


@dataclass(frozen=True)
class CardShapes:
    """Largest step: `rows` rows of `requests` requests with `pages` pages each; `branches` states kept along trees,
    `splits` partial results of attention, one for every row of padding included; `depth` rows along a path."""

    rows: int
    requests: int
    pages: int
    branches: int
    splits: int
    depth: int = MAX_DEPTH


class Tables:
    """The step's int32 tables in one pinned buffer and its copy on the card; views by name on both sides."""

    def __init__(self, shapes: CardShapes, conv_kernel: int, device: torch.device) -> None:
        t, r = shapes.rows, shapes.requests
        layout = {
            "tokens": (t,),
            "positions": (t,),
            "rotary": (t,),
            "request": (t,),
            "parent": (t,),
            "keep": (t,),
            "parts": (t,),
            "taps": (t, conv_kernel),
            "lanes": (t, shapes.depth),
            "slots": (r,),
            "starts": (r,),
            "counts": (r,),
            "settled": (r,),
            "page_table": (r, shapes.pages),
        }
        sizes = {name: torch.Size(shape).numel() for name, shape in layout.items()}
        pin = device.type == "cuda"
        self._host = torch.zeros(sum(sizes.values()), dtype=torch.int32, pin_memory=pin)
        self._card = torch.zeros_like(self._host, device=device)
        self._sent = torch.cuda.Event() if pin else None
        self.host: dict[str, torch.Tensor] = {}
        self.card: dict[str, torch.Tensor] = {}
        at = 0
        for name, shape in layout.items():
            self.host[name] = self._host[at : at + sizes[name]].view(shape)
            self.card[name] = self._card[at : at + sizes[name]].view(shape)
            at += sizes[name]
        self._views = {name: table.numpy() for name, table in self.host.items()}
        self._known: list[list[int]] = [[] for _ in range(r)]

    def fill(self, step: VerifyStep, bucket: int) -> None:
        """Write one step, padded to `bucket` rows, and upload it. Padding rows belong to no request: they attend to
        themselves and are walked by nobody."""
        if self._sent is not None:
            self._sent.synchronize()  # whoever runs steps without reading their results may be ahead of the card
        h = self._views
        count, requests, columns = step.rows, len(step.attention), step.taps.shape[1] - 1
        h["tokens"][:count] = step.tokens
        h["positions"][:count] = step.positions
        h["rotary"][:count] = step.positions if step.rotary is None else step.rotary
        h["request"][:count] = step.request
        for name, value in (("tokens", 0), ("positions", 0), ("rotary", 0), ("request", len(h["slots"]) - 1)):
            h[name][count:bucket] = value
        taps = step.taps.numpy()
        own = taps - requests * columns
        h["taps"][:count] = np.where(own >= 0, own, -1 - taps % columns)
        h["taps"][count:bucket] = -1
        h["taps"][count:bucket, -1] = h["lanes"][count:bucket, 0] = np.arange(count, bucket)
        for name in ("slots", "counts", "settled"):
            h[name][:] = 0
        parts = 0
        positions = step.positions.numpy()
        for r, part in enumerate(step.attention):
            mine, rows = slice(part.start, part.stop), part.stop - part.start
            h["slots"][r] = step.slots[r]
            h["starts"][r], h["counts"][r], h["settled"][r] = part.start, rows, part.settled
            self._pages(r, step.pages[r])
            if part.lanes is None:
                h["lanes"][mine, :rows] = np.arange(part.start, part.stop)
            else:
                h["lanes"][mine, : part.lanes.shape[1]] = part.lanes.numpy() + part.start
            deepest = int(positions[mine].max()) // attention.SPLIT + 1
            h["parts"][mine] = np.arange(parts, parts + rows * deepest, deepest)
            parts += rows * deepest
        h["parts"][count:bucket] = np.arange(parts, parts + bucket - count)
        self._branches(step.parent.tolist(), bucket)
        self._card.copy_(self._host, non_blocking=True)
        if self._sent is not None:
            self._sent.record()

    def _pages(self, request: int, pages: Sequence[int]) -> None:
        """A request's page ids. A list of thousands mostly is what stood there one step ago, and a few more."""
        known = self._known[request]
        if pages[: len(known)] != known:
            known.clear()
        fresh = pages[len(known) :]
        if fresh:
            self._views["page_table"][request, len(known) : len(pages)] = fresh
            known += fresh

    def _branches(self, parents: list[int], bucket: int) -> None:
        """keep[row] = 1 + scratch entry for rows that a later, not adjacent row continues from; 0 for the others."""
        keep = [0] * bucket
        entries = 0
        for row, above in enumerate(parents):
            if above >= 0 and above != row - 1 and keep[above] == 0:
                entries += 1
                keep[above] = entries
        self._views["keep"][:bucket] = keep
        self._views["parent"][:bucket] = parents + [-1] * (bucket - len(parents))


class CardRecord:
    """What a verify step left in the model's buffers, until the next one; see `Record` of the reference."""

    def __init__(self, model: CardModel) -> None:
        self._model = model

    def settle(self, step: VerifyStep, caches: Caches, paths: Sequence[AcceptedPath]) -> None:
        self._model.settle(paths)


@dataclass
class _Buffers:
    """Static buffers for the largest step. Names as in `VerifyStep`'s walk through the layers."""

    x: torch.Tensor
    h: torch.Tensor
    delta: torch.Tensor
    gate_up: torch.Tensor
    inner: torch.Tensor
    squares: torch.Tensor
    qkv: torch.Tensor
    q: torch.Tensor
    mixed: torch.Tensor
    walked: torch.Tensor
    scratch: torch.Tensor
    logits: torch.Tensor
    taps: torch.Tensor
    # the record, one entry per layer; keys and values are in `CardModel._rows`
    u: torch.Tensor
    ba: torch.Tensor
    dq: torch.Tensor
    dk: torch.Tensor
    dv: torch.Tensor
    decay: torch.Tensor
    beta: torch.Tensor


class CardModel(Qwen35):
    """A Qwen35 whose verify step runs the kernels of `ops/triton`. `prepare` must be called once with the caches."""

    def __init__(self, load: Loader, config: ModelConfig, progress: Progress | None = None) -> None:
        super().__init__(load, config, progress)
        self._tap_layers: tuple[int, ...] = ()

    def prepare(self, shapes: CardShapes, kv: KV, state: State, taps: Sequence[int]) -> None:
        """Allocate everything a verify step touches; nothing is allocated later."""
        self.shapes, self._kv, self._state, self._tap_layers = shapes, kv, state, tuple(taps)
        self.tables = Tables(shapes, self.config.conv_kernel, self.device)
        self._path = Paths(shapes, self.device)
        self._table = Table.of(self.embedding)
        self._buffers = self._allocate()
        self._rows = kv.row_planes(shapes.rows)
        self._partials = attention.Partials.allocate(
            shapes.splits, self.config.num_heads, self.config.head_dim, self.device
        )
        self._recurrence = self._choose_recurrence()
        self._log_form()

    def _allocate(self) -> _Buffers:
        c, t = self.config, self.shapes.rows
        deltas = len(c.linear_layers)
        hk, hv, dk, dv = c.linear_key_heads, c.linear_value_heads, c.linear_key_dim, c.linear_value_dim
        qkvz = c.conv_channels + hv * dv
        gates = next((m.ba.out_features for _, m, _ in self.layers if isinstance(m, DeltaNet) and m.ba), 2)

        def half(*shape: int) -> torch.Tensor:
            return torch.zeros(shape, dtype=self.dtype, device=self.device)

        def full(*shape: int) -> torch.Tensor:
            return torch.zeros(shape, dtype=torch.float32, device=self.device)

        return _Buffers(
            x=half(t, c.hidden_size),
            h=half(t, c.hidden_size),
            delta=half(t, c.hidden_size),
            gate_up=half(t, 2 * c.intermediate_size),
            inner=half(t, c.intermediate_size),
            squares=full(t, parts_of(c.hidden_size)),
            qkv=half(t, 2 * (c.num_heads + c.num_kv_heads) * c.head_dim),
            q=half(t, c.num_heads, c.head_dim),
            mixed=half(t * max(c.num_heads * c.head_dim, hv * dv)),
            walked=full(t, hv, dv),
            scratch=full(self.shapes.branches + 1, hv, dk, dv),
            logits=half(t, c.vocab_size),
            taps=half(t, max(1, len(self._tap_layers)) * c.hidden_size),
            u=half(deltas, t, qkvz),
            ba=half(t, gates),
            dq=full(t, hk, dk),
            dk=full(deltas, t, hk, dk),
            dv=full(deltas, t, hv, dv),
            decay=full(deltas, t, hv),
            beta=full(deltas, t, hv),
        )

    def rows_each(self, settled: Sequence[int]) -> int:
        """See `Qwen35`. Requests that share pages of a prompt may have more splits between them than the pool has."""
        s = self.shapes
        splits = sum((n + s.depth - 1) // attention.SPLIT + 1 for n in settled)
        return min(s.rows // len(settled), (s.splits - s.rows) // splits)

    @torch.inference_mode()
    def forward(self, step: VerifyStep | PrefillStep, caches: Caches, taps: Sequence[int] = ()) -> Features:
        if isinstance(step, PrefillStep):
            return super().forward(step.to(self.device), caches, taps)
        bucket = self.bucket(step.rows)
        self.tables.fill(step, bucket)
        self.launch(bucket)
        b, count = self._buffers, step.rows
        tapped = b.taps[:count] if self._tap_layers else None
        return Features(b.h[:count], tapped, CardRecord(self), b.logits[:count])

    def _attend_prompt(
        self, layer: int, q: torch.Tensor, step: PrefillStep, caches: Caches, scale: float
    ) -> torch.Tensor:
        return prefill.prefill_attention(q, *caches.kv.stored(layer), step.start, GRID, scale, step.page_rows)

    def bucket(self, count: int) -> int:
        """Rows the sequence is run with for a step of `count` rows; eagerly there is no need to round up."""
        return count

    def launch(self, bucket: int) -> None:
        """Run the sequence for `bucket` rows on the current stream (a captured graph overrides this)."""
        self.sequence(bucket)

    def sequence(self, count: int) -> None:
        """Launch every kernel of a verify step of `count` rows. Results: h (after the final norm), logits, taps."""
        b, table = self._buffers, self._row_tables(count)
        c = self.config
        x, h = b.x[:count], b.h[:count]
        embed(self._table, table["tokens"], x)
        stream = Stream(x, h, b.delta[:count], b.squares, c.eps)
        stream.start(self.layers[0][0].mixer_factor)
        at_attention = at_delta = 0
        for i, (norms, mixer, mlp) in enumerate(self.layers):
            if isinstance(mixer, Attention):
                mixed = self._attention_rows(mixer, at_attention, stream, table, count)
                at_attention += 1
            else:
                mixed = self._delta_rows(mixer, at_delta, stream, table, count)
                at_delta += 1
            stream.add(mixer.out, mixed, norms.mlp_factor, (mlp.gate_up,))
            inner = b.inner[:count]
            if isinstance(mlp.gate_up, W4Linear) and mlp.gate_up.gates:
                mlp.gate_up.gated(h, inner, stream.squares)
            else:
                _decode(mlp.gate_up, h, b.gate_up[:count], stream.squares)
                rows.silu_mul(b.gate_up[:count], inner)
            if i + 1 < len(self.layers):
                following = self.layers[i + 1][:2]
                stream.add(mlp.down, inner, following[0].mixer_factor, _inputs(following[1]))
            else:
                stream.add(mlp.down, inner, self.norm, ())
            if i in self._tap_layers:
                place = self._tap_layers.index(i) * c.hidden_size
                b.taps[:count, place : place + c.hidden_size].copy_(x)
        _decode(self.head, h, b.logits[:count])

    def _choose_recurrence(self) -> Recurrence | None:
        """The CUDA C++ walk and fold, or None: the Triton ones."""
        c = self.config
        heads = c.linear_key_heads, c.linear_value_heads
        reason = delta_cuda.why_not(self.device, self.dtype, c.linear_key_dim, c.linear_value_dim, heads)
        if reason is not None:
            log.info("recurrence: Triton kernels (%s)", reason)
            return None
        dk, dv = c.linear_key_dim, c.linear_value_dim
        return Recurrence(*heads, dk, dv, c.gate_activation, self.device, self.shapes.requests)

    def _log_form(self) -> None:
        """Say once which norms and activations a step computes inside its products, and why the others are kernels."""
        reasons: Counter[str] = Counter()
        for i, (_, mixer, mlp) in enumerate(self.layers):
            behind = _inputs(self.layers[i + 1][1]) if i + 1 < len(self.layers) else ()
            for product, followers in ((mixer.out, (mlp.gate_up,)), (mlp.down, behind)):
                reasons[why_not_folded(product, followers) or ""] += 1
        gated = sum(isinstance(m.gate_up, W4Linear) and m.gate_up.gates for _, _, m in self.layers)
        folded = reasons.pop("", 0)
        why = "; ".join(f"{count} norms are kernels: {reason}" for reason, count in reasons.items())
        log.info("%d norms and %d of %d activations inside products; %s", folded, gated, len(self.layers), why)

    def results(self, count: int) -> dict[str, torch.Tensor]:
        """Copies of what a step of `count` rows left behind, by name."""
        b = self._buffers
        return {name: getattr(b, name)[:count].clone() for name in ("h", "logits", "taps")}

    def _row_tables(self, count: int) -> dict[str, torch.Tensor]:
        per_row = ("tokens", "positions", "rotary", "request", "parent", "keep", "parts", "taps", "lanes")
        return {name: t[:count] if name in per_row else t for name, t in self.tables.card.items()}

    def _attention_rows(
        self,
        mixer: Attention,
        layer: int,
        stream: Stream,
        table: dict[str, torch.Tensor],
        count: int,
    ) -> torch.Tensor:
        b, c = self._buffers, self.config
        qkv, q = b.qkv[:count], b.q[:count]
        k, v = self._kv.stored(layer, self._rows)
        _decode(mixer.qkv, stream.h, qkv, stream.squares)
        rows.qk_prepare(qkv, mixer.factors, table["rotary"], self.inverse, c.eps, q, k, v)
        mixed = b.mixed[: count * c.num_heads * c.head_dim].view(count, -1)
        if tiled.is_tiled(self._kv):
            tiles = self._kv.tiles(layer)
            kvarn_attention.verify_attention(q, k, v, tiles, table, self._partials, qkv, mixed, mixer.scale)
        else:
            attention.verify_attention(q, k, v, *self._kv.stored(layer), table, self._partials, qkv, mixed, mixer.scale)
        return mixed

    def _delta_rows(
        self,
        mixer: DeltaNet,
        layer: int,
        stream: Stream,
        table: dict[str, torch.Tensor],
        count: int,
    ) -> torch.Tensor:
        b = self._buffers
        u = b.u[layer, :count]
        _decode(mixer.qkvz, stream.h, u, stream.squares)
        inputs = b.dk[layer, :count], b.dv[layer, :count], b.decay[layer, :count], b.beta[layer, :count]
        record = (b.dq[:count], *inputs)
        conv = (
            u, self._state.conv[layer], table["taps"], table["request"], table["slots"],
            mixer.conv, mixer.negative_a, mixer.dt_bias, record,
        )  # fmt: skip
        narrow = mixer.ba.narrow if isinstance(mixer.ba, DenseLinear) else None
        if narrow is not None and count <= narrow.max_rows:
            gates.prepare_gates(stream.h, stream.squares, narrow, *conv)
        else:
            ba = b.ba[:count]
            _decode(mixer.ba, stream.h, ba, stream.squares)
            delta.prepare(u, ba, *conv[1:])
        walked, states = b.walked[:count], self._state.states[layer]
        z = u[:, mixer.channels : mixer.channels + mixer.heads * mixer.dv]
        mixed = b.mixed[: count * mixer.heads * mixer.dv].view(count, -1)
        if self._recurrence is not None:
            self._recurrence.walk(states, record, walked, b.scratch, table, z, mixer.norm, mixer.eps, mixed)
            return mixed
        delta.walk(
            states, record, walked, b.scratch, table["slots"], table["starts"], table["counts"], table["parent"],
            table["keep"],
        )  # fmt: skip
        delta.gated_norm(walked, z, mixer.norm, mixer.eps, mixer.act, mixed)
        return mixed

    @torch.inference_mode()
    def settle(self, paths: Sequence[AcceptedPath]) -> None:
        """Move the accepted rows of the last step into the caches, all layers at once."""
        if not any(p.rows for p in paths):
            return
        self._path.write(paths)
        self.settle_rows()
        self._path.sent()

    def settle_rows(self) -> None:
        """Upload the paths written last and move their rows into the caches."""
        b, table = self._buffers, self.tables.card
        path, lengths = self._path.upload()
        kept, settled, pages = self._kv.stored(None, self._rows), table["settled"], table["page_table"]
        if tiled.is_tiled(self._kv):
            k, v = (part.data for part in kept)
            kvarn.settle(k, v, self._kv.tiles(None), path, lengths, settled, table["slots"], pages)
        else:
            attention.settle_kv(kept, self._kv.stored(None), path, lengths, settled, pages)
        record = (b.dq, b.dk, b.dv, b.decay, b.beta)
        states, conv, slots = self._state.all_states, self._state.all_conv, table["slots"]
        if self._recurrence is not None:
            self._recurrence.fold(states, record, path, lengths, slots)
            delta.settle_conv(conv, b.u, table["taps"], path, lengths, slots)
        else:
            delta.fold(states, conv, record, b.u, table["taps"], path, lengths, slots)


class Paths:
    """Accepted rows per request, uploaded in one copy."""

    def __init__(self, shapes: CardShapes, device: torch.device) -> None:
        self._requests, self._depth = shapes.requests, shapes.depth
        size = shapes.requests * (shapes.depth + 1)
        self._host = torch.zeros(size, dtype=torch.int32, pin_memory=device.type == "cuda")
        self._card = torch.zeros_like(self._host, device=device)
        self._sent = torch.cuda.Event() if device.type == "cuda" else None

    def write(self, paths: Sequence[AcceptedPath]) -> None:
        """Host side of `fill`, once the card has read what was written last; requests not listed have length 0."""
        if self._sent is not None:
            self._sent.synchronize()
        rows, lengths = self._views(self._host)
        lengths.zero_()
        for p in paths:
            rows[p.request, : len(p.rows)] = torch.tensor(p.rows, dtype=torch.int32)
            lengths[p.request] = len(p.rows)

    def sent(self) -> None:
        """Behind an upload, which may have been a graph's."""
        if self._sent is not None:
            self._sent.record()

    def upload(self) -> tuple[torch.Tensor, torch.Tensor]:
        """(path [R, depth], lengths [R]) on the card."""
        self._card.copy_(self._host, non_blocking=True)
        return self._views(self._card)

    def fill(self, paths: Sequence[AcceptedPath]) -> tuple[torch.Tensor, torch.Tensor]:
        self.write(paths)
        uploaded = self.upload()
        self.sent()
        return uploaded

    def _views(self, flat: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return flat[self._requests :].view(self._requests, self._depth), flat[: self._requests]


def _decode(product: object, x: torch.Tensor, out: torch.Tensor, squares: Squares | None = None) -> None:
    assert isinstance(product, CardLinear)
    product.decode(x, out, squares=squares)


def _inputs(mixer: Attention | DeltaNet) -> tuple[object, ...]:
    """The products that read a mixer's normed input."""
    return (mixer.qkv,) if isinstance(mixer, Attention) else (mixer.qkvz, mixer.ba)
