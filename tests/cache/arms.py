"""Real engines on small checkpoints, asked and answered in one call each."""

from __future__ import annotations

import queue
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from soloist.engine.build import build_engine
from soloist.engine.request import Event, Request
from soloist.sampling.params import SamplingParams
from soloist.settings import resolve

PATIENCE = 1200.0  # seconds: only what hangs may fail by it, on a machine that others use too


@dataclass(frozen=True)
class Answer:
    """`bits` is what must be equal between two arms; `cached` what was reused."""

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    cached: int

    @property
    def bits(self) -> tuple[tuple[int, ...], tuple[float, ...]]:
        return self.tokens, self.logprobs


class Pending:
    """A request on its way."""

    def __init__(self, engine: Any, prompt: Sequence[int], params: SamplingParams, **fields: Any) -> None:
        self.events: queue.Queue[Event] = queue.Queue()
        self.prompt_rows: list[object] = []
        self.request = Request(list(prompt), params, self.events.put, **fields)
        engine.submit(self.request)

    def answer(self, timeout: float = PATIENCE) -> Answer:
        tokens: list[int] = []
        logprobs: list[float] = []
        while True:
            event = self.events.get(timeout=timeout)
            if event.error is not None:
                raise event.error
            tokens += event.tokens
            self.prompt_rows += event.prompt_logprobs or ()
            logprobs += [entry.logprob for entry in event.logprobs or ()]
            if event.finish_reason is not None:
                return Answer(tuple(tokens), tuple(logprobs), self.request.stats.cached_tokens)


class Arm:
    """One engine. `knobs` as in `soloist knobs`, as texts."""

    def __init__(self, model: Path | str, **knobs: str) -> None:
        self.engine = build_engine(resolve({"model": str(model), "threads": "1", **knobs}, {}, {}))

    def __enter__(self) -> Arm:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.engine.close()

    def start(self, prompt: Sequence[int], tokens: int = 12, **fields: Any) -> Pending:
        params = {"temperature": 0.0, "logprobs": 0, **fields.pop("params", {})}
        return Pending(self.engine, prompt, SamplingParams(max_tokens=tokens, **params), **fields)

    def ask(self, prompt: Sequence[int], tokens: int = 12, **fields: Any) -> Answer:
        return self.start(prompt, tokens, **fields).answer()

    def quiet(self, timeout: float = PATIENCE) -> None:
        """Wait until every finished turn is settled and written, then check who owns what."""
        engine = self.engine
        deadline = time.monotonic() + timeout
        while engine._has_work() or engine._settling() or (engine.settler and engine.settler.running()):
            assert time.monotonic() < deadline, "the engine does not come to rest"
            time.sleep(0.005)
        persister = engine.reuse.persister
        if persister is not None:
            assert persister.store.flush(timeout)
            engine.call(persister.poll, timeout)
        engine.call(lambda: engine.memory.check(engine.everyone()), timeout)


def text(length: int, vocab: int, seed: int) -> list[int]:
    """Random ids that repeat themselves now and then, so that lookup has something to find."""
    rng = random.Random(seed)
    out: list[int] = []
    while len(out) < length:
        if len(out) > 40 and rng.random() < 0.3:
            start = rng.randrange(len(out) - 20)
            out += out[start : start + rng.randrange(8, 20)]
        else:
            out += [rng.randrange(vocab) for _ in range(rng.randrange(4, 16))]
    return out[:length]
