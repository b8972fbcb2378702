"""Drafting with the MTP module: settled tokens as one pass, then a chain (or a narrow tree) fed with its own output.

The module's KV of settled tokens lives in the request's pages, at the token's own position. Draft rows never touch the
pages: they stand in a scratch context beside the settled keys and are gone when the draft is made, so that nothing of
a rejected chain can survive.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.nn.functional as F

from soloist.cache.kv import KVStore
from soloist.drafting.choice import pick, rank
from soloist.drafting.draft import CandidateGraph, Draft
from soloist.drafting.drafter import Ask, Backlog, SettledTokens
from soloist.drafting.proposal import Law
from soloist.models.mtp import MTPModule
from soloist.models.pictures import Sight, seen_by
from soloist.models.step import token_rows

# Candidates looked at per row. A law over the 64 likeliest tokens is as legal as any other and costs no more to use.
CANDIDATES = 64
WIDTH = 4  # alternatives per state of a tree
EAGER = 64
# A second path is followed only where it may matter: below this path probability its leaf is proposed, not continued.
WORTH_A_ROW = 0.04


@dataclass(frozen=True)
class _Path:
    """A row of the draft whose output is known: its state in the graph, its scratch lanes, its path probability."""

    state: int = 0
    lanes: tuple[int, ...] = ()
    alive: float = 1.0


@dataclass(frozen=True)
class _Step:
    """A row to run next: a candidate token after a path."""

    token: int
    path: int  # index in the request's frontier
    alive: float = 1.0


@dataclass
class _Request:
    """One request while its draft is made: the chain's tokens, or the graph, and the paths being followed."""

    ask: Ask
    frontier: list[_Path] = field(default_factory=lambda: [_Path()])
    tokens: list[int] = field(default_factory=list)
    laws: list[Law | None] = field(default_factory=list)
    probs: list[float] = field(default_factory=list)
    graph: CandidateGraph = field(default_factory=lambda: CandidateGraph([], [], []))


class _Context:
    """Settled keys of every request side by side, and lanes for the draft rows after them."""

    def __init__(self, settled: Sequence[tuple[torch.Tensor, torch.Tensor]], extra: int, dtype: torch.dtype) -> None:
        longest = max(k.shape[0] for k, _ in settled)
        k0 = settled[0][0]
        shape = (len(settled), k0.shape[1], longest + extra, k0.shape[2])
        self.keys, self.values = k0.new_zeros(shape, dtype=dtype), k0.new_zeros(shape, dtype=dtype)
        self.settled = torch.zeros(len(settled), 1, longest + extra, dtype=torch.bool, device=k0.device)
        for i, (k, v) in enumerate(settled):
            self.keys[i, :, : k.shape[0]] = k.transpose(0, 1)
            self.values[i, :, : v.shape[0]] = v.transpose(0, 1)
            self.settled[i, :, : k.shape[0]] = True
        self.free = longest

    def visible(self, paths: Sequence[Sequence[tuple[int, ...]]], width: int) -> torch.Tensor | None:
        """What each of the next rows sees, bool [R, width, lanes]; paths[r][j] = lanes of row j's ancestors.

        Rows beyond len(paths[r]) are padding and see the settled keys. None when every lane is seen (one chain).
        """
        if len(paths) == width == 1:
            return None
        mask = self.settled[:, :, : self.free + width].repeat(1, width, 1)
        for r, rows in enumerate(paths):
            for j, lanes in enumerate(rows):
                mask[r, j, [*lanes, self.free + j]] = True
        return mask

    def attend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, visible: torch.Tensor | None, width: int
    ) -> torch.Tensor:
        """Put rows [R * width] at the next `width` lanes and attend. Returns [R * width, n, D]."""
        heads, dim = q.shape[1:]

        def by_request(x: torch.Tensor) -> torch.Tensor:
            return x.view(-1, width, x.shape[1], dim).transpose(1, 2)

        self.keys[:, :, self.free : self.free + width] = by_request(k)
        self.values[:, :, self.free : self.free + width] = by_request(v)
        self.free += width
        o = F.scaled_dot_product_attention(
            by_request(q),
            self.keys[:, :, : self.free],
            self.values[:, :, : self.free],
            attn_mask=None if visible is None else visible.unsqueeze(1),
            enable_gqa=True,
        )
        return o.transpose(1, 2).reshape(-1, heads, dim)


