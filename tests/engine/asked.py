"""Prints, one a line, the Triton variants that real steps on host tensors ask for and a rehearsal does not.

    python tests/engine/asked.py DIRECTORY ARCH [knob=value ...]

A process of its own: nothing is compiled or interpreted here, launches are only taken down. The model and its
drafter are put together by hand over tensors with bytes, and requests come in other numbers and lengths than the
rehearsal's. The last line counts both sides.
"""

from __future__ import annotations

import random
import sys
from contextlib import ExitStack
from pathlib import Path
from unittest import mock

import torch
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from soloist.cache.codecs import DenseCodec
from soloist.cache.kv import KVStore
from soloist.cache.pages import PAGE, PageAllocator
from soloist.cache.prefix import Match
from soloist.cache.recurrent import RecurrentState, StateShapes
from soloist.cache.tiles import make_store
from soloist.checkpoint.reader import Checkpoint, open_checkpoint
from soloist.drafting.block_length import SaturatedConfig, SaturatedRule
from soloist.drafting.card_dflash2 import CardDFlash2Drafter
from soloist.drafting.card_mtp import CardMTPDrafter
from soloist.drafting.drafter import Drafter
from soloist.engine.build import card_shapes
from soloist.engine.capacity import choices
from soloist.engine.drafters import tap_layers
from soloist.engine.memory import Memory
from soloist.engine.rehearsal import rehearse
from soloist.engine.request import Phase, Request
from soloist.engine.runner import Runner
from soloist.engine.scheduler import PrefillSlice
from soloist.engine.speculator import SpeculationConfig, Speculator
from soloist.models.card import CardModel
from soloist.models.card_loader import CardLoader
from soloist.models.card_mtp import CardMTP
from soloist.models.dflash2 import DFlash2
from soloist.models.mtp import MTPModule
from soloist.ops.aot import SHARED_LIMIT, Target
from soloist.ops.card_products import DenseLinear
from soloist.ops.products import stack_dense
from soloist.ops.rehearsal import Card, Wanted
from soloist.sampling.history import History
from soloist.sampling.params import SamplingParams
from soloist.settings import Settings, resolve

HOST, DTYPE = torch.device("cpu"), torch.bfloat16
PAGES = 40


class HostLoader(CardLoader):
    """The card's 16-bit products, on the host."""

    def __init__(self, source, device, dtype) -> None:
        super().__init__(source, device, dtype)
        self.make = DenseLinear

    def linear(self, modules, pad: int = 1) -> DenseLinear:
        return DenseLinear(stack_dense([self.source.weight(m) for m in modules], pad), HOST, DTYPE)

    pair = linear


