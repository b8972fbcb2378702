"""Both drafters against their definitions, through everything a request's life does to them."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from drafting.rooms import DFlash2Room, MTPRoom
from soloist.sampling.params import SamplingParams


@pytest.fixture(scope="module", params=["mtp", "dflash2"])
def room(request, tmp_path_factory):
    directory = tmp_path_factory.mktemp(request.param)
    return MTPRoom(directory) if request.param == "mtp" else DFlash2Room(directory)


@pytest.fixture(scope="module")
def mtp(tmp_path_factory) -> MTPRoom:
    return MTPRoom(tmp_path_factory.mktemp("mtp_alone"))


@pytest.fixture(scope="module")
def dflash2(tmp_path_factory) -> DFlash2Room:
    return DFlash2Room(tmp_path_factory.mktemp("dflash2_alone"))


@pytest.mark.parametrize("seed", range(4))
def test_drafts_after_any_history_of_steps_equal_drafts_from_scratch(room, seed: int) -> None:
    """A prompt in uneven chunks, then steps that settle 1 to 8 tokens, each drafted for (and mostly rejected)."""
    rng = random.Random(seed)
    text, drafter = room.text(seed), room.drafter()
    at = 0
    for size in (rng.randrange(1, 60), 64, rng.randrange(1, 8)):
        drafter.absorb([text.part(at, at + size)])
        at += size
    compared = 0
    while at + 9 < len(text.tokens):
        if rng.random() < 0.8:
            count = rng.randrange(1, drafter.depth + 1)
            (draft,) = drafter.propose([text.ask(at, count)])
            assert draft.tokens == room.expect(text, at, count)
            assert all(law is None for law in draft.laws)
            compared += 1
        size = rng.randrange(1, 9)
        drafter.absorb([text.part(at, at + size)])
        at += size
    assert compared >= 3


def test_chunks_do_not_matter(room) -> None:
    text = room.text(9)
    whole, pieces = room.drafter(), room.drafter()
    whole.absorb([text.part(0, 130)])
    for start, stop in ((0, 1), (1, 64), (64, 128), (128, 130)):
        pieces.absorb([text.part(start, stop)])
    assert whole.propose([text.ask(130, 4)])[0].tokens == pieces.propose([text.ask(130, 4)])[0].tokens
    assert room.expect(text, 130, 4) == whole.propose([text.ask(130, 4)])[0].tokens


def test_neighbours_do_not_matter(room) -> None:
    texts = [room.text(20 + i, slot=i) for i in range(3)]
    lengths = [7, 90, 140]
    together = room.drafter()
    together.absorb([t.part(0, n) for t, n in zip(texts, lengths, strict=True)])
    asks = [t.ask(n, 4 - i) for i, (t, n) in enumerate(zip(texts, lengths, strict=True))]
    for ask, draft, text in zip(asks, together.propose(asks), texts, strict=True):
        assert draft.tokens == room.expect(text, ask.position, ask.count)
    # Asking again, in another company, gives the same; a request that wants nothing gets nothing.
    assert together.propose([asks[1]])[0].tokens == room.expect(texts[1], 90, 3)
    assert len(together.propose([texts[0].ask(7, 0)])[0]) == 0


def test_a_slot_is_recycled_without_memory(room) -> None:
    old, new = room.text(30), room.text(31)
    drafter = room.drafter()
    drafter.absorb([old.part(0, 150)])
    drafter.propose([old.ask(150, 4)])
    drafter.drop(0)
    drafter.absorb([new.part(0, 5)])
    assert drafter.propose([new.ask(5, 4)])[0].tokens == room.expect(new, 5, 4)


def test_a_resume_from_a_snapshot_continues_as_if_never_left(room) -> None:
    """Another text that shares the first 64 tokens resumes from their snapshot, in another slot."""
    first, second = room.text(40), room.text(41, slot=1)
    second.tokens[:64] = first.tokens[:64]
    second.hidden[:64], second.taps[:64] = first.hidden[:64], first.taps[:64]
    second.pages[0] = first.pages[0]
    drafter = room.drafter()
    drafter.absorb([first.part(0, 64)])
    snapshot = {name: tensor.clone() for name, tensor in drafter.export(0, 64).items()}
    drafter.absorb([first.part(64, 100)])
    drafter.load(1, 64, snapshot)
    drafter.absorb([second.part(64, 90)])
    for text, at in ((first, 100), (second, 90)):
        assert drafter.propose([text.ask(at, 4)])[0].tokens == room.expect(text, at, 4)
    with pytest.raises(ValueError, match="has absorbed 100"):
        drafter.export(0, 64)


def test_an_anchor_that_does_not_follow_is_refused(room) -> None:
    text, drafter = room.text(50), room.drafter()
    drafter.absorb([text.part(0, 20)])
    with pytest.raises(ValueError, match="has absorbed 20 tokens; its anchor is at 22"):
        drafter.propose([text.ask(22, 2)])


def test_sampled_drafts_come_from_the_law_they_carry(room) -> None:
    text, drafter = room.text(60), room.drafter()
    drafter.absorb([text.part(0, 40)])
    params = SamplingParams(temperature=0.8, top_k=5, top_p=0.95)
    first: dict[int, int] = {}
    law = None
    for seed in range(600):
        (draft,) = drafter.propose([text.ask(40, 2, params=params, seed=seed, mode="rejection")])
        assert len(draft.tokens) == 2
        for token, given in zip(draft.tokens, draft.laws, strict=True):
            assert given is not None and len(given.ids) <= 5 and token in given.ids
            assert sum(given.probs) == pytest.approx(1.0)
        law = draft.laws[0]
        first[draft.tokens[0]] = first.get(draft.tokens[0], 0) + 1
    assert law is not None
    counts = np.array([first.get(t, 0) for t in law.ids])
    expected = 600 * np.array(law.probs)
    assert counts.sum() == 600
    assert ((counts - expected) ** 2 / expected).sum() < 25  # chi-square, 4 degrees of freedom: p < 1e-4
    (coupled,) = drafter.propose([text.ask(40, 2, params=params, seed=3, mode="coupled")])
    assert coupled.laws == [None, None]
    (point,) = drafter.propose([text.ask(40, 2, params=params, seed=3, mode="rejection", sample=False)])
    assert point.laws == [None, None] and point.tokens == room.expect(text, 40, 2)


def test_the_graph_holds_the_chain(room) -> None:
    text, drafter = room.text(70), room.drafter()
    drafter.absorb([text.part(0, 100)])
    (draft,) = drafter.propose([text.ask(100, drafter.depth, tree=True)])
    graph = draft.graph
    assert graph is not None and len(graph.tokens) == len(graph.probs) == len(graph.nexts)
    assert draft.tokens == room.expect(text, 100, drafter.depth)
    state = 0
    for token in draft.tokens:
        assert graph.tokens[state][0] == token
        state = graph.nexts[state][0]
    for tokens, probs, nexts in zip(graph.tokens, graph.probs, graph.nexts, strict=True):
        assert len(set(tokens)) == len(tokens) == len(probs) == len(nexts)
        assert probs == sorted(probs, reverse=True) and sum(probs) < 1 + 1e-5
        assert all(-1 <= n < len(graph.tokens) for n in nexts)


def test_every_path_of_the_mtp_graph_is_what_the_module_says(mtp: MTPRoom) -> None:
    text, drafter = mtp.text(80), mtp.drafter(depth=4, beam=3)
    drafter.absorb([text.part(0, 50)])
    other = mtp.text(81, slot=1)
    drafter.absorb([other.part(0, 30)])
    draft, _ = drafter.propose([text.ask(50, 4, tree=True), other.ask(30, 2)])
    graph, checked = draft.graph, 0

    def visit(state: int, hidden: torch.Tensor, tokens: list[int]) -> None:
        nonlocal checked
        out = mtp.oracle.rows(hidden, torch.tensor(tokens))
        law = (out[-1] @ mtp.oracle.head.T).topk(64)
        weights = law.values.softmax(-1)
        assert graph.tokens[state] == law.indices[:4].tolist()
        np.testing.assert_allclose(graph.probs[state], weights[:4].numpy(), rtol=2e-3)
        checked += 1
        for token, following in zip(graph.tokens[state], graph.nexts[state], strict=True):
            if following >= 0:
                visit(following, torch.cat([hidden, out[-1:]]), [*tokens, token])

    visit(0, text.hidden[:50], text.tokens[1:51])
    assert checked == len(graph.tokens) >= 4


def test_the_dflash2_graph_scores_every_pair(dflash2: DFlash2Room) -> None:
    """Along any path, the graph's probabilities are the softmax of the edge scores of the definition."""
    text, drafter = dflash2.text(90), dflash2.drafter()
    drafter.absorb([text.part(0, 100)])
    (draft,) = drafter.propose([text.ask(100, 7, tree=True)])
    block = dflash2.oracle.draft(text.taps[:100], text.tokens[100])
    state = 0
    for slot, token in enumerate(draft.tokens):
        weights = block.scores[slot].softmax(-1)
        order = weights.argsort(descending=True)[:6]
        assert draft.graph.tokens[state] == block.candidates[slot][order].tolist()
        np.testing.assert_allclose(draft.graph.probs[state], weights[order].numpy(), rtol=1e-3)
        state = draft.graph.nexts[state][draft.graph.tokens[state].index(token)]
    assert state == -1


