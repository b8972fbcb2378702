"""Best-first trees: shape, best-first-ness against brute force, depth-first order, and the law of what they verify."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from drafting.reference import free_law, random_chain, rejection_law
from soloist.drafting.calibration import Rates
from soloist.drafting.draft import CandidateGraph
from soloist.drafting.lookup import Match
from soloist.drafting.proposal import Proposal
from soloist.drafting.tree import depth_first, grow_tree


def random_graph(rng: np.random.Generator, slots: int, width: int, vocab: int) -> CandidateGraph:
    """A DFlash2-like lattice: one state per (slot, candidate), every candidate of the next slot reachable."""
    ids = [rng.choice(vocab, width, replace=False).tolist() for _ in range(slots)]
    tokens: list[list[int]] = []
    probs: list[list[float]] = []
    nexts: list[list[int]] = []
    for state in range(1 + slots * width):
        slot = 0 if state == 0 else (state - 1) // width + 1
        if slot == slots:
            tokens.append([]), probs.append([]), nexts.append([])
            continue
        row = rng.dirichlet(np.full(width, 0.5))
        order = np.argsort(-row)
        tokens.append([ids[slot][i] for i in order])
        probs.append([float(row[i]) for i in order])
        nexts.append([1 + slot * width + int(i) for i in order])
    return CandidateGraph(tokens, probs, nexts)


def check_tree(p: Proposal) -> None:
    assert all(-1 <= parent < i for i, parent in enumerate(p.parents))
    siblings = [(parent, token) for parent, token in zip(p.parents, p.tokens, strict=True)]
    assert len(set(siblings)) == len(siblings)
    for i, parent in enumerate(p.parents):
        assert 0 < p.survival[i] <= (1.0 if parent < 0 else p.survival[parent]) + 1e-12


def path(p: Proposal, node: int) -> tuple[int, ...]:
    out: list[int] = []
    while node >= 0:
        out.append(p.tokens[node])
        node = p.parents[node]
    return tuple(reversed(out))


class Plain(Rates):
    """No calibration: the estimate is the prior."""

    def rate(self, evidence) -> float:
        return evidence.prior


def test_the_tree_is_the_most_probable_one() -> None:
    rng = np.random.default_rng(1)
    for _ in range(50):
        graph = random_graph(rng, 4, 4, 20)
        p = grow_tree(graph, "dflash2", [], [], 15, Plain()).proposal
        check_tree(p)
        every: dict[tuple[int, ...], float] = {}

        def visit(state: int, prefix: tuple[int, ...], alive: float, graph=graph, every=every) -> None:
            for t, q, n in zip(graph.tokens[state], graph.probs[state], graph.nexts[state], strict=True):
                every[(*prefix, t)] = alive * q
                visit(n, (*prefix, t), alive * q)

        visit(0, (), 1.0)
        want = sorted(every.values(), reverse=True)[:15]
        np.testing.assert_allclose(p.survival, want, rtol=1e-9)
        np.testing.assert_allclose([every[path(p, i)] for i in range(15)], want, rtol=1e-9)


def test_a_copy_becomes_one_path_and_goes_deeper_than_the_block() -> None:
    rng = np.random.default_rng(2)
    graph = random_graph(rng, 3, 4, 20)
    match = Match(tuple(range(100, 115)), 12, 0)
    rates = Rates()
    fused = grow_tree(graph, "mtp", [match], [], 15, rates)
    check_tree(fused.proposal)
    copies = [path(fused.proposal, i) for i in range(15) if fused.proposal.sources[i] == "lookup"]
    assert max(len(c) for c in copies) > 3
    assert all(c == match.tokens[: len(c)] for c in copies)
    for _ in range(200):
        for e in itertools.chain.from_iterable(fused.evidence):
            rates.observe(e, e.kind.startswith("lookup"))
    sure = grow_tree(graph, "mtp", [match], [], 15, rates).proposal
    assert sure.tokens == list(match.tokens) and sure.is_chain


def test_a_shared_token_is_one_node_and_a_forced_one_has_no_rival() -> None:
    graph = CandidateGraph([[7, 8], [9], []], [[0.6, 0.4], [1.0], []], [[1, -1], [2], []])
    shared = grow_tree(graph, "mtp", [Match((7, 9), 8, 0)], [], 4, Rates()).proposal
    assert sorted(path(shared, i) for i in range(len(shared))) == [(7,), (7, 9), (8,)]
    forced = grow_tree(graph, "mtp", [Match((7, 9), 8, 0)], [3, 4, 5], 4, Rates()).proposal
    assert forced.tokens == [3, 4, 5] and forced.sources == ["grammar"] * 3 and forced.is_chain


@pytest.mark.parametrize("seed", range(20))
def test_depth_first_order_keeps_the_tree_and_a_small_stack(seed: int) -> None:
    rng = np.random.default_rng(seed)
    before = grow_tree(random_graph(rng, 5, 4, 30), "dflash2", [], [], 15, Rates())
    after = depth_first(before)
    p, q = before.proposal, after.proposal
    check_tree(q)
    seen = {path(p, i): (p.survival[i], before.evidence[i]) for i in range(len(p))}
    assert seen == {path(q, i): (q.survival[i], after.evidence[i]) for i in range(len(q))}
    # A branch state is held from a node's first child to its last.
    children = q.children()
    held = [sum(c[0] < i <= c[-1] for c in children if len(c) > 1) for i in range(len(q))]
    assert max(held) <= 4
    for i, parent in enumerate(q.parents):
        assert parent == i - 1 or i > children[parent + 1][0]


def test_the_law_of_a_deterministic_tree_is_the_targets() -> None:
    rng = np.random.default_rng(3)
    for _ in range(20):
        p = random_chain(rng, 5, 3)
        tree = depth_first(grow_tree(random_graph(rng, 3, 3, 5), "mtp", [Match((1, 2, 3), 8, 0)], [], 9, Rates()))
        assert np.abs(rejection_law(p, tree.proposal, 2) - free_law(p, (), 2)).max() < 1e-9
