"""`python -m soloist.bench.loop`: whole decode steps of the engine at a named shape, random weights, chosen acceptance.

The engine's own runner, speculation and drafters over a synthetic model: draft, verify, accept, settle, absorb, with
the host's work between them. What a random model would accept is nothing, so acceptance is chosen: verification does
its work on every row of the path and then takes the drafted token. Each arm is timed twice, as it is and by the
reference's road (drafts launched one operation at a time, acceptance read off the card row by row). Last line: one
JSON document.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from soloist.bench.device_clock import median_seconds
from soloist.bench.machine import machine, versions
from soloist.bench.synthetic import (
    DRAFT_ROWS,
    SHAPES,
    SyntheticDFlash2,
    SyntheticMTP,
    SyntheticSource,
    dflash2_27b,
)
from soloist.cache.codecs import token_codec
from soloist.cache.kv import KVStore
from soloist.cache.pages import PAGE, PageAllocator
from soloist.cache.recurrent import RecurrentState, StateShapes
from soloist.drafting.block_length import SaturatedConfig, SaturatedRule
from soloist.drafting.dflash2 import DFlash2Drafter
from soloist.drafting.drafter import Drafter
from soloist.drafting.mtp import MTPDrafter
from soloist.drafting.proposal import Proposal
from soloist.engine import runner as runner_module
from soloist.engine.build import card_shapes
from soloist.engine.drafters import card_dflash2, card_mtp
from soloist.engine.graphs import GraphedModel
from soloist.engine.memory import Memory
from soloist.engine.request import Phase, Request
from soloist.engine.runner import Runner
from soloist.engine.speculator import SpeculationConfig, Speculator
from soloist.models.card_loader import CardLoader
from soloist.models.dflash2 import DFlash2
from soloist.models.mtp import MTPModule, truncated_head
from soloist.ops.top import Heads
from soloist.sampling.history import History
from soloist.sampling.params import SamplingParams
from soloist.sampling.processors import greedy_token, target_law
from soloist.sampling.rng import Noise, Stream
from soloist.sampling.rows import LogitRows
from soloist.sampling.verify import Mode, Verdict

CARD = torch.device("cuda")


@dataclass(frozen=True)
class Arm:
    """`accepted` drafts are taken per step. `sampler`: greedy, coupled or rejection (temperature 1, top-k 20)."""

    spec: str
    tree: bool
    sampler: Mode
    accepted: int
    requests: int = 1
    context: int = 1024


def forced(accepted: int) -> Callable[..., Verdict]:
    """`verify` that looks at every row of a path of `accepted` first children as verification would, and takes it."""

    def verify(
        rows: torch.Tensor,
        proposal: Proposal,
        history: History,
        seed: int,
        mode: Mode,
        limit: int | None = None,
        heads: Heads | None = None,
    ) -> Verdict:
        logits, children, verdict = LogitRows(rows, heads), proposal.children(), Verdict()
        row = 0
        while True:
            if mode == "greedy":
                token = greedy_token(logits, row, history)
            else:
                token = target_law(logits, row, history).sample(Noise.at(seed, Stream.TARGET, history.position))
            node = children[row][0] if children[row] and len(verdict.tokens) < accepted else -1
            verdict.tokens.append(proposal.tokens[node] if node >= 0 else token)
            verdict.rows.append(row)
            verdict.nodes.append(node)
            verdict.sources.append(proposal.sources[node] if node >= 0 else "target")
            if node < 0:
                return verdict
            row = node + 1

    return verify


class Loop:
    """A synthetic model on the card with both drafters, and running requests made up for an arm."""

    def __init__(self, shape: str, layers: int, most: int, context: int, vocab_rows: int = DRAFT_ROWS) -> None:
        self.config = SHAPES[shape](layers)
        c = self.config
        self.drafter_config = dflash2_27b(c)
        self.pages = -(-(context + 2048) // PAGE)
        pool = most * self.pages
        self.model = GraphedModel(CardLoader(SyntheticSource(c, CARD), CARD, torch.bfloat16), c)
        codec = token_codec("bf16")

        def store(layers: int) -> KVStore:
            kv = KVStore(
                layers=layers,
                kv_heads=c.num_kv_heads,
                head_dim=c.head_dim,
                pages=pool,
                codec_k=codec,
                codec_v=codec,
                dtype=torch.bfloat16,
                device=CARD,
            )
            for plane in kv.planes.values():
                plane.normal_()
            return kv

        state = RecurrentState(StateShapes.of(c), most, torch.float16, torch.bfloat16, CARD)
        state.all_states.normal_(std=0.1)
        self.memory = Memory(store(len(c.attention_layers)), state, PageAllocator(pool, 1), reserve=PAGE)
        shapes = card_shapes(most, 16, self.pages, pool)
        self.model.prepare(shapes, self.memory.kv, state, self.drafter_config.tap_layers)
        self.model.capture()
        load = CardLoader(SyntheticMTP(c, CARD), CARD, torch.bfloat16)
        ids = torch.randperm(c.vocab_size, device=CARD)[:DRAFT_ROWS].sort().values
        head = truncated_head(load, ids, stored=True)
        self.mtp = MTPModule(load, c, self.model.embedding, head, ids), store(1)
        source = SyntheticDFlash2(self.drafter_config, CARD)
        loaded = CardLoader(source, CARD, torch.bfloat16)
        self.dflash2 = DFlash2(loaded, self.drafter_config, self.model.embedding, head, ids)
        self._drafters: dict[tuple[str, bool], Drafter] = {}

    def drafter(self, spec: str, reference: bool, tree: bool) -> Drafter:
        key = (spec, reference)
        if key not in self._drafters:
            slots = self.memory.state.slots
            if spec == "mtp":
                module, kv = self.mtp
                made: Drafter = MTPDrafter(module, kv, 4) if reference else card_mtp(module, kv, 4, self.model, slots)
            else:
                made = DFlash2Drafter(self.dflash2, slots) if reference else card_dflash2(self.dflash2, slots)
            self._drafters[key] = made
        return self._drafters[key]

    def runner(self, arm: Arm, reference: bool) -> tuple[Runner, list[Request]]:
        """The engine's runner with requests at the arm's context, each with an anchor and a drafter that knows it."""
        drafter = self.drafter(arm.spec, reference, arm.tree)
        block = min(drafter.depth, 15)
        long = 15 if arm.tree else block
        saturated = SaturatedConfig(long if arm.tree else block, long, False, 0, 0)
        config = SpeculationConfig(None, arm.tree, block, long, True, lambda: SaturatedRule(saturated))
        speculation = Speculator(drafter, config)
        greedy = arm.sampler == "greedy"
        params = SamplingParams(max_tokens=2000, temperature=0.0 if greedy else 1.0, top_k=0 if greedy else 20)

        def fault(request: Request, error: Exception) -> None:
            raise error

        run = Runner(
            self.model,
            self.memory,
            speculation,
            arm.context + 2048,
            16,
            computed=lambda request: None,
            finish=lambda request, event: None,
            fault=fault,
        )
        rng = np.random.default_rng(0)
        requests = []
        for i in range(arm.requests):
            ids = rng.integers(0, 1000, arm.context + 1).tolist()
            request = Request(ids[:-1], params, lambda event: None)
            request.slot, request.settled = self.memory.take_slot(), arm.context
            assert self.memory.grow(request, arm.context + 1)
            request.history = History(params, request.prompt, self.config.vocab_size)
            request.mode, request.seed, request.phase = arm.sampler, 7 + i, Phase.DECODE
            request.history.advance(ids[-1])
            request.output.append(ids[-1])
            speculation.load(request, arm.context, self._known(arm))
            requests.append(request)
        return run, requests

    def _known(self, arm: Arm) -> dict[str, torch.Tensor]:
        d = self.drafter_config
        window = (d.num_layers, d.num_kv_heads, min(d.window, arm.context), d.head_dim)

        def random(*shape: int) -> torch.Tensor:
            return torch.randn(shape, device=CARD, dtype=torch.bfloat16)

        if arm.spec == "mtp":
            return {"mtp.hidden": random(self.config.hidden_size)}
        return {"dflash2.keys": random(*window), "dflash2.values": random(*window)}

    def measure(self, arm: Arm, reference: bool, steps: int = 40) -> dict[str, Any]:
        """Milliseconds of a step and of its phases, host clock, medians over `steps`."""
        run, requests = self.runner(arm, reference)
        verify, runner_module.verify = runner_module.verify, forced(arm.accepted)
        forward, settling = self.model.forward, self.model._settling
        if reference:
            self.model._settling = None

            def bare(*args: Any) -> Any:
                features = forward(*args)
                features.heads = features.gather = None
                return features

            self.model.forward = bare  # type: ignore[method-assign, assignment]
        try:
            for _ in range(5):
                run.decode(requests)
            torch.cuda.synchronize()
            plain = self._plain(run, requests, steps)
            phases = self._phases(run, requests, steps)
            copies, kernels = self._traffic(run, requests)
            draft = self._draft_alone(run, requests)
        finally:
            runner_module.verify = verify
            self.model._settling = settling
            self.model.__dict__.pop("forward", None)
        rows = phases.pop("rows")
        bucket = self.model.bucket(int(rows))
        alone = {"verify": median_seconds(lambda: self.model.launch(bucket), 15) * 1e3}
        if settling is not None:
            alone["settle"] = median_seconds(settling.replay, 15) * 1e3
        for request in requests:
            run.speculation.drop(request)
            self.memory.release(request)
        return {
            **vars(arm),
            "reference": reference,
            "rows": rows,
            "step_ms": plain,
            "host_ms": {name: round(value, 3) for name, value in phases.items()},
            "device_ms": {name: round(value, 3) for name, value in alone.items()},
            "draft_ms": draft,
            "draft_share": round(draft / plain, 3),
            "beyond_verify_ms": round(plain - alone["verify"], 3),
            "copies_to_host": copies,
            "kernels_and_copies": kernels,
        }

    @staticmethod
    def _plain(run: Runner, requests: Sequence[Request], steps: int) -> float:
        times = []
        for _ in range(steps):
            began = time.perf_counter()
            run.decode(requests)
            times.append(time.perf_counter() - began)
        torch.cuda.synchronize()
        return round(float(np.median(times)) * 1e3, 3)

    @staticmethod
    def _phases(run: Runner, requests: Sequence[Request], steps: int) -> dict[str, float]:
        """Host time of draft (waits for settle, absorb and the drafts), launch, wait for the step, accept, commit."""
        found: dict[str, list[float]] = {n: [] for n in ("draft", "launch", "wait", "accept", "commit", "rows")}
        for _ in range(steps):
            marks = [time.perf_counter()]
            proposals = run._draft(requests)
            marks.append(time.perf_counter())
            step, features, logits = run._verify(requests, proposals)
            marks.append(time.perf_counter())
            heads = features.heads() if features.heads is not None else None
            if heads is None:
                torch.cuda.synchronize()
            marks.append(time.perf_counter())
            verdicts = run._accept(requests, proposals, step, logits, heads)
            marks.append(time.perf_counter())
            run._commit(requests, step, features, verdicts)
            marks.append(time.perf_counter())
            for name, a, b in zip(found, marks, marks[1:], strict=False):
                found[name].append((b - a) * 1e3)
            found["rows"].append(step.rows)
        return {name: float(np.median(values)) for name, values in found.items()}

    @staticmethod
    def _draft_alone(run: Runner, requests: Sequence[Request], repeats: int = 15) -> float:
        """Median ms of `propose` with the backlog of a step, nothing else on the card."""
        times = []
        for _ in range(repeats):
            run.decode(requests)
            torch.cuda.synchronize()
            began = time.perf_counter()
            run._draft(requests)
            times.append(time.perf_counter() - began)
        return round(float(np.median(times)) * 1e3, 3)

    @staticmethod
    def _traffic(run: Runner, requests: Sequence[Request]) -> tuple[int, int]:
        """(copies to the host, everything the card ran) in one step."""
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            run.decode(requests)
            torch.cuda.synchronize()
        events = [e for e in profile.events() if e.device_type == torch.profiler.DeviceType.CUDA]
        return sum("DtoH" in e.name for e in events), len(events)


ARMS = (
    Arm("mtp", False, "greedy", 2),
    Arm("mtp", False, "coupled", 2),
    Arm("mtp", True, "greedy", 3),
    Arm("mtp", True, "rejection", 3),
    Arm("mtp", False, "greedy", 2, context=25600),
    Arm("mtp", False, "greedy", 2, requests=8),
    Arm("dflash2", False, "greedy", 3),
    Arm("dflash2", True, "greedy", 4),
    Arm("dflash2", True, "rejection", 4),
    Arm("dflash2", False, "greedy", 3, requests=8),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--synthetic", default="qwen3.8-27b", choices=sorted(SHAPES))
    parser.add_argument("--layers", type=int, default=64)
    parser.add_argument("--arms", default="", help="numbers of the arms to run, separated by commas; default all")
    parser.add_argument("--roads", default="card,reference", help="card, reference or both")
    args = parser.parse_args()
    torch.manual_seed(0)
    arms = [ARMS[int(i)] for i in args.arms.split(",")] if args.arms else list(ARMS)
    loop = Loop(args.synthetic, args.layers, max(a.requests for a in arms), max(a.context for a in arms))
    results = []
    for arm in arms:
        for road in args.roads.split(","):
            result = loop.measure(arm, road == "reference")
            results.append(result)
            print(road, {k: v for k, v in result.items() if k != "reference"}, flush=True)
    document = {
        "command": "python -m soloist.bench.loop",
        "shape": args.synthetic,
        "layers": args.layers,
        "card": torch.cuda.get_device_name(),
        "machine": machine(),
        "versions": versions(),
        "results": results,
    }
    print(json.dumps(document))


if __name__ == "__main__":
    main()