def test_a_truncated_head_proposes_its_own_ids_only(tmp_path) -> None:
    ids = torch.arange(3, 200, 7)
    room = MTPRoom(tmp_path, ids)
    text, drafter = room.text(100), room.drafter()
    drafter.absorb([text.part(0, 30)])
    (draft,) = drafter.propose([text.ask(30, 4)])
    assert set(draft.tokens) <= set(ids.tolist())
    out = room.oracle.rows(text.hidden[:30], torch.tensor(text.tokens[1:31]))
    assert draft.tokens[0] == int(ids[(out[-1] @ room.oracle.head[ids].T).argmax()])


def test_a_snapshot_needs_no_page_beyond_it(mtp: MTPRoom) -> None:
    """At a grid point the anchor's page may not exist yet; a parked request resumes with nothing queued."""
    text, drafter = mtp.text(110), mtp.drafter()
    text.pages = text.pages[:1]
    drafter.absorb([text.part(0, 64)])
    snapshot = drafter.export(0, 64)
    text.pages = [*text.pages, 9]
    assert drafter.propose([text.ask(64, 4)])[0].tokens == mtp.expect(text, 64, 4)
    drafter.drop(0)
    text.slot = 2
    drafter.load(2, 64, snapshot)
    assert drafter.propose([text.ask(64, 4)])[0].tokens == mtp.expect(text, 64, 4)
    drafter.absorb([text.part(64, 67)])
    assert drafter.propose([text.ask(67, 4)])[0].tokens == mtp.expect(text, 67, 4)


