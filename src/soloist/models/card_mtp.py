"""The MTP module on a card: settled rows as one pass, a draft of all its levels as one graph.

Everything lives in buffers made once. `settle` runs rows of settled tokens, which enter the pages; `draft` grows a
chain (beam 1) or a narrow tree (beam 2) of `depth` levels per request: head, best candidates, choice of the next rows,
the rows, and so on, without asking the host. What comes back in one copy is every level's candidates and what was
chosen to run next (`Levels`); which tokens are proposed is the host's to say.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from soloist.models.captured import Graphs, Key, Mode, PageLines, PinnedTables
from soloist.models.mtp import MTPModule
from soloist.models.state import KV
from soloist.ops.card_products import W4Linear, decode
from soloist.ops.top import width
from soloist.ops.triton import draft, rows
from soloist.ops.triton.attention import Partials
from soloist.ops.triton.embed import Table, embed_pair
from soloist.ops.triton.top import RowTop

CANDIDATES = 64
SETTLED = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 24, 32, 48, 64)  # rows of a settling pass that get a graph
BEAMS = (1, 2)


@dataclass(frozen=True)
class Settled:
    """Rows of one slot to settle: tokens at consecutive positions from `first` on; `turn`: rotary minus position."""

    slot: int
    tokens: Sequence[int]
    first: int
    turn: int
    pages: Sequence[int]


@dataclass(frozen=True)
class Wanted:
    """A request that wants a draft after `position`.

    noise  the key of its draws before the position is absorbed, None where the best candidates are followed
    turn   rotary position minus position
    """

    slot: int
    position: int
    pages: Sequence[int]
    turn: int = 0
    noise: tuple[int, int] | None = None
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0


@dataclass(frozen=True)
class Levels:
    """What a draft left, per level: ids int64 and values fp32 [R, paths, n] of every path's candidates (id -1: none),
    and chosen int32 [R, beam, 2]: token and path of the rows that run at the next level."""

    ids: list[np.ndarray]
    values: list[np.ndarray]
    chosen: list[np.ndarray]


class CardMTP:
    """`module` over the pages of `kv` for `slots` slots, up to `depth` levels; `partials` may be the target's."""

    def __init__(
        self, module: MTPModule, kv: KV, depth: int, slots: int, pages: int, partials: Partials, mode: Mode = "on"
    ) -> None:
        self.module, self.depth, self.slots = module, depth, slots
        c, device = module.config, module.device
        self._planes = kv.planes["k.data"][0], kv.planes["v.data"][0]
        self._partials = partials.acc, partials.top, partials.total
        self.requests = tuple(sorted({min(n, slots) for n in (1, 2, 4, 8, 16, 32, 64)}))
        t, r, most = SETTLED[-1], slots, slots * max(BEAMS)
        self._settled = PinnedTables(
            {
                **dict.fromkeys(("tokens", "rotary", "sees", "request", "parts"), (t,)),
                **dict.fromkeys(("starts", "counts", "slots", "last"), (r,)),
                "page_table": (r, pages),
            },
            device,
        )
        self._draft = PinnedTables(
            {
                **dict.fromkeys(("starts", "counts", "slots"), (r,)),
                **dict.fromkeys(("sees", "parts"), (most,)),
                "settings": (r, 8),
                "numbers": (r, 4),
                "page_table": (r, pages),
            },
            device,
        )
        self._settled_pages, self._draft_pages = (
            PageLines(tables.host["page_table"]) for tables in (self._settled, self._draft)
        )
        rows_most = max(t, most)

        def half(*shape: int) -> torch.Tensor:
            return torch.zeros(shape, dtype=module.dtype, device=device)

        self.hidden = half(t, c.hidden_size)  # filled by the caller before `settle`
        self.outputs = half(
            slots + 1, c.hidden_size
        )  # module output of every slot's newest row; the last is for padding
        self._pair = half(rows_most, 2, c.hidden_size)
        self._x, self._h, self._delta, self._z = (half(rows_most, c.hidden_size) for _ in range(4))
        self._qkv = half(rows_most, 2 * (c.num_heads + c.num_kv_heads) * c.head_dim)
        self._q = half(rows_most, c.num_heads, c.head_dim)
        self._k, self._v = (half(rows_most, c.num_kv_heads, c.head_dim) for _ in range(2))
        self._own = tuple(half(draft.OWN * slots * c.num_kv_heads * c.head_dim) for _ in range(2))
        self._mixed = half(rows_most, c.num_heads * c.head_dim)
        self._gate_up, self._inner = half(rows_most, 2 * c.intermediate_size), half(rows_most, c.intermediate_size)
        # The candidates are found among 16-bit values; off a card activations may have 32.
        kind = module.dtype if module.dtype.itemsize == 2 else torch.float16
        self._logits = torch.zeros(most, module.head.out_features, dtype=kind, device=device)
        self._count = CANDIDATES
        self._top = RowTop(most, module.head.out_features, self._count, device, stats=False)
        entry = width(self._count) + 2
        self._results = torch.zeros(depth * most * entry, dtype=torch.int32, device=device)
        self._arrived = torch.zeros(self._results.shape, dtype=torch.int32, pin_memory=device.type == "cuda")
        self._done = torch.cuda.Event() if device.type == "cuda" else None
        none = {"mask": torch.zeros(most, dtype=torch.int32, device=device), "alive": torch.ones(most, device=device)}
        self._paths: list[dict[str, torch.Tensor]] = [none]
        for _ in range(2):  # rows of a level, and those of the level before it
            level = {n: torch.zeros(most, dtype=torch.int32, device=device) for n in ("tokens", "sources", "rotary")}
            level |= {"mask": torch.zeros_like(none["mask"]), "alive": torch.zeros(most, device=device)}
            self._paths.append(level)
        self._map = None if module.ids is None else module.ids.cpu().numpy()
        self._embedding = Table.of(module.embedding)
        self.graphs = Graphs(device, mode, self._named, self._work, self._results_of)

    # -- graphs ----------------------------------------------------------------------------------------------------

    def capture(self) -> None:
        """Compile and capture every bucket; a debug mode runs eagerly instead."""
        self.graphs.capture(
            [*((n,) for n in reversed(SETTLED)), *((n, beam) for n in reversed(self.requests) for beam in BEAMS)]
        )

    def _named(self, key: Key) -> str:
        return f"pass over {key[0]} settled rows" if len(key) == 1 else f"draft of {key[0]} requests by {key[1]}"

    def _work(self, key: Key) -> None:
        if len(key) == 1:
            self._settling(key[0])
        else:
            self._drafting(*key)

    def _results_of(self, key: Key) -> Mapping[str, torch.Tensor]:
        if len(key) == 2:
            return {"candidates and rows": self._results}
        n = key[0]
        return {"keys": self._k[:n], "values": self._v[:n], "outputs": self.outputs}

    # -- the host's side -------------------------------------------------------------------------------------------

    def fits(self, spans: Sequence[tuple[int, int]]) -> bool:
        """Whether rows of several slots, (first position, rows) each, are one pass: there are buffers for so many, and
        room for the splits of their attention (many rows of a long text need more than a step does)."""
        entries = sum(n * ((first + n - 1) // draft.SPLIT + 1) for first, n in spans)
        # One entry is read by rows of padding.
        return sum(n for _, n in spans) <= SETTLED[-1] and entries < self._partials[0].shape[0]

    @torch.inference_mode()
    def settle(self, parts: Sequence[Settled]) -> None:
        """Compute these rows, which `fits` takes, into the pages; `hidden` holds their hidden states in order."""
        host = self._settled.open()
        count = sum(len(p.tokens) for p in parts)
        bucket = SETTLED[bisect.bisect_left(SETTLED, count)]
        host["request"][:] = -1
        host["counts"][:] = 0
        host["slots"][:] = self.slots
        host["last"][:] = 0
        for name in ("tokens", "rotary", "sees"):
            host[name][count:bucket] = 0
        at = entry = 0
        for r, p in enumerate(parts):
            n = len(p.tokens)
            mine = slice(at, at + n)
            host["tokens"][mine] = p.tokens
            host["sees"][mine] = np.arange(p.first, p.first + n)
            host["rotary"][mine] = host["sees"][mine] + p.turn
            host["request"][mine] = r
            splits = (p.first + n - 1) // draft.SPLIT + 1
            host["parts"][mine] = np.arange(entry, entry + n * splits, splits)
            entry += n * splits
            host["starts"][r], host["counts"][r], host["slots"][r], host["last"][r] = at, n, p.slot, at + n - 1
            self._settled_pages.write(r, p.pages)
            at += n
        host["parts"][count:bucket] = entry
        self._settled.send()
        self.graphs.run((bucket,))

    @torch.inference_mode()
    def draft(self, wanted: Sequence[Wanted], beam: int) -> Levels:
        """Grow and wait. Every slot's newest row has been settled."""
        host = self._draft.open()
        requests = self.requests[bisect.bisect_left(self.requests, len(wanted))]
        host["slots"][:] = self.slots
        host["counts"][:] = 0
        host["starts"][:requests] = np.arange(0, requests * beam, beam)
        host["settings"][:] = 0
        numbers = host["numbers"].view(np.float32)
        numbers[:] = (1.0, 1.0, -np.inf, 0.0)
        entry = 0
        host["sees"][:] = 0
        host["parts"][:] = 0
        for r, w in enumerate(wanted):
            mine = slice(r * beam, r * beam + beam)
            splits = w.position // draft.SPLIT + 1
            host["sees"][mine] = w.position
            host["parts"][mine] = np.arange(entry, entry + beam * splits, splits)
            entry += beam * splits
            host["slots"][r], host["counts"][r] = w.slot, beam
            self._draft_pages.write(r, w.pages)
            row = host["settings"][r]
            row[3:6] = w.position + 1, w.top_k, w.position + 1 + w.turn
            if w.noise is not None:
                row[0] = 1
                row.view(np.uint32)[1:3] = w.noise
            floor = np.log(w.min_p) if w.min_p > 0 else -np.inf
            numbers[r, :3] = 1.0 / w.temperature, w.top_p, floor
        self._draft.send()
        self.graphs.run((requests, beam))
        if self._done is not None:
            self._done.record()
            self._done.synchronize()
        return self._read(len(wanted), requests, beam)

    def _read(self, wanted: int, requests: int, beam: int) -> Levels:
        flat, n = self._arrived.numpy(), self._count
        entry = width(n)
        levels = Levels([], [], [])
        at = 0
        for level in range(self.depth):
            paths = 1 if level == 0 else beam
            packed = flat[at : at + requests * paths * entry].reshape(requests, paths, entry)[:wanted]
            at += requests * paths * entry
            places = packed[..., :n]
            ids = places.astype(np.int64) if self._map is None else np.where(places >= 0, self._map[places], -1)
            levels.ids.append(ids)
            levels.values.append(packed[..., n : 2 * n].copy().view(np.float32))
            if level + 1 < self.depth:
                levels.chosen.append(flat[at : at + requests * beam * 2].reshape(requests, beam, 2)[:wanted].copy())
                at += requests * beam * 2
        return levels

    # -- the card's side -------------------------------------------------------------------------------------------

    def _settling(self, count: int) -> None:
        table = self._settled.card
        per_row = ("tokens", "rotary", "sees", "request", "parts")
        mine = {name: t[:count] if name in per_row else t for name, t in table.items()}
        k, v = self._k[:count], self._v[:count]

        def attend(q: torch.Tensor, qkv: torch.Tensor, mixed: torch.Tensor) -> None:
            draft.store(k, v, self._planes, mine)
            scale = self.module.attention.scale
            draft.attend(q, self._planes, None, 0, mine, self._partials, qkv, mixed, scale)

        z = self._rows(mine["tokens"], self.hidden, None, mine["rotary"], k, v, attend)
        draft.move_rows(z, table["last"], self.outputs, table["slots"])

    def _drafting(self, requests: int, beam: int) -> None:
        table, n = self._draft.card, self._count
        entry = width(n)
        count = requests * beam
        levels = draft.OWN // beam
        shape = (levels, count, *self._k.shape[1:])
        size = int(np.prod(shape))
        own_k, own_v = (x[:size].view(shape) for x in self._own)
        at = 0

        def results(*shape: int) -> torch.Tensor:
            nonlocal at
            size = int(np.prod(shape))
            at += size
            return self._results[at - size : at].view(shape)

        per_request = ("starts", "counts", "page_table", "settings", "numbers")
        mine = {name: table[name][:requests] for name in per_request}
        mine |= {name: table[name][:count] for name in ("sees", "parts")}
        before = self._paths[0]
        z = self.outputs.index_select(0, table["slots"][:requests])
        for level in range(self.depth):
            logits = self._logits[: z.shape[0]]
            decode(self.module.head, z, logits)
            packed = results(z.shape[0], entry)
            self._top(logits, packed)
            if level + 1 == self.depth:
                break
            after = self._paths[1 + level % 2]
            numbers = mine["numbers"].view(torch.float32)
            draft.choose(
                packed, self.module.ids, mine["settings"], numbers, before, after, level,
                results(count, 2), beam, n,
            )  # fmt: skip
            mine["mask"] = after["mask"][:count]

            def attend(q: torch.Tensor, qkv: torch.Tensor, mixed: torch.Tensor) -> None:
                scale = self.module.attention.scale
                draft.attend(q, self._planes, (own_k, own_v), beam, mine, self._partials, qkv, mixed, scale)

            now = {name: after[name][:count] for name in ("tokens", "sources", "rotary")}
            z = self._rows(now["tokens"], z, now["sources"], now["rotary"], own_k[level], own_v[level], attend)
            before = after
        self._arrived[:at].copy_(self._results[:at], non_blocking=True)

    def _rows(
        self,
        tokens: torch.Tensor,
        hidden: torch.Tensor,
        sources: torch.Tensor | None,
        rotary: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        attend: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None],
    ) -> torch.Tensor:
        """One pass of the module over rows, of which row t follows hidden[sources[t]] (hidden[t] without sources); k
        and v are left where they are told. Returns z [T, H], good until the next pass. The steps are those of
        `MTPModule.forward`."""
        m, c, n = self.module, self.module.config, tokens.shape[0]
        x, h, delta, z = self._x[:n], self._h[:n], self._delta[:n], self._z[:n]
        pair, qkv, q, mixed, inner = self._pair[:n], self._qkv[:n], self._q[:n], self._mixed[:n], self._inner[:n]
        embed_pair(self._embedding, tokens, hidden, sources, m.pre, c.eps, pair)
        decode(m.fc, pair.flatten(1), x)
        rows.add_norm(x, None, m.norms.mixer_factor, c.eps, h)
        decode(m.attention.qkv, h, qkv)
        rows.qk_prepare(qkv, m.attention.factors, rotary, m.inverse, c.eps, q, k, v)
        attend(q, qkv, mixed)
        decode(m.attention.out, mixed, delta)
        rows.add_norm(x, delta, m.norms.mlp_factor, c.eps, h)
        if isinstance(m.mlp.gate_up, W4Linear) and m.mlp.gate_up.gates:
            m.mlp.gate_up.gated(h, inner, None)
        else:
            decode(m.mlp.gate_up, h, self._gate_up[:n])
            rows.silu_mul(self._gate_up[:n], inner)
        decode(m.mlp.down, inner, delta)
        rows.add_norm(x, delta, m.norm, c.eps, z)
        return z
