"""All draft sources of the engine as one: lookup, grammar and a drafter, merged into one proposal per request.

Per step and request: find a match, ask the grammar what it dictates, let the drafter draft where that pays, merge
(a best-first tree, or a chain by the head and tail rules), and put up as many rows as the block rule allows.

Everything that steers a request's proposals is its own: its text, its acceptance, its controller.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from soloist.cache.kv import KVStore
from soloist.drafting.block_length import BlockRule
from soloist.drafting.calibration import Rates, drawn
from soloist.drafting.draft import Draft
from soloist.drafting.drafter import Ask, Drafter, SettledTokens
from soloist.drafting.fusion import Fused, fuse_chain
from soloist.drafting.lookup import LookupConfig, LookupIndex, Match
from soloist.drafting.proposal import Proposal
from soloist.drafting.tree import depth_first, grow_tree
from soloist.drafting.watch import AcceptanceWatch
from soloist.engine.request import Request
from soloist.engine.speculation import SettledRows
from soloist.sampling.verify import Verdict

# Copies worth following at once: the best match and two that disagree with it.
MATCHES = 3


@dataclass(frozen=True)
class SpeculationConfig:
    """What all requests share.

    lookup  None = off
    tree    propose trees rather than chains
    block   draft rows of a short chain: the drafter's depth (or what lookup alone may put up in prose)
    long    draft rows at most
    sample  draft by sampling where the request samples (False: the likeliest token, a point mass)
    rule    makes one block-length controller per request
    """

    lookup: LookupConfig | None
    tree: bool
    block: int
    long: int
    sample: bool
    rule: Callable[[], BlockRule]


@dataclass
class _Tracked:
    """What is remembered of one request between steps."""

    rule: BlockRule
    index: LookupIndex | None
    rates: Rates = field(default_factory=Rates)
    fused: Fused | None = None
    emitted: int = 0


class Speculator:
    """The engine's `Speculation` with every source this build has. `drafter` None leaves lookup and grammar."""

    def __init__(self, drafter: Drafter | None, config: SpeculationConfig) -> None:
        self.drafter, self.config = drafter, config
        self.taps = drafter.taps if drafter else ()
        self.name = drafter.name if drafter else "lookup"
        self._tracked: dict[int, _Tracked] = {}
        self._watch = AcceptanceWatch()

    # -- what the engine reports -----------------------------------------------------------------------------------

    def absorb(self, rows: Sequence[SettledRows]) -> None:
        for part in rows:
            self._read(part.request, part.start + 1 + len(part.following))
        if self.drafter is not None:
            self.drafter.absorb(
                [
                    SettledTokens(
                        slot=part.request.slot,
                        start=part.start,
                        tokens=[part.request.token(part.start), *part.following],
                        hidden=part.hidden,
                        taps=part.taps,
                        pages=part.request.pages,
                        sight=part.request.sight,
                    )
                    for part in rows
                    if part.request.slot >= 0
                ]
            )

    def observe(self, request: Request, proposal: Proposal, verdict: Verdict) -> None:
        tracked = self._of(request)
        tracked.emitted = len(verdict.tokens)
        self._watch.observe(proposal.sources, {proposal.sources[node] for node in verdict.nodes if node >= 0})
        if tracked.fused is None or tracked.fused.proposal is not proposal:
            return  # the engine put up something else
        children = proposal.children()
        for row, node in zip(verdict.rows, verdict.nodes, strict=True):
            for child in children[row]:
                for evidence in tracked.fused.evidence[child]:
                    tracked.rates.observe(evidence, child == node)

    def drop(self, request: Request) -> None:
        self._tracked.pop(request.id, None)
        if self.drafter is not None and request.slot >= 0:
            self.drafter.drop(request.slot)

    def export(self, request: Request, cut: int) -> dict[str, torch.Tensor]:
        return {} if self.drafter is None else self.drafter.export(request.slot, cut)

    def load(self, request: Request, cut: int, tensors: dict[str, torch.Tensor]) -> None:
        if self.drafter is not None:
            self.drafter.load(request.slot, cut, tensors)

    def vacate(self, request: Request) -> None:
        if self.drafter is not None:
            self.drafter.drop(request.slot)

    @property
    def stores(self) -> dict[str, KVStore]:
        return {} if self.drafter is None else dict(self.drafter.stores)

    @property
    def complaints(self) -> tuple[str, ...]:
        return self._watch.sentences

    def _of(self, request: Request) -> _Tracked:
        tracked = self._tracked.get(request.id)
        if tracked is None:
            index = LookupIndex(self.config.lookup) if self.config.lookup else None
            tracked = self._tracked[request.id] = _Tracked(self.config.rule(), index)
        return tracked

    def _read(self, request: Request, length: int) -> _Tracked:
        """Enter the request's tokens up to `length` into its lookup index."""
        tracked = self._of(request)
        if tracked.index is not None:
            for position in range(len(tracked.index), min(length, request.length)):
                tracked.index.push(request.token(position))
        return tracked

    # -- proposing -------------------------------------------------------------------------------------------------

    def propose(self, requests: Sequence[Request], limits: Sequence[int]) -> list[Proposal]:
        tracked = [self._read(r, r.length) for r in requests]
        limits = [min(limit, self.config.long) for limit in limits]
        matches = [self._matches(t, limit) for t, limit in zip(tracked, limits, strict=True)]
        forced = [self._forced(r, limit) for r, limit in zip(requests, limits, strict=True)]
        asks = [
            self._ask(r, limit if t.rule.drafts(self._at_hand(t, m, f), t.emitted) else 0)
            for r, t, limit, m, f in zip(requests, tracked, limits, matches, forced, strict=True)
        ]
        drafts = self.drafter.propose(asks) if self.drafter else [Draft("")] * len(requests)
        out = []
        for request, t, ask, draft, limit, m, f in zip(
            requests, tracked, asks, drafts, limits, matches, forced, strict=True
        ):
            t.fused = self._put_up(request, t, self._merge(t, ask, draft, m, f, limit), limit, m, ask.count > 0)
            out.append(t.fused.proposal)
        return out

    def _matches(self, tracked: _Tracked, limit: int) -> list[Match]:
        if tracked.index is None or limit == 0:
            return []
        found = tracked.index.matches()[: MATCHES if self.config.tree else 1]
        return [tracked.index.follow(length, end, limit) for length, end in found]

    @staticmethod
    def _forced(request: Request, limit: int) -> list[int]:
        grammar = request.grammar
        return grammar.forced(limit) if grammar is not None and grammar.active and limit > 0 else []

    def _ask(self, request: Request, count: int) -> Ask:
        return Ask(
            slot=request.slot,
            anchor=request.token(request.length - 1),
            position=request.length - 1,
            pages=request.pages,
            params=request.params,
            seed=request.seed,
            mode=request.mode,
            count=min(count, self.config.block) if self.drafter else 0,
            tree=self.config.tree,
            sample=self.config.sample,
            sight=request.sight,
        )

    def _at_hand(self, tracked: _Tracked, matches: Sequence[Match], forced: Sequence[int]) -> list[float]:
        """Survival of what could be proposed without the drafter."""
        if not matches and not forced:
            return []
        return self._merge(tracked, None, Draft(""), matches, forced, self.config.long).proposal.survival

    def _merge(
        self,
        tracked: _Tracked,
        ask: Ask | None,
        draft: Draft,
        matches: Sequence[Match],
        forced: Sequence[int],
        limit: int,
    ) -> Fused:
        if self.config.tree:
            return grow_tree(draft.graph, draft.source, matches, forced, limit, tracked.rates)
        match = matches[0] if matches else None
        lookup = self.config.lookup or LookupConfig()
        return fuse_chain(draft, match, lookup, limit, tracked.rates, forced)

    def _put_up(
        self, request: Request, tracked: _Tracked, fused: Fused, limit: int, matches: Sequence[Match], drafted: bool
    ) -> Fused:
        """Cut to what the block rule allows, and order for the walk."""
        c = self.config
        long_copy = False
        if matches and c.lookup is not None:
            long_copy = matches[0].length >= c.lookup.longmin and len(matches[0].tokens) > c.block
        has_tail = fused.has_tail or (long_copy and (c.tree or not drafted))
        survival = fused.proposal.survival
        if fused.peeked:
            # What was drawn decided what follows, so the rule sees the head by depth alone; past it nothing is hidden.
            alive, survival = 1.0, []
            for depth in range(fused.peeked):
                alive *= tracked.rates.rate(drawn(self.name, depth))
                survival.append(alive)
        rows = tracked.rule.limit(survival, has_tail, tracked.emitted, request.length, drafted)
        if fused.peeked and rows >= fused.peeked:
            rows = limit
        rows = min(rows, limit, len(fused.proposal))
        if rows < len(fused.proposal):
            fused = Fused(fused.proposal.cut(rows), fused.evidence[:rows], fused.has_tail)
        return depth_first(fused)
