"""A model with caches of its own and no engine: forwards by hand."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from soloist.cache.codecs import DenseCodec
from soloist.cache.kv import KVStore
from soloist.cache.recurrent import RecurrentState, StateShapes
from soloist.checkpoint.reader import open_checkpoint
from soloist.models.layers import Loader
from soloist.models.qwen3_5 import Qwen35
from soloist.models.state import AcceptedPath, Caches, Features
from soloist.models.step import RequestRows, VerifyStep, prefill_step, verify_step

PAGES = 16


class Rig:
    """`slots` requests with PAGES pages each, in a scrambled order, so that a page number is never a position."""

    def __init__(
        self, directory: Path, product: str = "auto", slots: int = 1, state_dtype: torch.dtype = torch.float32
    ) -> None:
        checkpoint = open_checkpoint(directory)
        self.config = checkpoint.config
        self.model = Qwen35(Loader(checkpoint, torch.device("cpu"), torch.float32, product), self.config)
        self.slots, self.state_dtype = slots, state_dtype
        order = torch.randperm(slots * PAGES, generator=torch.Generator().manual_seed(3)).tolist()
        self.pages = [order[i * PAGES : (i + 1) * PAGES] for i in range(slots)]
        self.fresh()

    def fresh(self) -> None:
        """Empty caches."""
        c = self.config
        codec = DenseCodec(torch.float32, "float32")
        kv = KVStore(
            layers=len(c.attention_layers),
            kv_heads=c.num_kv_heads,
            head_dim=c.head_dim,
            pages=self.slots * PAGES,
            codec_k=codec,
            codec_v=codec,
            dtype=torch.float32,
        )
        self.caches = Caches(kv, RecurrentState(StateShapes.of(c), self.slots, self.state_dtype))

    def prefill(self, ids: Sequence[int], start: int = 0, slot: int = 0) -> torch.Tensor:
        """Logits [len(ids), V] of prompt rows from grid point `start`."""
        step = prefill_step(ids, start, slot, self.pages[slot])
        return self.model.logits(self.model.forward(step, self.caches).hidden)[: len(ids)]

    def rows(self, tokens: Sequence[int], settled: int, parents: Sequence[int] | None = None, slot: int = 0):
        return RequestRows(tokens, parents or range(-1, len(tokens) - 1), settled, slot, self.pages[slot])

    def verify(self, *batch: RequestRows) -> tuple[VerifyStep, Features, torch.Tensor]:
        step = verify_step(batch, self.config.conv_kernel)
        features = self.model.forward(step, self.caches)
        return step, features, self.model.logits(features.hidden)

    def settle(self, step: VerifyStep, features: Features, settled: int, rows: Sequence[int], slot: int = 0) -> None:
        """Keep `rows` of a one-request step."""
        assert features.record is not None
        features.record.settle(step, self.caches, [AcceptedPath(0, rows, self.pages[slot], settled)])

    def decode(self, token: int, position: int, slot: int = 0) -> torch.Tensor:
        """Logits [1, V] of one settled token."""
        step, features, logits = self.verify(self.rows([token], position, slot=slot))
        self.settle(step, features, position, [0], slot)
        return logits
