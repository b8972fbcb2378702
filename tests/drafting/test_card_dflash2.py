"""The card's DFlash2 drafter against the reference drafter, kernels interpreted where there is no card."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from drafting.rooms import CARD, DFlash2Room
from host_products import HostLoader
from launches import Launches
from soloist.drafting.card_dflash2 import CardDFlash2Drafter
from soloist.models.card_dflash2 import CardDFlash2
from soloist.models.dflash2 import DFlash2
from soloist.models.layers import Loader

SHAPE = {"block": 4, "window": 32, "heads": 2, "kv_heads": 1, "conv_taps": 3}
# With the products of a card a convolution stands inside its product and SiLU too; with others they are kernels.
ON_CPU = pytest.mark.skipif(CARD.type != "cpu", reason="products of a CPU, launches counted as interpreted")
LOADERS = {"a card's products": (HostLoader, (3,)), "other products": (Loader, (1, 3))}


@pytest.fixture(scope="module")
def room(tmp_path_factory) -> DFlash2Room:
    return DFlash2Room(tmp_path_factory.mktemp("card_dflash2"), **SHAPE)


@pytest.fixture(scope="module")
def one_layer(tmp_path_factory) -> DFlash2Room:
    return DFlash2Room(tmp_path_factory.mktemp("one_layer"), **SHAPE | {"layers": 1})


def poison(card: CardDFlash2) -> None:
    """Whatever a launch has to write before it is read is NaN."""
    card.keys.fill_(50.0)
    card.values.fill_(50.0)
    for name, buffer in vars(card).items():
        if isinstance(buffer, torch.Tensor) and buffer.is_floating_point() and name not in ("keys", "values"):
            buffer.fill_(float("nan"))


@pytest.mark.parametrize(
    "loader", ["a card's products", pytest.param("other products", marks=[pytest.mark.slow, ON_CPU])]
)
def test_drafts_equal_the_reference_while_the_ring_fills_and_comes_round(room: DFlash2Room, loader: str) -> None:
    """Two slots (window 32): one short, one past its window; prompts, then steps whose features are overwritten."""
    kind, sizes = LOADERS[loader]
    mine, reference = CardDFlash2Drafter(room.loaded(kind, CARD), 4, "off"), room.drafter()
    poison(mine.card)
    texts = [room.text(1, slot=0), room.text(2, slot=3)]
    at = [5, 38]
    reference.absorb([t.part(0, n) for t, n in zip(texts, at, strict=True)])
    mine.absorb([t.on_card().part(0, n) for t, n in zip(texts, at, strict=True)])
    lent = torch.empty(16, texts[0].taps.shape[1], device=CARD)
    for size in sizes:
        asks = [t.ask(n, 3, tree=True) for t, n in zip(texts, at, strict=True)]
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
            mine.absorb([replace(p, taps=rows)])
        at = [n + size for n in at]
    asks = [t.ask(n, 3) for t, n in zip(texts, at, strict=True)]
    assert [d.tokens for d in mine.propose(asks)] == [d.tokens for d in reference.propose(asks)]


def made(model: DFlash2, mode: str = "off") -> CardDFlash2:
    c = model.config
    shape = (c.num_layers, 3, c.num_kv_heads, c.window, c.head_dim)
    keys, values = (torch.zeros(shape, device=model.device) for _ in range(2))
    card = CardDFlash2(model, keys, values, mode)  # type: ignore[arg-type]
    poison(card)
    card.taps.copy_(torch.randn(card.taps.shape, generator=torch.Generator().manual_seed(6)))
    return card


@ON_CPU
def test_a_block_does_not_depend_on_its_neighbour(one_layer: DFlash2Room) -> None:
    card = made(one_layer.model)
    card.enter([0, 0, 1], [0, 1, 0])
    both = card.block([7, 9], [2, 1], [0, 0], [0, 1])
    for i, alone in enumerate((card.block([7], [2], [0], [0]), card.block([9], [1], [0], [1]))):
        for whole, mine in zip(both, alone, strict=True):
            assert np.array_equal(whole[i : i + 1], mine)


def test_a_check_names_what_a_graph_left_differently(one_layer: DFlash2Room) -> None:
    """A graph stands in that leaves nothing: the eager run, which does, is compared with it."""
    card, idle = made(one_layer.loaded(HostLoader, CARD), "check"), SimpleNamespace(replay=lambda: None)
    card.graphs._captured |= {(1, 0): idle, (1, 1): idle}
    with pytest.raises(RuntimeError, match="captured context of 1 rows differs from the eager one in keys"):
        card.enter([0], [0])
    with pytest.raises(RuntimeError, match="captured block of 1 requests differs from the eager one in cand"):
        card.block([7], [1], [0], [0])
    card.enter([0], [0])  # what stands there now is what an eager run leaves
    # Rows of padding write what they like, where nobody reads.
    spoil = SimpleNamespace(replay=lambda: (card._work((8, 0)), card.values[:, card.slots].fill_(7.0)))
    card.graphs._captured[(8, 0)] = spoil  # type: ignore[assignment]
    card.enter([0] * 7, range(7))


@ON_CPU
def test_launches_of_a_block_and_of_new_context(room: DFlash2Room, one_layer: DFlash2Room) -> None:
    """What a card launches, with its two copies: eleven kernels a layer."""
    block = {}
    for layers, shape in ((1, one_layer), (2, room)):
        card = made(shape.loaded(HostLoader))
        with Launches() as context:
            card.enter([0], [0])
        with Launches() as launches:
            card.block([7], [1], [0], [0])
        block[layers] = launches
        assert context.total == 5, context.names
    assert block[1].total == 19, block[1].names
    layer = block[2].names - block[1].names
    assert layer.total() == 11, layer
    assert layer["w4a16"] == 4 and not any(name.startswith("torch.") for name in layer)
