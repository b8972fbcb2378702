"""A start played on a card that is not there, so that every kernel the real one asks for is compiled side by side.

`python -m soloist.engine.rehearsal` is the process that `compile_ahead.py` runs beside the loading of weights: it reads
an `Order` from its standard input, opens the model directory's headers, builds the engine with the start's own code
over as many layers as there are kinds of, answers a few requests, compiles what was asked for, and writes one JSON
object. The card is not touched.
"""

from __future__ import annotations

import json
import pickle
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, replace
from itertools import pairwise
from pathlib import Path
from unittest import mock

import torch

from soloist.checkpoint.config import DrafterConfig, ModelConfig
from soloist.checkpoint.reader import Checkpoint, Kind, open_checkpoint
from soloist.checkpoint.shards import TensorInfo
from soloist.engine import build
from soloist.engine.compile_ahead import Order
from soloist.engine.memory import Memory
from soloist.engine.request import Event, Phase, Request
from soloist.engine.runner import Runner
from soloist.engine.scheduler import GRID, IDLE_SLICE_TOKENS, PrefillSlice
from soloist.engine.speculation import Speculation
from soloist.models.qwen3_5 import Qwen35
from soloist.ops.rehearsal import META, Card, Wanted, compile_all, end_with, rehearsing
from soloist.sampling.history import History
from soloist.sampling.params import SamplingParams
from soloist.sampling.verify import Mode
from soloist.settings import Settings

SMALL = 1 << 20  # bytes up to which a tensor is really read: id lists and shapes decide what is loaded
STEPS = 4  # of every company of requests


def kinds_of_layers(checkpoint: Checkpoint) -> int:
    """How many first layers hold every kind and every pair of neighbours: what follows decides how a layer ends."""

    def form(i: int) -> tuple[object, ...]:
        prefix = f"layers.{i}."
        stored = (m for n, m in checkpoint.modules.items() if n.startswith(prefix))
        forms = [(m.name.removeprefix(prefix), m.form, m.bits, m.group, m.symmetric) for m in stored]
        return (checkpoint.config.layer_types[i], *sorted(forms))

    forms = [form(i) for i in range(checkpoint.config.num_layers)]
    pairs = list(pairwise(forms))
    return max((pairs.index(pair) + 2 for pair in set(pairs)), default=1)


def _shortened(checkpoint: Checkpoint, layers: int) -> Checkpoint:
    """The same directory with its first `layers` layers only; a drafter taps those."""
    if checkpoint.kind == "drafter":
        drafter = checkpoint.drafter_config
        config: DrafterConfig | ModelConfig = replace(drafter, tap_layers=tuple(range(len(drafter.tap_layers))))
    else:
        config = replace(checkpoint.config, num_layers=layers, layer_types=checkpoint.config.layer_types[:layers])
    return Checkpoint(
        checkpoint.directory, checkpoint.kind, config, checkpoint.tensors, checkpoint.modules, checkpoint.layout,
        checkpoint.notes, checkpoint.visual,
    )  # fmt: skip


@contextmanager
def _headers_only(layers: int) -> Iterator[None]:
    """Inside, weights have shapes and no bytes, and drafters tap the layers there are."""
    view = TensorInfo.view

    def shape(info: TensorInfo) -> torch.Tensor:
        return view(info) if info.nbytes <= SMALL else torch.empty(info.shape, dtype=info.dtype, device=META)

    def opened(directory: Path, kind: Kind = "target") -> Checkpoint:
        return _shortened(open_checkpoint(directory, kind), layers)

    with (
        mock.patch.object(TensorInfo, "view", shape),
        mock.patch("soloist.engine.build.side_by_side", lambda device: nullcontext()),
        mock.patch("soloist.engine.drafters.open_checkpoint", opened),
        mock.patch("soloist.engine.capacity.open_checkpoint", opened),
    ):
        yield