def test_going_back_forgets_what_came_after(room) -> None:
    """A settle pass prefills tokens again that were decoded before."""
    text, drafter = room.text(120), room.drafter()
    drafter.absorb([text.part(0, 60)])
    drafter.propose([text.ask(60, 4)])
    drafter.absorb([text.part(30, 50)])
    assert drafter.propose([text.ask(50, 4)])[0].tokens == room.expect(text, 50, 4)


def test_the_instrument_sees_one_wrong_row_of_context(room) -> None:
    """One settled row of the module's KV, or one lane of the ring, zeroed: the draft's law moves."""
    text, drafter = room.text(130), room.drafter()
    drafter.absorb([text.part(0, 50)])
    params = SamplingParams(temperature=1.0)

    def law() -> tuple[float, ...]:
        # The second draft: its row attends to the settled ones anew, however often it is asked for.
        (draft,) = drafter.propose([text.ask(50, 2, params=params, mode="rejection")])
        return draft.laws[1].probs

    before = law()
    assert law() == before
    if isinstance(room, MTPRoom):
        drafter.kv.planes["v.data"][0, text.pages[0] * 64 + 20] = 0
    else:
        drafter.values[0, 0, :, 20] = 0
    assert max(abs(a - b) for a, b in zip(law(), before, strict=True)) > 1e-4