class MTPDrafter:
    """The drafter over the pages of `kv` (one layer). `depth` tokens per path, `beam` rows per pass in a tree."""

    name = "mtp"
    taps: tuple[int, ...] = ()

    def __init__(self, module: MTPModule, kv: KVStore, depth: int, beam: int = 2) -> None:
        self.module, self.kv, self.depth, self.beam = module, kv, depth, beam
        self._backlog = Backlog(EAGER)
        self._end: dict[int, int] = {}  # tokens absorbed
        self._rows: dict[int, int] = {}  # rows computed: positions below this one
        self._before: dict[int, torch.Tensor] = {}  # [H] target hidden of the newest token taken from the backlog
        self._output: dict[int, torch.Tensor] = {}  # [H] module output of the newest row

    @property
    def stores(self) -> Mapping[str, KVStore]:
        return {"mtp": self.kv}

    @property
    def nbytes(self) -> int:
        return sum(x.nbytes for kept in (self._output, self._before) for x in kept.values())

    # -- what is kept ----------------------------------------------------------------------------------------------

    def absorb(self, batch: Sequence[SettledTokens]) -> None:
        full: list[int] = []
        for part in batch:
            known = self._end.get(part.slot)
            if known != part.start:
                self._compute([part.slot])
                # Going back: the row at `start` stands, for it depends on nothing later. Position 0 has none.
                self._rows[part.slot] = part.start + 1
            if self._backlog.add(part):
                full.append(part.slot)
            self._end[part.slot] = part.end
        if full:
            self._compute(full)

    def _compute(self, slots: Sequence[int], anchors: bool = False) -> dict[int, tuple[torch.Tensor, torch.Tensor]]:
        """Run the backlog of these slots in one pass; returns the keys and values of each slot that had one.

        The row of the newest token is computed with `anchors` only: its page exists when a step is about to run, and
        its draft is wanted then.
        """
        tokens: list[int] = []
        hidden: list[torch.Tensor] = []
        positions: list[int] = []
        sights: list[tuple[Sight | None, int, int]] = []
        spans: dict[int, tuple[int, int]] = {}
        pages: dict[int, Sequence[int]] = {}
        latest: dict[int, torch.Tensor] = {}
        parts = self._backlog.take(slots)
        newest = {part.slot: i for i, part in enumerate(parts)}
        for i, part in enumerate(parts):
            slot, start = part.slot, part.start
            first = self._rows[slot]
            last = part.end if anchors or newest[slot] != i else part.end - 1
            if first <= start <= last:
                hidden.append((latest[slot] if slot in latest else self._before[slot])[None])
            if last > start:
                hidden.append(part.hidden[max(first, start + 1) - start - 1 : last - start])
            if last >= first:
                spans[slot] = spans.get(slot, (len(tokens), 0))[0], len(tokens) + last + 1 - first
                tokens += part.tokens[first - start : last + 1 - start]
                positions += range(first, last + 1)
                sights.append((part.sight, first, last + 1 - first))
                self._rows[slot] = last + 1
            pages[slot] = part.pages
            if part.end > start:
                latest[slot] = part.hidden[-1]
        rows = torch.cat(hidden) if tokens else None
        for slot, last_hidden in latest.items():
            self._remember(slot, last_hidden)
        return {} if rows is None else self._pass(tokens, rows, positions, sights, spans, pages)

    def _remember(self, slot: int, hidden: torch.Tensor) -> None:
        """Keep the hidden state [H] of the newest token taken from the backlog."""
        self._before[slot] = hidden

    def _pass(
        self,
        tokens: list[int],
        hidden: torch.Tensor,
        positions: list[int],
        sights: Sequence[tuple[Sight | None, int, int]],
        spans: dict[int, tuple[int, int]],
        pages: dict[int, Sequence[int]],
    ) -> dict[int, tuple[torch.Tensor, torch.Tensor]]:
        """Rows of several slots, consecutive positions each: written to the pages, attending to all before them."""
        device = self.module.device
        where = torch.tensor(positions, device=device)
        settled: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

        def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            known = {slot: token_rows(pages[slot], positions[b - 1] + 1) for slot, (_, b) in spans.items()}
            self.kv.write(0, torch.cat([known[slot][positions[a] :] for slot, (a, _) in spans.items()]), k, v)
            out = torch.empty_like(q)
            for slot, (a, b) in spans.items():
                # Position 0 has no row.
                keys, values = settled[slot] = self.kv.read_rows(0, known[slot][1:])
                seen = torch.arange(1, keys.shape[0] + 1, device=device) <= where[a:b, None]
                o = F.scaled_dot_product_attention(
                    q[a:b].transpose(0, 1),
                    keys.to(q.dtype).transpose(0, 1),
                    values.to(q.dtype).transpose(0, 1),
                    attn_mask=None if b - a == 1 else seen,
                    enable_gqa=True,
                )
                out[a:b] = o.transpose(0, 1)
            return out

        turns, seen = where, None
        if any(sight is not None for sight, _, _ in sights):
            turns, seen = seen_by(sights)
            turns = turns.to(device)
        z = self.module.forward(torch.tensor(tokens, device=device), hidden, turns, attend, seen)
        for slot, (_, b) in spans.items():
            self._output[slot] = z[b - 1]
        return settled

    def drop(self, slot: int) -> None:
        self._backlog.drop(slot)
        for kept in (self._end, self._rows, self._output, self._before):
            kept.pop(slot, None)

    def export(self, slot: int, cut: int) -> dict[str, torch.Tensor]:
        self._compute([slot])
        if self._end.get(slot, 0) != cut:
            raise ValueError(f"slot {slot} has absorbed {self._end.get(slot, 0)} tokens, not {cut}")
        return {"mtp.hidden": self._before[slot].clone()}

    def load(self, slot: int, cut: int, tensors: dict[str, torch.Tensor]) -> None:
        self.drop(slot)
        self._end[slot] = self._rows[slot] = cut
        self._before[slot] = tensors["mtp.hidden"].to(self.module.device)

    # -- drafting --------------------------------------------------------------------------------------------------

    def propose(self, batch: Sequence[Ask]) -> list[Draft]:
        drafts = [Draft(self.name) for _ in batch]
        asked = [i for i, ask in enumerate(batch) if ask.count > 0]
        if asked:
            for i, request in zip(asked, self._grow([batch[i] for i in asked]), strict=True):
                drafts[i] = self._draft(request)
        return drafts

    def _owe(self, ask: Ask) -> None:
        """See that the row of the anchor is queued or computed. Raises ValueError if the anchor does not follow."""
        known = self._end.get(ask.slot, 0)
        if known != ask.position:
            raise ValueError(f"slot {ask.slot} has absorbed {known} tokens; its anchor is at {ask.position}")
        if self._rows[ask.slot] == ask.position and not self._backlog.has(ask.slot):
            # After a resume nothing is queued, and the anchor's row is still owed.
            none = self._before[ask.slot].new_empty(0, self._before[ask.slot].shape[0])
            self._backlog.add(SettledTokens(ask.slot, ask.position, [ask.anchor], none, None, ask.pages, ask.sight))

    def _settled(self, asks: Sequence[Ask]) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Keys and values of every request's tokens, the anchor's among them; computes what is still queued."""
        for ask in asks:
            self._owe(ask)
        computed = self._compute([ask.slot for ask in asks], anchors=True)
        for ask in asks:
            if ask.slot not in computed:
                computed[ask.slot] = self.kv.read_rows(0, token_rows(ask.pages, ask.position + 1)[1:])
        return [computed[ask.slot] for ask in asks]

    def _grow(self, asks: Sequence[Ask]) -> list[_Request]:
        """All paths of all requests, one pass per depth."""
        settled = self._settled(asks)
        requests = [_Request(ask) for ask in asks]
        z = torch.stack([self._output[ask.slot] for ask in asks])
        depth = min(self.depth, max(ask.count for ask in asks))
        extra = (depth - 1) * max(self.beam if ask.tree else 1 for ask in asks)
        context = _Context(settled, extra, self.module.dtype)
        for level in range(depth):
            steps = self._choose(requests, z, level)
            if not any(steps):
                break
            z = self._advance(requests, steps, z, level, context)
        return requests

    def _choose(self, requests: Sequence[_Request], z: torch.Tensor, level: int) -> list[list[_Step]]:
        """Candidates of every path z [paths, H] at depth `level`: extends chain or graph, returns the rows to run."""
        values, places = self.module.logits(z).topk(min(CANDIDATES, self.module.head.out_features), dim=-1)
        return self._extend(requests, self.module.token_ids(places).cpu().numpy(), values.cpu().numpy(), level)

    def _extend(
        self, requests: Sequence[_Request], ids: np.ndarray, scores: np.ndarray, level: int
    ) -> list[list[_Step]]:
        """The same from candidates at hand: ids int64 and scores fp32 [paths, n]."""
        steps: list[list[_Step]] = []
        at = 0
        for r in requests:
            mine = slice(at, at + len(r.frontier))
            at = mine.stop
            if not r.frontier:
                steps.append([])
                continue
            position = r.ask.position + 1 + level
            last = level + 1 >= min(self.depth, r.ask.count)
            if r.ask.tree:
                chosen = self._branch(r, ids[mine], scores[mine], position, last)
            else:
                place, law, prob = pick(ids[at - 1], scores[at - 1], r.ask, position)
                r.tokens.append(int(ids[at - 1][place]))
                r.laws.append(law)
                r.probs.append(prob)
                chosen = [_Step(r.tokens[-1], 0)]
            steps.append([] if last else chosen)
        return steps

    def _branch(self, r: _Request, ids: np.ndarray, scores: np.ndarray, position: int, last: bool) -> list[_Step]:
        """Enter the alternatives after each path into the graph; returns the `beam` of them most worth a row."""
        found: list[tuple[float, int, int, int]] = []
        first = len(r.graph.tokens)
        order, probs = rank(ids[None], scores[None], r.ask, [position], WIDTH)
        best = np.take_along_axis(ids, order[0], -1)
        for i, (path, tokens, chances) in enumerate(zip(r.frontier, best.tolist(), probs[0].tolist(), strict=True)):
            r.graph.tokens.append(tokens)
            r.graph.probs.append(chances)
            r.graph.nexts.append([-1] * len(tokens))
            found += [(path.alive * p, i, j, t) for j, (p, t) in enumerate(zip(chances, tokens, strict=True))]
        if last:
            return []
        found.sort(key=lambda entry: -entry[0])
        chosen = found[:1] + [entry for entry in found[1 : self.beam] if entry[0] >= WORTH_A_ROW]
        for n, (_, i, j, _) in enumerate(chosen):
            r.graph.nexts[first + i][j] = first + len(r.frontier) + n
        return [_Step(token, i, alive) for alive, i, _, token in chosen]

    def _advance(
        self, requests: Sequence[_Request], steps: list[list[_Step]], z: torch.Tensor, level: int, context: _Context
    ) -> torch.Tensor:
        """Run the chosen rows as one pass, padded to the widest request. Returns the outputs of the real ones."""
        width = max(len(chosen) for chosen in steps)
        tokens = [0] * (len(requests) * width)
        above = [0] * len(tokens)
        turns = [r.ask.position + 1 + level + (r.ask.sight.offset if r.ask.sight else 0) for r in requests]
        paths: list[list[tuple[int, ...]]] = []
        real: list[int] = []
        at = 0
        for n, (r, chosen) in enumerate(zip(requests, steps, strict=True)):
            paths.append([r.frontier[step.path].lanes for step in chosen])
            for j, step in enumerate(chosen):
                real.append(n * width + j)
                tokens[real[-1]], above[real[-1]] = step.token, at + step.path
            at += len(r.frontier)
            state = len(r.graph.tokens)
            r.frontier = [
                _Path(state + j, (*lanes, context.free + j), step.alive)
                for j, (lanes, step) in enumerate(zip(paths[-1], chosen, strict=True))
            ]
        visible = context.visible(paths, width)
        device = self.module.device
        out = self.module.forward(
            torch.tensor(tokens, device=device),
            z.index_select(0, torch.tensor(above, device=device)),
            torch.tensor([turn for turn in turns for _ in range(width)], device=device),
            lambda q, k, v: context.attend(q, k, v, visible, width),
        )
        return out if len(real) == len(tokens) else out.index_select(0, torch.tensor(real, device=device))

    def _draft(self, r: _Request) -> Draft:
        """The chain with its laws; of a tree, the graph and its best path."""
        if not r.ask.tree:
            return Draft(self.name, r.tokens, r.laws, r.probs)
        tokens: list[int] = []
        probs: list[float] = []
        state = 0
        while state >= 0:
            tokens.append(r.graph.tokens[state][0])
            probs.append(r.graph.probs[state][0])
            state = r.graph.nexts[state][0]
        return Draft(self.name, tokens, [None] * len(tokens), probs, r.graph)
