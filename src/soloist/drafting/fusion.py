"""One chain out of the drafter's block and a lookup match: which positions the copied text takes.

Head = the drafter's block of B positions, tail = positions beyond it. The head is overridden when the match is trusted
(`nstrong`) or the two sources agree on the first `agree` positions; the tail costs nobody anything and is taken from
any match of `nmin_tail` once the head is copied or agreed throughout.

Exactness under rejection sampling: the source of position i may depend on the history and on drafts before i, never on
the value of draft i or of later ones. So where a decision looked at drafted values (positions before `agree`), the
drafter's law is kept with the token, which is the same token; point masses begin after the last position looked at.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from soloist.drafting.calibration import FORCED, Evidence, Rates, copied, drawn, scored
from soloist.drafting.draft import Draft
from soloist.drafting.lookup import LookupConfig, Match
from soloist.drafting.proposal import Law, Proposal


@dataclass(frozen=True)
class Fused:
    """A proposal and what the block-length rule and the calibration need to know about it.

    evidence  [n] what was known about each node
    has_tail  a copy fills positions beyond the drafter's block
    peeked    length of the drawn head whose values decided what comes after: a rule may cut the proposal only there
              or later, or by estimates that are the same whatever was drawn
    """

    proposal: Proposal
    evidence: list[tuple[Evidence, ...]]
    has_tail: bool = False
    peeked: int = 0


def _agreement(drafted: Sequence[int], looked: Sequence[int]) -> int:
    """Leading positions where both sources propose the same token."""
    n = 0
    while n < len(drafted) and n < len(looked) and drafted[n] == looked[n]:
        n += 1
    return n


def fuse_chain(
    draft: Draft,
    match: Match | None,
    config: LookupConfig,
    capacity: int,
    rates: Rates,
    forced: Sequence[int] = (),
) -> Fused:
    """Merge by the head and tail rules; at most `capacity` positions.

    `match` None leaves the draft as it is. `forced` are tokens a grammar dictates from here: they come first, and what
    was copied or drafted for later positions stays.
    """
    block = len(draft)
    looked = match.tokens[:capacity] if match else ()
    length = match.length if match else 0
    agree = _agreement(draft.tokens, looked)
    strong = length >= config.nstrong
    take_head = bool(looked) and (strong or (length >= config.nmin and agree >= config.agree))
    take_tail = length >= config.nmin_tail and (take_head or agree >= block)
    keep_law = 0 if strong else config.agree
    decided_by_draws = bool(looked) and not strong and (config.agree > 0 if length >= config.nmin else True)
    peeked = block if decided_by_draws and any(law is not None for law in draft.laws) else 0

    tokens: list[int] = []
    laws: list[Law | None] = []
    sources: list[str] = []
    survival: list[float] = []
    evidence: list[tuple[Evidence, ...]] = []
    alive = 1.0
    for i in range(min(capacity, max(block, len(looked), len(forced)))):
        if i < len(forced):
            known = FORCED
            tokens.append(forced[i])
            laws.append(None)
            sources.append("grammar")
        elif i < len(looked) and (take_head if i < block else take_tail):
            known = copied(length + i)
            tokens.append(looked[i])
            laws.append(draft.laws[i] if i < min(keep_law, block) else None)
            sources.append("lookup")
        elif i < block:
            is_drawn = draft.laws[i] is not None
            known = drawn(draft.source, i) if is_drawn else scored(draft.source, draft.scores[i])
            tokens.append(draft.tokens[i])
            laws.append(draft.laws[i])
            sources.append(draft.source)
        else:
            break
        alive *= rates.rate(known)
        survival.append(alive)
        evidence.append((known,))
    has_tail = length >= config.longmin and len(looked) > block and take_tail
    proposal = Proposal(tokens, list(range(-1, len(tokens) - 1)), laws, sources, survival)
    return Fused(proposal, evidence, has_tail, peeked)
