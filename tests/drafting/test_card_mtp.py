"""The card's MTP drafter against the reference drafter, kernels interpreted where there is no card."""

from __future__ import annotations

import random
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from drafting.rooms import CARD, MTPRoom, Text
from host_products import HostLoader
from launches import Launches
from soloist.cache.kv import KVStore
from soloist.drafting.card_mtp import CardMTPDrafter
from soloist.models.card_mtp import CardMTP, Levels, Settled, Wanted
from soloist.models.mtp import MTPModule
from soloist.ops.triton.attention import Partials
from soloist.sampling.params import SamplingParams

SLOTS, PAGES = 4, 8
WAYS = {
    "greedy": (SamplingParams(temperature=0.0), "greedy"),
    "coupled": (SamplingParams(temperature=0.9, top_k=20, top_p=0.95), "coupled"),
    "rejection": (SamplingParams(temperature=1.1, min_p=0.02), "rejection"),
}


@pytest.fixture(
    scope="module", params=[pytest.param(None, marks=pytest.mark.slow), 3], ids=["whole head", "truncated head"]
)
def room(request, tmp_path_factory) -> MTPRoom:
    ids = None if request.param is None else torch.arange(request.param, 256, 2)
    return MTPRoom(tmp_path_factory.mktemp("card_mtp"), ids)


def card_of(
    room: MTPRoom, module: MTPModule, depth: int, mode: str = "off", entries: int = 400
) -> tuple[CardMTP, KVStore]:
    """Whatever a launch has to write before it is read is NaN."""
    c = room.config
    partials = Partials.allocate(entries, c.num_heads, c.head_dim, module.device)
    kv = room.kv(module.device)
    card = CardMTP(module, kv, depth, SLOTS, PAGES, partials, mode)  # type: ignore[arg-type]
    scratch = [getattr(card, f"_{name}") for name in ("pair", "x", "h", "delta", "z", "qkv", "q", "k", "v", "mixed")]
    scratch += [partials.acc, partials.top, partials.total, *card._own, card._gate_up, card._inner, card._logits]
    for buffer in scratch:
        buffer.fill_(float("nan"))
    return card, kv


def on_card(room: MTPRoom, depth: int = 3, entries: int = 400) -> CardMTPDrafter:
    module = room.module if CARD.type == "cpu" else room.loaded(HostLoader, CARD)
    return CardMTPDrafter(*card_of(room, module, depth, entries=entries))


def same(a, b) -> None:
    """Two drafts: equal tokens, laws and graph; probabilities up to the rounding of 16-bit logits."""
    assert a.tokens == b.tokens
    for mine, theirs in zip(a.laws, b.laws, strict=True):
        assert (mine is None) == (theirs is None)
        if mine is not None:
            assert mine.ids == theirs.ids
            np.testing.assert_allclose(mine.probs, theirs.probs, rtol=2e-2)
    np.testing.assert_allclose(a.scores, b.scores, rtol=2e-2)
    assert (a.graph is None) == (b.graph is None)
    if a.graph is not None:
        # Behind the first places, candidates whose 16-bit logits are all but equal may change places.
        assert [t[0] for t in a.graph.tokens] == [t[0] for t in b.graph.tokens] and a.graph.nexts == b.graph.nexts
        for mine, theirs in zip(a.graph.probs, b.graph.probs, strict=True):
            np.testing.assert_allclose(mine, theirs, rtol=2e-2)


@pytest.mark.parametrize(
    ("way", "tree"),
    [
        ("coupled", True),
        pytest.param("greedy", True, marks=pytest.mark.slow),
        pytest.param("rejection", False, marks=pytest.mark.slow),
        pytest.param("greedy", False, marks=pytest.mark.slow),
        pytest.param("coupled", False, marks=pytest.mark.slow),
        pytest.param("rejection", True, marks=pytest.mark.slow),
    ],
)
def test_drafts_equal_the_reference_through_a_requests_life(room: MTPRoom, way: str, tree: bool) -> None:
    """Two requests side by side: prompts, steps that settle several tokens, one that sits a step out."""
    params, mode = WAYS[way]
    mine, reference = on_card(room), room.drafter(depth=3)
    texts: list[Text] = [room.text(7, slot=0), room.text(8, slot=2)]
    at = [66, 70]
    reference.absorb([t.part(0, n) for t, n in zip(texts, at, strict=True)])
    mine.absorb([t.on_card().part(0, n) for t, n in zip(texts, at, strict=True)])
    rng = random.Random(1)
    lent = torch.empty(16, room.config.hidden_size, device=CARD)
    for step in range(2):
        asks = [
            t.ask(n, 0 if step == 0 and t.slot == 2 else 3, params=params, seed=11, mode=mode, tree=tree)
            for t, n in zip(texts, at, strict=True)
        ]
        for a, b in zip(mine.propose(asks), reference.propose(asks), strict=True):
            same(a, b)
        sizes = [rng.randrange(1, 5) for _ in texts]
        parts = [t.part(n, n + size) for t, n, size in zip(texts, at, sizes, strict=True)]
        reference.absorb(parts)
        # Features of a step stand in a buffer that the next step overwrites.
        lent.fill_(float("nan"))
        rows = 0
        for p in parts:
            mine_rows = lent[rows : rows + len(p.hidden)].copy_(p.hidden)
            mine.absorb([replace(p, hidden=mine_rows)])
            rows += len(p.hidden)
        at = [n + size for n, size in zip(at, sizes, strict=True)]


