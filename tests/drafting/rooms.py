"""Drafters over random tiny checkpoints, and texts with random features to feed them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from oracle.dflash2 import Dflash2Oracle
from oracle.mtp import MtpOracle
from soloist.cache.codecs import DenseCodec
from soloist.cache.kv import KVStore
from soloist.checkpoint.reader import open_checkpoint
from soloist.drafting.dflash2 import DFlash2Drafter
from soloist.drafting.drafter import Ask, SettledTokens
from soloist.drafting.mtp import MTPDrafter
from soloist.models.dflash2 import DFlash2
from soloist.models.layers import Loader
from soloist.models.mtp import MTPModule, truncated_head
from soloist.sampling.params import SamplingParams
from tiny import build_tiny, build_tiny_drafter

GREEDY = SamplingParams(temperature=0.0)
CPU = torch.device("cpu")
# Where a card's drafters run: on a card, or interpreted.
CARD = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@dataclass
class Text:
    """One request's committed text with random features for every token."""

    slot: int
    tokens: list[int]
    hidden: torch.Tensor
    taps: torch.Tensor
    pages: list[int]

    @classmethod
    def random(cls, seed: int, slot: int, length: int, hidden: int, taps: int, vocab: int) -> Text:
        g = torch.Generator().manual_seed(seed)
        tokens = torch.randint(0, vocab, (length,), generator=g).tolist()
        pages = [slot * 8 + i for i in range(8)]
        return cls(
            slot, tokens, torch.randn(length, hidden, generator=g), torch.randn(length, taps, generator=g), pages
        )

    def on_card(self) -> Text:
        """The same text with its features where a card's drafter reads them."""
        return replace(self, hidden=self.hidden.to(CARD), taps=self.taps.to(CARD))

    def part(self, start: int, stop: int) -> SettledTokens:
        """Tokens start .. stop - 1 as settled; the token at `stop` is known."""
        return SettledTokens(
            self.slot,
            start,
            self.tokens[start : stop + 1],
            self.hidden[start:stop],
            self.taps[start:stop],
            self.pages,
        )

    def ask(self, position: int, count: int, **changes) -> Ask:
        ask = Ask(self.slot, self.tokens[position], position, self.pages, GREEDY, 0, "greedy", count)
        return replace(ask, **changes)


class MTPRoom:
    """The MTP drafter of a tiny checkpoint, and its oracle."""

    def __init__(self, directory: Path, draft_ids: torch.Tensor | None = None) -> None:
        self.target = build_tiny(directory / "target", pattern="LF")
        self.config, self.draft_ids = open_checkpoint(self.target).config, draft_ids
        self.module = self.loaded(Loader)

    def loaded(self, kind: type[Loader], device: torch.device = CPU) -> MTPModule:
        """The module with the products that `kind` loads."""
        checkpoint, ids = open_checkpoint(self.target), self.draft_ids
        load = kind(checkpoint, device, torch.float32)
        head = load.linear(["lm_head"]) if ids is None else truncated_head(load, ids, stored=False)
        embedding = checkpoint.weight("embed_tokens").to(device)
        return MTPModule(load, self.config, embedding, head, None if ids is None else ids.to(device))

    @cached_property
    def oracle(self) -> MtpOracle:
        return MtpOracle(self.target)

    def drafter(self, depth: int = 4, beam: int = 2) -> MTPDrafter:
        return MTPDrafter(self.module, self.kv(CPU), depth, beam)

    def kv(self, device: torch.device) -> KVStore:
        codec = DenseCodec(torch.float32, "float32")
        kv = KVStore(
            layers=1,
            kv_heads=self.config.num_kv_heads,
            head_dim=self.config.head_dim,
            pages=32,
            codec_k=codec,
            codec_v=codec,
            dtype=torch.float32,
            device=device,
        )
        for plane in kv.planes.values():
            plane.fill_(50.0)  # what was never written must not be read
        return kv

    def text(self, seed: int, slot: int = 0, length: int = 160) -> Text:
        return Text.random(seed, slot, length, self.config.hidden_size, 1, 256)

    def expect(self, text: Text, position: int, count: int) -> list[int]:
        """Drafts computed from scratch on the committed text."""
        return self.oracle.draft(text.hidden[:position], text.tokens[1 : position + 1], count)


class DFlash2Room:
    """The DFlash2 drafter of a tiny checkpoint (window 64 unless `shape` says otherwise), and its oracle."""

    def __init__(self, directory: Path, **shape: Any) -> None:
        self.target = build_tiny(directory / "target", pattern="LFLF", mtp=False)
        self.where = build_tiny_drafter(directory / "drafter", self.target, **shape)
        self.config = open_checkpoint(self.where, "drafter").drafter_config
        self.model = self.loaded(Loader)

    def loaded(self, kind: type[Loader], device: torch.device = CPU) -> DFlash2:
        """The drafter with the products that `kind` loads."""
        own, target = open_checkpoint(self.where, "drafter"), open_checkpoint(self.target)
        head = kind(target, device, torch.float32).linear(["lm_head"])
        embedding = target.weight("embed_tokens").to(device)
        return DFlash2(kind(own, device, torch.float32), self.config, embedding, head)

    @cached_property
    def oracle(self) -> Dflash2Oracle:
        return Dflash2Oracle(self.where, self.target)

    def drafter(self, slots: int = 4) -> DFlash2Drafter:
        drafter = DFlash2Drafter(self.model, slots)
        drafter.keys.fill_(50.0)
        drafter.values.fill_(50.0)
        return drafter

    def text(self, seed: int, slot: int = 0, length: int = 160) -> Text:
        width = len(self.config.tap_layers) * self.config.hidden_size
        return Text.random(seed, slot, length, 1, width, 256)

    def expect(self, text: Text, position: int, count: int) -> list[int]:
        return self.oracle.draft(text.taps[:position], text.tokens[position]).drafts[:count]