def built(settings: Settings, checkpoint: Checkpoint) -> tuple[CardModel, Memory, Speculator]:
    c = checkpoint.config
    chosen = choices(settings, checkpoint, "bfloat16", HOST)
    model = CardModel(HostLoader(checkpoint, HOST, DTYPE), c)
    kv = make_store(
        chosen.kv_format, chosen.kv_format_v, layers=len(c.attention_layers), kv_heads=c.num_kv_heads,
        head_dim=c.head_dim, pages=PAGES, slots=settings.max_seqs, dtype=DTYPE, device=HOST,
    )  # fmt: skip
    state = RecurrentState(StateShapes.of(c), settings.max_seqs, torch.float32, DTYPE, HOST)
    memory = Memory(kv, state, PageAllocator(PAGES, kv.tile // PAGE), reserve=64)
    shapes = card_shapes(settings.max_seqs, settings.verify_rows, PAGES - 1, PAGES)
    model.prepare(shapes, kv, state, tap_layers(settings, checkpoint))
    rule = SaturatedConfig(settings.draft_tokens, settings.verify_rows - 1, True, 3, 0)
    config = SpeculationConfig(None, settings.tree, settings.draft_tokens, 15, True, lambda: SaturatedRule(rule))
    return model, memory, Speculator(drafter(settings, checkpoint, model, shapes.pages), config)


def drafter(settings: Settings, checkpoint: Checkpoint, model: CardModel, pages: int) -> Drafter:
    c = checkpoint.config
    if settings.spec == "dflash2":
        source = open_checkpoint(checkpoint.directory / "dflash2", "drafter")
        block = DFlash2(HostLoader(source, HOST, DTYPE), source.drafter_config, model.embedding, model.head)
        return CardDFlash2Drafter(block, settings.max_seqs, "off")
    module = MTPModule(HostLoader(checkpoint, HOST, DTYPE), c, model.embedding, model.head)
    drafts = KVStore(
        layers=1, kv_heads=c.num_kv_heads, head_dim=c.head_dim, pages=PAGES, codec_k=DenseCodec(DTYPE, "bfloat16"),
        codec_v=DenseCodec(DTYPE, "bfloat16"), dtype=DTYPE, device=HOST,
    )  # fmt: skip
    card = CardMTP(module, drafts, settings.draft_tokens, settings.max_seqs, pages, model._partials, "off")
    return CardMTPDrafter(card, drafts)


def play(settings: Settings, checkpoint: Checkpoint) -> None:
    """Companies of one to all slots, prompts of any length, in slices of any multiple of the grid."""
    model, memory, speculation = built(settings, checkpoint)

    def fault(request: Request, error: Exception) -> None:
        raise error

    run = Runner(model, memory, speculation, 1024, settings.verify_rows, lambda r: None, lambda r, e: None, fault)
    rng = random.Random(0)
    for company in range(1, settings.max_seqs + 1):
        requests = []
        for i in range(company):
            sampled = rng.random() < 0.5
            params = SamplingParams(temperature=0.8 * sampled, top_k=40 * sampled, max_tokens=99, seed=i)
            request = Request([rng.randrange(99) for _ in range(rng.randrange(1, 400))], params, lambda e: None)
            request.mode = "coupled" if sampled else "greedy"
            request.history = History(params, request.prompt, model.config.vocab_size)
            assert memory.admit(request, Match())
            memory.state.reset(request.slot)
            while not run.prefill(PrefillSlice(request, 64 * rng.randrange(1, 5))):
                pass
            request.phase = Phase.DECODE
            requests.append(request)
        for _ in range(3):
            assert all(memory.grow(r, r.length + 1) for r in requests)
            run.decode(requests)
        for request in requests:
            speculation.drop(request)
            memory.release(request)


def main(directory: str, arch: int, *knobs: str) -> None:
    given = {"model": directory, "device": "cuda", "spec": "mtp"} | dict(k.split("=") for k in knobs)
    settings, checkpoint = resolve(given, {}, {}), open_checkpoint(Path(directory))
    rehearsed = rehearse(settings, Card("a card", arch, 82, SHARED_LIMIT[arch], 24 << 30))
    real = Wanted()
    with ExitStack() as stack:
        driver.set_active(Target(arch))
        stack.enter_context(mock.patch.object(JITFunction, "_do_compile", lambda f, *told: real.triton(f, *told)))
        # A host tensor takes the card's road; the interpreter's and the compiler's pointers are alike.
        stack.enter_context(mock.patch.object(torch.Tensor, "is_cuda", property(lambda x: True), create=True))
        stack.enter_context(mock.patch("soloist.ops.triton.pdl.dependent", lambda x: arch >= 90))
        stack.enter_context(mock.patch("soloist.ops.triton.pdl.shared_memory", lambda x: SHARED_LIMIT[arch]))
        stack.enter_context(mock.patch("soloist.ops.triton.pdl.warp_groups", lambda x: arch // 10 == 9))
        stack.enter_context(mock.patch("soloist.ops.triton.pdl.multiprocessors", lambda x: 82))
        # Kernels leave what they find, and NaN would end a request.
        stack.enter_context(mock.patch("torch.empty", torch.zeros))
        stack.enter_context(mock.patch("torch.empty_like", torch.zeros_like))
        stack.enter_context(mock.patch.object(CardModel, "_choose_recurrence", lambda self: mock.MagicMock()))
        stack.enter_context(torch.inference_mode())
        play(settings, checkpoint)
    for key in real.jobs:
        if key not in rehearsed.jobs:
            print(*key)
    print(f"asked {len(real.jobs)}, rehearsed {len(rehearsed.jobs)}")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), *sys.argv[3:])