def test_steps_in_which_nobody_is_asked_leave_their_features(room: MTPRoom) -> None:
    """Where no draft pays, rows wait for steps, and the buffer that their features stood in is overwritten by each."""
    text, mine, reference = room.text(4), on_card(room, 2), room.drafter(depth=2)
    reference.absorb([text.part(0, 9)])
    mine.absorb([text.on_card().part(0, 9)])
    lent = torch.empty(2, room.config.hidden_size, device=CARD)
    for n in (9, 11, 13):
        reference.absorb([text.part(n, n + 2)])
        mine.absorb([replace(text.part(n, n + 2), hidden=lent.copy_(text.hidden[n : n + 2]))])
        assert mine.propose([text.ask(n + 2, 0)])[0].tokens == []
        lent.fill_(float("nan"))
    same(*(d.propose([text.ask(15, 2)])[0] for d in (mine, reference)))


def test_rows_that_have_no_room_for_their_splits_take_the_other_road(room: MTPRoom, monkeypatch) -> None:
    text, mine, reference = room.text(6), on_card(room, 2, entries=12), room.drafter(depth=2)
    assert mine.card.fits([(0, 8), (300, 1)]) and not mine.card.fits([(0, 12)]) and not mine.card.fits([(600, 4)])
    assert not on_card(room).card.fits([(0, 65)])
    settle = mine.card.settle
    monkeypatch.setattr(mine.card, "settle", lambda parts: pytest.fail("a pass that does not fit"))
    for drafter in (reference, mine):
        drafter.absorb([(text if drafter is reference else text.on_card()).part(0, 20)])
    same(*(d.propose([text.ask(20, 2)])[0] for d in (mine, reference)))
    monkeypatch.setattr(mine.card, "settle", settle)
    for drafter in (reference, mine):
        drafter.absorb([(text if drafter is reference else text.on_card()).part(20, 22)])
    same(*(d.propose([text.ask(22, 2)])[0] for d in (mine, reference)))


@pytest.mark.slow
def test_a_draft_ends_where_the_card_ran_other_rows_than_chosen(room: MTPRoom, monkeypatch) -> None:
    drafter, text = on_card(room), room.text(3).on_card()
    drafter.absorb([text.part(0, 40)])
    (whole,) = drafter.propose([text.ask(40, 3)])
    (tree,) = drafter.propose([text.ask(40, 3, tree=True)])
    assert len(whole.tokens) == 3 and max(max(n) for n in tree.graph.nexts) > 0
    honest = drafter.card.draft

    def other(wanted, beam: int) -> Levels:
        levels = honest(wanted, beam)
        levels.chosen[1][..., 0] += 1
        return levels

    monkeypatch.setattr(drafter.card, "draft", other)
    (cut,) = drafter.propose([text.ask(40, 3)])
    assert cut.tokens == whole.tokens[:2]
    (cut,) = drafter.propose([text.ask(40, 3, tree=True)])
    assert cut.graph.tokens == tree.graph.tokens[: len(cut.graph.tokens)]
    assert 1 < len(cut.graph.tokens) < len(tree.graph.tokens)
    assert max(max(n) for n in cut.graph.nexts) < len(cut.graph.tokens)


@pytest.mark.slow
def test_a_snapshot_resumes_on_the_card(room: MTPRoom) -> None:
    text, drafter, reference = room.text(5), on_card(room), room.drafter(depth=3)
    drafter.absorb([text.on_card().part(0, 64)])
    snapshot = {name: tensor.clone() for name, tensor in drafter.export(0, 64).items()}
    drafter.drop(0)
    text.slot = 1
    drafter.load(1, 64, snapshot)
    reference.absorb([text.part(0, 64)])
    same(*(d.propose([text.ask(64, 3)])[0] for d in (drafter, reference)))
    reference.absorb([text.part(64, 67)])
    drafter.absorb([text.on_card().part(64, 67)])
    same(*(d.propose([text.ask(67, 3)])[0] for d in (drafter, reference)))


@pytest.mark.skipif(CARD.type != "cpu", reason="counts what is interpreted")
def test_launches_of_a_draft_and_of_settled_rows(room: MTPRoom) -> None:
    """What a card launches, with its copies: sixteen kernels a level behind the first."""
    card, _ = card_of(room, room.loaded(HostLoader), 3)
    card.hidden.normal_()
    with Launches() as settled:
        card.settle([Settled(0, [3, 4], 1, 0, list(range(PAGES)))])
    assert settled.total == 15, settled.names
    drafts = {}
    for depth in (2, 3):
        card.depth = depth
        with Launches() as drafts[depth]:
            card.draft([Wanted(0, 2, list(range(PAGES)))], 1)
    level = drafts[3].names - drafts[2].names
    assert drafts[2].total == 22, drafts[2].names
    assert level.total() == 16 and not any(name.startswith("torch.") for name in level), level


def test_a_check_names_what_a_graph_left_differently(room: MTPRoom) -> None:
    """A graph stands in that leaves nothing: the eager run, which does, is compared with it."""
    card, _ = card_of(room, room.loaded(HostLoader, CARD), 2, "check")
    card.hidden.normal_()
    idle = SimpleNamespace(replay=lambda: None)
    card.graphs._captured |= {(1,): idle, (1, 1): idle}
    part, wanted = Settled(0, [3], 1, 0, list(range(PAGES))), Wanted(0, 1, list(range(PAGES)))
    with pytest.raises(RuntimeError, match="captured pass over 1 settled rows differs from the eager one in keys"):
        card.settle([part])
    with pytest.raises(RuntimeError, match="captured draft of 1 requests by 1 differs from the eager one in cand"):
        card.draft([wanted], 1)
    card.settle([part])  # what stands there now is what an eager run leaves
