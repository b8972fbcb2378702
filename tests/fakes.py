"""A scripted engine: the server's rules tested for any number of tokens a step, without a model.

`FakeEngine` implements `server.face.EngineFace` on a thread of its own. It honours what the server can observe:
max_tokens, stop ids, the halt, grammars that reject, cancellation, queue limits, context length.
"""

from __future__ import annotations

import random
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch

from soloist.engine.request import Event, Phase, Request, RequestStats, TokenLogprobs
from soloist.engine.status import EngineStatus
from soloist.errors import ContextLengthError, EngineDeadError, OverloadedError

Script = Callable[[Request], Iterable[int]]


@dataclass
class _Running:
    request: Request
    tokens: Iterable[int]
    last: float = 0.0


class FakeEngine:
    """Emits `script(request)` in blocks of `block` tokens (or a size drawn from a range), one block a step.

    delay_s      time of a step; prefill_s: time before a request's first step (cancellable)
    max_running  requests beyond it wait; max_waiting: more are refused with OverloadedError
    """

    def __init__(
        self,
        script: Script,
        *,
        vocab_size: int = 16384,
        eos_ids: tuple[int, ...] = (16362, 16360),
        max_len: int = 4096,
        block: int | tuple[int, int] = 1,
        delay_s: float = 0.0,
        prefill_s: float = 0.0,
        max_running: int = 8,
        max_waiting: int = 64,
        seed: int = 0,
    ) -> None:
        self.script = script
        self.vocab_size = vocab_size
        self.eos_ids = eos_ids
        self.max_len = max_len
        self.block = block
        self.delay_s = delay_s
        self.prefill_s = prefill_s
        self.max_running = max_running
        self.max_waiting = max_waiting
        self.submitted: list[Request] = []
        self.fail_with: Exception | None = None
        self._rng = random.Random(seed)
        self._lock = threading.Condition()
        self._waiting: deque[Request] = deque()
        self._running: list[_Running] = []
        self._closing = False
        self._dead = False
        self._thread = threading.Thread(target=self._loop, name="fake-engine", daemon=True)
        self._thread.start()

    @property
    def alive(self) -> bool:
        return not self._dead

    def submit(self, request: Request) -> None:
        with self._lock:
            if self._dead:
                raise EngineDeadError("The engine has stopped.")
            if len(request.prompt) >= self.max_len:
                raise ContextLengthError(len(request.prompt), self.max_len)
            if len(self._waiting) >= self.max_waiting:
                raise OverloadedError("The queue is full.", retry_after=2)
            self.submitted.append(request)
            self._waiting.append(request)
            self._lock.notify_all()

    def cancel(self, request: Request) -> None:
        with self._lock:
            request.cancelled = True
            self._lock.notify_all()

    def status(self) -> EngineStatus:
        with self._lock:
            running, waiting = len(self._running), len(self._waiting)
        return EngineStatus(running=running, waiting=waiting, slots_used=running, slots_total=self.max_running)

    def kill(self) -> None:
        """The engine thread dies with work in flight: every stream gets an error."""
        with self._lock:
            self._dead = True
            self._lock.notify_all()
        self._thread.join(5)

    def close(self) -> None:
        with self._lock:
            self._closing = True
            self._lock.notify_all()
        self._thread.join(5)

    def _loop(self) -> None:
        while True:
            with self._lock:
                while not (self._waiting or self._running or self._closing or self._dead):
                    self._lock.wait()
                if self._closing or self._dead:
                    break
                dropped = [r for r in self._waiting if r.cancelled]
                self._waiting = deque(r for r in self._waiting if not r.cancelled)
                self._admit()
                running = list(self._running)
            for request in dropped:
                self._finish(_Running(request, ()), (), None, "abort")
            if self.delay_s:
                time.sleep(self.delay_s)
            for item in running:
                self._step(item)
        for item in [*self._running, *(_Running(r, ()) for r in self._waiting)]:
            self._finish(item, (), None, "error", error=EngineDeadError("The engine has stopped."))

    def _admit(self) -> None:
        while self._waiting and len(self._running) < self.max_running:
            request = self._waiting.popleft()
            request.stats.scheduled = time.perf_counter()
            request.phase = Phase.PREFILL
            self._running.append(_Running(request, iter(self.script(request))))

    def _step(self, item: _Running) -> None:
        request, stats = item.request, item.request.stats
        if request.cancelled:
            self._finish(item, (), None, "abort")
            return
        if self.fail_with is not None:
            error, self.fail_with = self.fail_with, None
            self._finish(item, (), None, "error", error=error)
            return
        if time.perf_counter() - stats.scheduled < self.prefill_s:
            time.sleep(0.005)
            return
        size = self.block if isinstance(self.block, int) else self._rng.randint(*self.block)
        emitted: list[int] = []
        reason, stop = None, None
        for token in self._take(item, size):
            token = self._obey(request, token)
            emitted.append(token)
            request.output.append(token)
            stats.output_tokens += 1
            if token in request.params.stop_ids and stats.output_tokens > request.params.min_tokens:
                reason, stop = "stop", (None if token in request.eos_ids else token)
                break
            matched = request.halt.push(token) if request.halt else None
            if matched is not None:
                reason, stop = "stop", matched
                break
            if stats.output_tokens >= request.params.max_tokens:
                reason = "length"
                break
        now = time.perf_counter()
        if emitted:
            stats.steps += 1
            stats.draft_steps += 1
            stats.drafted += size - 1
            stats.accepted += len(emitted) - 1
            stats.accepted_histogram += [0] * (len(emitted) - len(stats.accepted_histogram))
            stats.accepted_histogram[len(emitted) - 1] += 1
            stats.first_token = stats.first_token or now
            stats.last_token = now
        if reason is not None or not emitted:
            self._finish(item, tuple(emitted), stop, reason or "length")
        else:
            self._emit(item, tuple(emitted))

    def _obey(self, request: Request, token: int) -> int:
        """The scripted token, or the lowest id the grammar allows in its place."""
        grammar = request.grammar
        if grammar is None:
            return token
        ends = token in request.params.stop_ids
        if not ends and grammar.advance(token):
            return token
        if not grammar.active:
            return token
        row = torch.zeros(self.vocab_size)
        grammar.mask(row)
        if ends and row[token] == 0:
            return token
        token = int(row.argmax())
        if token not in request.params.stop_ids:
            assert grammar.advance(token)
        return token

    def _take(self, item: _Running, size: int) -> list[int]:
        out = []
        for token in item.tokens:
            out.append(token)
            if len(out) == size:
                break
        return out

    def _logprobs(self, request: Request, tokens: tuple[int, ...]) -> tuple[TokenLogprobs, ...] | None:
        n = request.params.logprobs
        if n is None:
            return None
        return tuple(
            TokenLogprobs(t, -0.5, 1, tuple(((t + j) % self.vocab_size, -0.5 - j) for j in range(n))) for t in tokens
        )

    def _prompt_logprobs(self, request: Request) -> tuple[TokenLogprobs | None, ...] | None:
        n = request.params.prompt_logprobs
        if n is None or (len(request.output) and request.phase is Phase.DECODE):
            return None
        rest = (
            TokenLogprobs(t, -1.0, 2, tuple(((t + 1 + j) % self.vocab_size, -0.25 - j) for j in range(n)))
            for t in request.prompt[1:]
        )
        return (None, *rest)

    def _emit(self, item: _Running, tokens: tuple[int, ...]) -> None:
        prompt = self._prompt_logprobs(item.request)
        item.request.phase = Phase.DECODE
        item.request.on_event(Event(tokens, self._logprobs(item.request, tokens), prompt_logprobs=prompt))

    def _finish(self, item: _Running, tokens: tuple[int, ...], stop: object, reason: str, error=None) -> None:
        request = item.request
        prompt = self._prompt_logprobs(request)
        with self._lock:
            self._running = [r for r in self._running if r.request is not request]
        request.phase = Phase.DONE
        stats: RequestStats = request.stats
        stats.finished = time.perf_counter()
        request.on_event(
            Event(
                tokens,
                self._logprobs(request, tokens),
                prompt_logprobs=prompt,
                finish_reason=reason,
                stop_reason=stop,
                error=error,
                stats=stats,
            )
        )
