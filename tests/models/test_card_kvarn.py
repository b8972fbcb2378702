"""A card's model over KVarN tiles against the reference model: a prompt, rows on both sides of a tile's edge, settling.

Kernels are interpreted; products are torch's, in fp32.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

from soloist.cache.recurrent import RecurrentState, StateShapes
from soloist.cache.tiles import TileStore
from soloist.checkpoint.reader import open_checkpoint
from soloist.models import tiled
from soloist.models.card import CardModel, CardShapes
from soloist.models.card_loader import CardLoader
from soloist.models.layers import Loader
from soloist.models.qwen3_5 import Qwen35
from soloist.models.state import AcceptedPath, Caches
from soloist.models.step import RequestRows, prefill_step, verify_step
from soloist.ops.card_products import CardLinear
from soloist.ops.linear import Weight
from soloist.ops.products import stack_dense
from tiny import build_tiny

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are interpreted here; see tests/gpu")

CPU, SLOT = torch.device("cpu"), 1
PAGES = [6, 7, 0, 1, 10, 11, 2, 3]
PROMPT = 380


class HostProduct(CardLinear):
    """A card's product, computed by torch."""

    def __init__(self, weight: Weight) -> None:
        super().__init__(weight.shape)
        self._weight = weight.dequantize(torch.float32)

    def decode(self, x: torch.Tensor, out: torch.Tensor | None = None, *, squares: object = None) -> torch.Tensor:
        assert squares is None
        y = x @ self._weight.T
        return y if out is None else out.copy_(y)

    prefill = decode

    @classmethod
    def refuses(cls, weight: Weight, device: torch.device, dtype: torch.dtype) -> str | None:
        return None


class HostLoader(CardLoader):
    def linear(self, modules: Sequence[str], pad: int = 1) -> CardLinear:
        return HostProduct(stack_dense([self.source.weight(m) for m in modules], pad))

    def pair(self, modules: Sequence[str]) -> CardLinear:
        return self.linear(modules)


class Side:
    """One of the two models with caches of its own."""

    def __init__(self, model: Qwen35) -> None:
        c = self.config = model.config
        self.model = model
        self.kv = TileStore(
            layers=1, kv_heads=c.num_kv_heads, head_dim=c.head_dim, pages=12, slots=2, dtype=torch.float32
        )  # fmt: skip
        self.caches = Caches(self.kv, RecurrentState(StateShapes.of(c), 2))
        if isinstance(model, CardModel):
            shapes = CardShapes(rows=8, requests=3, pages=len(PAGES), branches=4, splits=40)
            model.prepare(shapes, self.kv, self.caches.state, ())

    def prompt(self, tokens: list[int], cuts: Sequence[int]) -> torch.Tensor:
        hidden, start = [], 0
        for end in cuts:
            step = prefill_step(tokens[start:end], start, SLOT, PAGES)
            hidden.append(self.model.forward(step, self.caches).hidden[: end - start])
            start = end
        return torch.cat(hidden)

    def step(self, tokens: list[int], parents: list[int], settled: int, accepted: list[int]) -> torch.Tensor:
        """Logits of the rows; the accepted ones are settled."""
        step = verify_step([RequestRows(tokens, parents, settled, SLOT, PAGES)], self.config.conv_kernel)
        features = self.model.forward(step, self.caches)
        logits = self.model.logits(features.hidden) if features.logits is None else features.logits.clone()
        assert features.record is not None
        features.record.settle(step, self.caches, [AcceptedPath(0, accepted, PAGES, settled)])
        return logits


def near(a: torch.Tensor, b: torch.Tensor, bound: float) -> None:
    error = (a.double() - b.double()).norm() / b.double().norm()
    assert torch.isfinite(a).all() and error <= bound, f"relative error {error:.2e}"


@pytest.mark.slow
def test_a_card_answers_as_the_reference(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build_tiny(tmp_path, pattern="LF", heads=2, kv_heads=1, mtp=False)
    checkpoint = open_checkpoint(tmp_path)
    reference = Side(Qwen35(Loader(checkpoint, CPU, torch.float32), checkpoint.config))
    card = Side(CardModel(HostLoader(checkpoint, CPU, torch.float32), checkpoint.config))
    tokens = torch.randint(0, 256, (PROMPT + 32,), generator=torch.Generator().manual_seed(1)).tolist()
    expected = reference.prompt(tokens[:PROMPT], [PROMPT])
    with monkeypatch.context() as patch:
        patch.setattr(tiled, "prefill", tiled.prefill_on_card)
        near(card.prompt(tokens[:PROMPT], [192, PROMPT]), expected, 1e-4)

    def same_step(parents: list[int], settled: int, accepted: list[int]) -> torch.Tensor:
        # A code that fell to the other side of a half is not what this test is about.
        reference.kv.planes["k.record"].copy_(card.kv.planes["k.record"])
        rows = tokens[settled : settled + len(parents)]
        got, truth = (side.step(rows, parents, settled, accepted) for side in (card, reference))
        near(got, truth, 1e-4)
        return got

    window = [x.clone() for x in (card.kv.window_k, card.kv.window_v, *card.caches.state.states)]
    conv = card.caches.state.all_conv.clone()
    chain = [i - 1 for i in range(8)]
    together = same_step(chain, PROMPT, [0, 1, 2, 3, 4, 5])
    same_step([-1, 0, 0, 2, 2], PROMPT + 6, [0, 2, 4])  # behind the edge: tile 2 was packed by the step before
    same_step([-1], PROMPT + 9, [0])
    # Once more, token by token.
    for now, then in zip((card.kv.window_k, card.kv.window_v, *card.caches.state.states), window, strict=True):
        now.copy_(then)
    card.caches.state.all_conv.copy_(conv)
    alone = [card.step([tokens[p]], [-1], p, [0]) for p in range(PROMPT, PROMPT + 6)]
    near(torch.cat(alone), together[:6], 1e-5)
