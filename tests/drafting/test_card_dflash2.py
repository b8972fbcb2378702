"""The card's DFlash2 drafter against the reference drafter, kernels interpreted."""

from __future__ import annotations

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from drafting.rooms import DFlash2Room
from soloist.drafting.card_dflash2 import CardDFlash2Drafter


@pytest.fixture(scope="module")
def room(tmp_path_factory) -> DFlash2Room:
    return DFlash2Room(tmp_path_factory.mktemp("card_dflash2"))


def test_drafts_equal_the_reference_while_the_ring_fills_and_comes_round(room: DFlash2Room) -> None:
    """Two slots (window 64): one short, one past its window; prompts, then steps whose features are overwritten."""
    mine, reference = CardDFlash2Drafter(room.model, 4, "off"), room.drafter()
    mine.keys.fill_(50.0)
    mine.values.fill_(50.0)
    texts = [room.text(1, slot=0), room.text(2, slot=3)]
    at = [9, 70]
    for drafter in (mine, reference):
        drafter.absorb([t.part(0, n) for t, n in zip(texts, at, strict=True)])
    lent = torch.empty(16, texts[0].taps.shape[1])
    for size in (1, 6):
        asks = [t.ask(n, 7, tree=True) for t, n in zip(texts, at, strict=True)]
        for a, b in zip(mine.propose(asks), reference.propose(asks), strict=True):
            assert a.tokens == b.tokens
            # Which of two all but equal candidates is the last one in moves the others a little.
            np.testing.assert_allclose(a.scores, b.scores, rtol=0.1)
            assert a.graph is not None and b.graph is not None and len(a.graph.tokens) == len(b.graph.tokens)
            assert a.graph.tokens[0][0] == b.graph.tokens[0][0]
        parts = [t.part(n, n + size) for t, n in zip(texts, at, strict=True)]
        reference.absorb(parts)
        lent.fill_(float("nan"))
        for i, p in enumerate(parts):
            assert p.taps is not None
            rows = lent[i * size : i * size + size].copy_(p.taps)
            mine.absorb([type(p)(**(vars(p) | {"taps": rows}))])
        at = [n + size for n in at]
    asks = [t.ask(n, 7) for t, n in zip(texts, at, strict=True)]
    assert [d.tokens for d in mine.propose(asks)] == [d.tokens for d in reference.propose(asks)]