def rehearse(settings: Settings, card: Card) -> Wanted:
    """The kernels that an engine of these settings asks this card for."""
    checkpoint = open_checkpoint(build.model_directory(settings.model))
    taps = len(build.tap_layers(settings, checkpoint))
    layers = min(max(kinds_of_layers(checkpoint), taps), checkpoint.config.num_layers)
    with rehearsing(card) as wanted, _headers_only(layers):
        device = torch.device("cuda", 0)
        dtype = build.compute_dtype(settings, device)
        short = _shortened(checkpoint, layers)
        chosen = build.choices(settings, short, str(dtype).removeprefix("torch."), device)
        model, _ = build.load_on_card(settings, short, device, dtype, check=lambda key, run: run())
        memory, speculation, max_len = build.equip(settings, short, model, dtype, chosen)
        _answer(settings, model, memory, speculation, max_len)
    return wanted


def _answer(settings: Settings, model: Qwen35, memory: Memory, speculation: Speculation, max_len: int) -> None:
    """Prompts and steps of one request, of two and of all slots, in every way a request may sample."""

    def fault(request: Request, error: Exception) -> None:
        raise error

    def ended(request: Request, event: Event) -> None:
        request.phase = Phase.DONE

    runner = Runner(model, memory, speculation, max_len, settings.verify_rows, lambda r: None, ended, fault)
    sampled = {"temperature": 0.7, "top_k": 20, "top_p": 0.9}
    ways: list[tuple[Mode, SamplingParams]] = [
        ("greedy", SamplingParams(temperature=0.0, max_tokens=64)),
        ("coupled", SamplingParams(**sampled, seed=1, max_tokens=64)),  # type: ignore[arg-type]
        ("rejection", SamplingParams(**sampled, max_tokens=64)),  # type: ignore[arg-type]
        ("greedy", SamplingParams(temperature=0.0, max_tokens=64, logprobs=5, prompt_logprobs=1)),
    ]
    longest = min(IDLE_SLICE_TOKENS + GRID + 1, max_len // 2, memory.pages.total * GRID // 2)
    _company(runner, [_request(*ways[0], longest, model)])
    for company in sorted({1, min(2, settings.max_seqs), settings.max_seqs}):
        for mode, params in ways:
            _company(runner, [_request(mode, params, 5, model) for _ in range(company)])


def _request(mode: Mode, params: SamplingParams, length: int, model: Qwen35) -> Request:
    prompt = [i % model.config.vocab_size for i in range(length)]
    request = Request(prompt, params, lambda event: None)
    request.seed, request.mode = 1, mode
    request.history = History(params, request.prompt, model.config.vocab_size)
    return request


def _company(runner: Runner, requests: list[Request]) -> None:
    from soloist.cache.prefix import Match

    memory = runner.memory
    for request in requests:
        assert memory.admit(request, Match())
        memory.state.reset(request.slot)
        while not runner.prefill(PrefillSlice(request, min(IDLE_SLICE_TOKENS, len(request.prompt) - request.settled))):
            pass
        request.phase = Phase.DECODE
    for _ in range(STEPS):
        going = [r for r in requests if r.phase is Phase.DECODE]
        if going and all(memory.grow(r, r.length + 1) for r in going):
            runner.decode(going)
    for request in requests:
        runner.speculation.drop(request)
        memory.release(request)


def main() -> int:
    """Read an order, rehearse, compile, say what came of it."""
    order: Order = pickle.load(sys.stdin.buffer)
    end_with(order.parent)
    began = time.perf_counter()
    wanted = rehearse(order.settings, order.card)
    rehearsed = time.perf_counter()
    outcomes = compile_all(list(wanted.jobs.values()), order.workers, order.kernels)
    said = {
        "rehearsed_s": round(rehearsed - began, 2),
        "compiled_s": round(time.perf_counter() - rehearsed, 2),
        "kernels": [asdict(outcome) for outcome in outcomes],
    }
    print(json.dumps(said), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
