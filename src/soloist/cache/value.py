"""What a cached prefix is worth: recompute cost per byte, aged by use.

A snapshot at b whose nearest earlier snapshot is at a saves the prefill of tokens a .. b and costs its own
bytes plus those of the pages it alone makes reachable. Age enters as in greedy-dual caching: a use
stamps the entry with the cache's clock, and the clock moves up to the priority of whatever was evicted last.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from soloist.cache.tree import Node

MIB = 1 << 20
# A snapshot with another one below it no longer decides whether its pages are reachable; it only serves
# requests that branch off between the two.
BRANCH_SHARE = 0.25
UNREACHABLE = -1.0


@dataclass(frozen=True)
class RecomputeCost:
    """Prefill cost of tokens start .. end in units of one token at position 0.

    `half` is the position at which a token's attention costs as much as all its other work.
    """

    half: float = 65536.0

    def __call__(self, start: int, end: int) -> float:
        return (end - start) * (1.0 + (start + end) / (2.0 * self.half))


@dataclass
class Standing:
    """Where a node stands now: `own` is its snapshot's priority, `best` the highest at or below it."""

    own: float = UNREACHABLE
    best: float = UNREACHABLE
    deeper: bool = False


def standings(roots: Iterable[Node], cost: Callable[[int, int], float], page_bytes: float) -> dict[Node, Standing]:
    """Priorities of every node, computed in two passes. `page_bytes` is per token of KV."""
    result: dict[Node, Standing] = {}
    previous: dict[Node, int] = {}
    for start in roots:
        previous[start] = 0
        order = list(start.subtree())
        for node in order[1:]:
            assert node.parent is not None
            above = node.parent
            previous[node] = above.length if above.resumable else previous[above]
        for node in reversed(order):
            here = result.setdefault(node, Standing())
            for child in node.children.values():
                below = result[child]
                here.best = max(here.best, below.best)
                here.deeper |= below.deeper or child.resumable
            if node.resumable and node.parent is not None:
                here.own = node.stamp + _worth(node, previous[node], here.deeper, cost, page_bytes)
                here.best = max(here.best, here.own)
    return result


def _worth(node: Node, start: int, deeper: bool, cost: Callable[[int, int], float], page_bytes: float) -> float:
    size = node.snapshot.nbytes if node.snapshot is not None else 0
    if not deeper:
        size += int((node.length - start) * page_bytes)
    share = BRANCH_SHARE if deeper else 1.0
    return share * cost(start, node.length) / max(size / MIB, 1e-6)
