"""Sleep and wake: the card is given back while nobody asks, and taken again with the next request.

    awake -> falling asleep -> asleep -> waking -> awake

A `Sleeper` stands in front of the engine with the same face. One thread makes every transition; other threads leave
wishes. Going to sleep ends the engine and keeps its cache (`engine/kept.py`); waking builds a new engine around what
was kept, so that an awakened engine is by construction one that was just started, with the numerics it had.
Requests that arrive meanwhile wait here. What can go wrong: somebody else has taken the card. Then the requests that
waited get that error, `fault` says it until a later attempt succeeds, and the next request tries again.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from typing import Literal

from soloist.engine.engine import Engine
from soloist.engine.kept import Kept, park_weights
from soloist.engine.request import Event, Request
from soloist.engine.status import EngineStatus, Wakefulness
from soloist.engine.tidy import release_memory
from soloist.errors import ContextLengthError, EngineDeadError, OverloadedError, SoloistError

log = logging.getLogger("soloist.engine")

POLL_S = 1.0  # how often an idle engine is looked at while IDLE_RELEASE_MIN is set
Wish = Literal["sleep", "wake"]


class Sleeper:
    """An engine that can be away. `build` makes one, from scratch or around what was kept; the first is made here.

    idle_s      seconds without a request after which the engine goes to sleep; 0: only when asked
    max_queue   requests that may wait for a waking engine
    """

    def __init__(self, build: Callable[[Kept | None], Engine], *, idle_s: float = 0.0, max_queue: int = 64) -> None:
        self._build, self._idle_s, self._max_queue = build, idle_s, max_queue
        self._kept = Kept()
        self._engine: Engine | None = build(None)
        self.max_len = self._engine.max_len
        self.vocab_size, self.eos_ids = self._engine.vocab_size, self._engine.eos_ids
        self._state: Wakefulness = "awake"
        self._fault = ""
        self._last = self._engine.status()
        self._past: Counter[str] = Counter()
        self._active = time.monotonic()
        self._waiting: deque[Request] = deque()
        self._wishes: deque[tuple[Wish, Future[None]]] = deque()
        self._turn = threading.Condition()
        self._closing = False
        self._thread = threading.Thread(target=self._keep, name="soloist-sleeper", daemon=True)
        self._thread.start()

    # -- the face: any thread --------------------------------------------------------------------------------------

    @property
    def alive(self) -> bool:
        """False once an engine has ended that was not sent to sleep."""
        with self._turn:
            return self._state != "awake" or (self._engine is not None and self._engine.alive)

    def submit(self, request: Request) -> None:
        """As an engine's, which wakes up for it."""
        with self._turn:
            self._active = time.monotonic()
            if self._state == "awake" and self._engine is not None:
                self._engine.submit(request)
                return
            if self._closing:
                raise EngineDeadError("The engine has stopped; restart the server.")
            if len(request.prompt) >= self.max_len:
                raise ContextLengthError(len(request.prompt), self.max_len)
            if len(self._waiting) >= self._max_queue:
                raise OverloadedError(f"{self._max_queue} requests are waiting already (MAX_QUEUE).", retry_after=5)
            self._waiting.append(request)
            self._turn.notify()

    def cancel(self, request: Request) -> None:
        with self._turn:
            request.cancelled = True
            if request in self._waiting:
                self._waiting.remove(request)
            elif self._engine is not None:
                self._engine.cancel(request)
                return
        _tell(request, Event(tokens=(), finish_reason="abort", stats=request.stats))

    def status(self) -> EngineStatus:
        """An absent engine has no pages and no slots, only the requests that wait for it; counters go on."""
        with self._turn:
            now = self._merged(self._last if self._engine is None else self._engine.status())
            waiting = now.waiting + len(self._waiting)
            return replace(now, waiting=waiting, wakefulness=self._state, fault=self._fault)

    def sleep(self, timeout: float | None = None) -> None:
        """Give the card back; returns when it is free. Raises OverloadedError while requests run or wait."""
        self._wish("sleep").result(timeout)

    def wake(self, timeout: float | None = None) -> None:
        """Take the card again; returns when requests can run. Raises what building an engine raises."""
        self._wish("wake").result(timeout)

    def close(self) -> None:
        """Stop; open requests end with `abort`."""
        with self._turn:
            self._closing = True
            self._turn.notify()
        self._thread.join()
        self._refuse(EngineDeadError("The engine has stopped."))
        if self._engine is not None:
            self._engine.close()
        else:
            self._kept.close()

    def _wish(self, wish: Wish) -> Future[None]:
        future: Future[None] = Future()
        with self._turn:
            if self._closing:
                raise EngineDeadError("The engine has stopped; restart the server.")
            self._wishes.append((wish, future))
            self._turn.notify()
        return future

    # -- transitions: the sleeper's thread -------------------------------------------------------------------------

    def _keep(self) -> None:
        while (step := self._next()) is not None:
            step()

    def _next(self) -> Callable[[], None] | None:
        """Wait for something to do; None when closing."""
        with self._turn:
            while not self._closing:
                if self._wishes:
                    return self._grant
                if self._state == "asleep" and self._waiting:
                    return self._wake_for_requests
                if self._idle_s and self._state == "awake" and self._idle_for() >= self._idle_s:
                    return self._sleep_when_idle
                timed = self._idle_s and self._state == "awake"
                self._turn.wait(min(POLL_S, self._idle_s) if timed else None)
            for _, future in self._wishes:
                future.set_exception(EngineDeadError("The engine has stopped."))
            return None

    def _idle_for(self) -> float:
        """Seconds since a request was last here."""
        assert self._engine is not None
        now = self._engine.status()
        if now.running or now.waiting or now.parked:
            self._active = time.monotonic()
        return time.monotonic() - self._active

    def _grant(self) -> None:
        wish, future = self._wishes.popleft()
        try:
            if wish == "sleep" and self._state == "awake" and not self._lie_down():
                raise OverloadedError("Requests are running or waiting; ask again when they have ended.", 5)
            if wish == "wake" and self._state == "asleep":
                self._get_up()
        except Exception as error:
            future.set_exception(error)
        else:
            future.set_result(None)

    def _wake_for_requests(self) -> None:
        try:
            self._get_up()
        except OverloadedError as error:  # told to the requests that waited, and kept as `fault`
            log.error("%s", error)

    def _sleep_when_idle(self) -> None:
        try:
            if self._lie_down():
                log.info("%.0f min without a request", self._idle_s / 60)
        except EngineDeadError:  # the server sees it by `alive`
            with self._turn:
                self._idle_s = 0.0

    def _lie_down(self) -> bool:
        """End the engine and keep what it knows; False when it is busy."""
        began = time.perf_counter()
        with self._turn:
            self._state = "falling asleep"
        if not self._retired():
            return False
        sizes = self._kept.weights.nbytes if self._kept.weights is not None else 0, self._kept.host_bytes
        release_memory()
        with self._turn:
            self._state = "asleep"
            self._past["sleeps"] += 1
        log.info(
            "asleep after %.1f s; %.2f GiB of weights and %.2f GiB of sessions are in host memory",
            time.perf_counter() - began,
            *(size / 2**30 for size in sizes),
        )
        return True

    def _retired(self) -> bool:
        """Replace the engine by what is kept of it, leaving no reference behind. A busy engine goes on."""
        engine = self._engine
        assert engine is not None
        try:
            done = engine.retire()
        except EngineDeadError:
            self._go_on()
            raise
        if not done:
            self._active = time.monotonic()
            self._go_on()
            return False
        kept = remains(engine)
        with self._turn:
            now = engine.status()
            own = {name: count for name, count in now.counters.items() if name.startswith("cache_")}
            self._past.update({name: count for name, count in now.counters.items() if name not in own})
            self._last = EngineStatus(
                counters=own, knobs=now.knobs, degraded=now.degraded
            )  # the cache goes on counting
            self._engine, self._kept = None, kept
        return True

    def _get_up(self) -> None:
        began = time.perf_counter()
        with self._turn:
            self._state = "waking"
        try:
            engine = self._build(self._kept)
        except Exception as error:
            if not isinstance(error, SoloistError):
                log.error("waking failed", exc_info=error)
            refusal = OverloadedError(f"The engine is asleep and cannot wake: {error}", retry_after=30)
            error.__traceback__ = None  # its frames hold half an engine
            self._kept.back_to_host()
            release_memory()
            with self._turn:
                self._state, self._fault = "asleep", str(error)
            self._refuse(refusal)
            raise refusal from None
        with self._turn:
            self._engine, self.max_len = engine, engine.max_len
        self._kept.taken_over()
        self._kept = Kept()
        self._past["wakes"] += 1
        log.info("awake after %.1f s; context %d tokens", time.perf_counter() - began, self.max_len)
        self._go_on()

    def _go_on(self) -> None:
        """Be awake, and hand over who has waited."""
        with self._turn:
            self._state, self._fault = "awake", ""
            self._active = time.monotonic()
            waited = list(self._waiting)
            self._waiting.clear()
            failed: list[tuple[Request, SoloistError]] = []
            assert self._engine is not None
            for request in waited:
                try:
                    self._engine.submit(request)
                except SoloistError as error:
                    failed.append((request, error))
        for request, reason in failed:
            _tell(request, Event(tokens=(), finish_reason="error", error=reason, stats=request.stats))

    def _refuse(self, error: Exception) -> None:
        """Nobody who waited can be served."""
        with self._turn:
            waited = list(self._waiting)
            self._waiting.clear()
        for request in waited:
            _tell(request, Event(tokens=(), finish_reason="error", error=error, stats=request.stats))

    def _merged(self, now: EngineStatus) -> EngineStatus:
        """A status whose counters go on from those of the engines before."""
        names = {**now.counters, **self._past}
        return replace(now, counters={n: now.counters.get(n, 0) + self._past[n] for n in names})


def remains(engine: Engine) -> Kept:
    """What a retired engine leaves. A cache that could not give up all its pages is not kept."""
    reuse, kept = engine.reuse, Kept(numerics=engine.reuse.numerics, persister=engine.reuse.persister)
    if reuse.prefix is not None and engine.memory.pages.used == 0:
        kept.prefix = reuse.prefix
    else:
        kept.end_writing()
    try:
        kept.weights = park_weights((engine.model, engine.tower, engine.status().degraded))
    except (RuntimeError, MemoryError) as error:  # the engine has retired already: there is no way back but a new one
        log.warning("weights could not be moved to host memory, waking reads them again: %s", error)
    return kept


def _tell(request: Request, event: Event) -> None:
    try:
        request.on_event(event)
    except Exception:  # the listener is somebody else's code
        log.exception("the listener of request %d failed", request.id)
