"""One request's proposal: a small tree of draft rows, whoever drafted them.

Row 0 of a verify step is the anchor (the newest emitted token). Node i of a proposal becomes row i + 1;
`parents[i]` is the node before it on its path, -1 for the anchor. Parents come before children. A chain
is the tree `parents = [-1, 0, 1, ...]`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Law:
    """The sparse law a node's token was drawn from: token ids and probabilities, zero elsewhere.

    None in place of a Law means a point mass on the node's token.
    """

    ids: tuple[int, ...]
    probs: tuple[float, ...]


@dataclass
class Proposal:
    """Draft tokens of one request for one verify step.

    tokens    [n] token ids
    parents   [n] node index of the predecessor, -1 = the anchor
    laws      [n] Law or None (point mass)
    sources   [n] "mtp" | "dflash2" | "lookup" | "grammar", for the shares in metrics
    survival  [n] estimated probability that the whole path down to this node is accepted, from history alone
    """

    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    laws: list[Law | None] = field(default_factory=list)
    sources: list[str] = field(default_factory=list)
    survival: list[float] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.tokens)

    @classmethod
    def chain(
        cls,
        tokens: Sequence[int],
        source: str,
        laws: Sequence[Law | None] | None = None,
        survival: Sequence[float] | None = None,
    ) -> Proposal:
        n = len(tokens)
        return cls(
            tokens=list(tokens),
            parents=list(range(-1, n - 1)),
            laws=list(laws) if laws is not None else [None] * n,
            sources=[source] * n,
            survival=list(survival) if survival is not None else [1.0] * n,
        )

    @property
    def is_chain(self) -> bool:
        return all(p == i - 1 for i, p in enumerate(self.parents))

    def children(self) -> list[list[int]]:
        """children()[i + 1] = nodes whose parent is node i, [0] = those of the anchor; in trial order."""
        out: list[list[int]] = [[] for _ in range(len(self.tokens) + 1)]
        for i, p in enumerate(self.parents):
            out[p + 1].append(i)
        return out

    def cut(self, n: int) -> Proposal:
        """The first n nodes (parents come first, so the result is a tree)."""
        return Proposal(self.tokens[:n], self.parents[:n], self.laws[:n], self.sources[:n], self.survival[:n])
