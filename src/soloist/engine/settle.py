"""Settling turns in idle time: what decoding left behind is prefilled, so that the next turn starts warm and exact.

KV and state made by decoding differ in their last bits from what a prefill of the same tokens gives, so they
never enter the cache. When nothing else is to do, the finished turn (prompt and answer) is prefilled from its last
snapshot on. Every slice leaves the cache usable, so a pass may be interrupted after each.
"""

from __future__ import annotations

import logging
from collections import deque

from soloist.engine.memory import Memory
from soloist.engine.request import Event, Phase, Request
from soloist.engine.reuse import Reuse
from soloist.engine.runner import Runner
from soloist.engine.scheduler import GRID, PrefillSlice
from soloist.sampling.params import SamplingParams

log = logging.getLogger("soloist.engine")

SLICE_TOKENS = 128  # how long a request that arrives meanwhile may have to wait
BACKLOG = 64  # turns waiting to be settled; older ones are forgotten first (their next turn prefills them)


def _nobody(event: Event) -> None:
    """A settle pass has no listener."""


def _turn(known: list[int], of: Request) -> Request:
    """A request to prefill `known`, which belongs to the conversation `of`."""
    turn = Request(
        known,
        SamplingParams(max_tokens=1, temperature=0.0),
        _nobody,
        cache_salt=of.cache_salt,
        pictures=of.pictures,
    )
    turn.sight = of.sight
    return turn


class Settler:
    """Turns waiting to be settled, and the one being settled. Engine thread only."""

    def __init__(self, memory: Memory, reuse: Reuse, runner: Runner) -> None:
        self._memory, self._reuse, self._runner = memory, reuse, runner
        self._waiting: deque[Request] = deque(maxlen=BACKLOG)
        self._current: Request | None = None
        self.tokens = 0  # settled since start

    @property
    def backlog(self) -> int:
        """Turns not settled yet; any thread may read it."""
        return len(self._waiting) + (self._current is not None)

    @property
    def pending(self) -> bool:
        return self.backlog > 0

    def add(self, request: Request) -> None:
        """Queue a turn that came to its end. Only grid blocks that are known completely are settled."""
        known = request.prompt + request.output
        if self._reuse.prefix is None or len(known) <= self._reuse.prefix.grid:
            return
        turn = _turn(known, request)
        # A newer turn of the same conversation contains the older one.
        keys = turn.keys
        stale = [t for t in self._waiting if t.cache_salt == turn.cache_salt and keys[: len(t.prompt)] == t.keys]
        for older in stale:
            self._waiting.remove(older)
        self._waiting.append(turn)

    def step(self) -> None:
        """One slice. Called when the engine has nothing else to do."""
        turn = self._current
        if turn is None:
            turn = self._current = self._waiting.popleft()
            if not self._reuse.admit(turn):
                self._current = None
                return  # no room even though nothing runs: the next turn will prefill it
            turn.phase = Phase.PREFILL
        tokens = min(self._end(turn) - turn.settled, SLICE_TOKENS)
        if turn.snapshot_at:
            tokens = min([tokens, *(p - turn.settled for p in turn.snapshot_at if p > turn.settled)])
        if tokens > 0:
            self._runner.prefill(PrefillSlice(turn, tokens))
            self.tokens += tokens
        if turn.settled >= self._end(turn):
            self.interrupt()

    def _end(self, turn: Request) -> int:
        """The last grid point with a known token after it, which the drafter's rows need."""
        grid = self._reuse.prefix.grid if self._reuse.prefix is not None else GRID
        return (len(turn.prompt) - 1) // grid * grid

    def interrupt(self) -> None:
        """Give up slot and pages, keeping what was computed; an unfinished turn goes on when it is idle again."""
        turn = self._current
        if turn is None:
            return
        self._reuse.keep(turn)
        self._reuse.persist(turn)
        unfinished = turn.settled < self._end(turn)
        self._current = None
        self.drop(turn)
        if unfinished:
            self._waiting.appendleft(_turn(turn.prompt, turn))

    def drop(self, turn: Request) -> None:
        """Release what a turn holds."""
        self._runner.speculation.drop(turn)
        self._memory.release(turn)
        if turn.sight is not None:
            turn.sight.release()
        turn.phase = Phase.DONE

    def fail(self, error: Exception) -> None:
        """A slice failed: forget that turn."""
        log.error("settling a turn failed", exc_info=error)
        turn, self._current = self._current, None
        if turn is not None:
            self.drop(turn)

    def running(self) -> list[Request]:
        """Whoever holds a slot here, for integrity checks."""
        return [self._current] if self._current is not None else []
