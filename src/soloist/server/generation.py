"""The bridge between the event loop and the engine's thread: one HTTP request, one or more sequences."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from dataclasses import dataclass

from soloist.engine.request import Event, Picture, Request, RequestStats
from soloist.errors import EngineError, OverloadedError
from soloist.sampling.grammar import Grammar
from soloist.sampling.params import SamplingParams
from soloist.server.face import EngineFace
from soloist.server.observe import Observer
from soloist.server.text import StopHalt, TextStream


@dataclass
class Plan:
    """One sequence before it is submitted. `text` makes a fresh TextStream: one ends generation, one shows it."""

    prompt: list[int]
    params: SamplingParams
    text: Callable[[], TextStream]
    has_stops: bool = False
    grammar: Grammar | None = None
    cache_salt: str = ""
    pictures: tuple[Picture, ...] = ()


@dataclass
class _Sequence:
    request: Request
    last_event: float = 0.0
    final: Event | None = None
    open: bool = True


def _stopping() -> OverloadedError:
    return OverloadedError("The server is stopping; this answer could not be completed.", retry_after=5)


class Generation:
    """Sequences in flight. Iterate `events` for `(index, Event)` in order of arrival; `close` cancels what still runs.

    Events cross from the engine thread by `call_soon_threadsafe`. Every sequence is booked with the observer when
    its last event comes, also after `close`.
    """

    def __init__(self, engine: EngineFace, plans: list[Plan], observer: Observer) -> None:
        self._engine = engine
        self._observer = observer
        self._loop = asyncio.get_running_loop()
        self._queue: asyncio.Queue[tuple[int, Event]] = asyncio.Queue()
        self._sequences: list[_Sequence] = []
        self._expected = len(plans)
        if observer.stopping:
            raise _stopping()
        try:
            for index, plan in enumerate(plans):
                request = self._request(index, plan)
                self._sequences.append(_Sequence(request))
                try:
                    engine.submit(request)
                except BaseException:
                    self._sequences.pop()
                    raise
        except BaseException:
            self._expected = len(self._sequences)
            self.close()
            raise
        observer.started([s.request for s in self._sequences])

    def _request(self, index: int, plan: Plan) -> Request:
        return Request(
            prompt=plan.prompt,
            params=plan.params,
            on_event=lambda event: self._deliver(index, event),
            halt=StopHalt(plan.text()) if plan.has_stops else None,
            grammar=plan.grammar,
            eos_ids=self._engine.eos_ids,
            cache_salt=plan.cache_salt,
            pictures=plan.pictures,
        )

    def _deliver(self, index: int, event: Event) -> None:
        """On the engine's thread."""
        with suppress(RuntimeError):  # the loop has closed: nobody is left to tell
            self._loop.call_soon_threadsafe(self._arrive, index, event, time.perf_counter())

    def _arrive(self, index: int, event: Event, now: float) -> None:
        sequence = self._sequences[index]
        if event.tokens:
            if sequence.last_event:
                self._observer.gap(now - sequence.last_event, len(event.tokens))
            sequence.last_event = now
        self._queue.put_nowait((index, event))
        if event.finish_reason is not None:
            sequence.final = event
            finals = [s.final for s in self._sequences if s.final is not None]
            if len(finals) == self._expected:
                self._observer.ended(finals)

    async def events(self) -> AsyncIterator[tuple[int, Event]]:
        """All events until every sequence has ended. Raises the error of a sequence that failed."""
        while not self.ended:
            index, event = await self._queue.get()
            if event.finish_reason is not None:
                self._sequences[index].open = False
            if event.error is not None:
                raise event.error
            if event.finish_reason == "abort" and self._observer.stopping:
                raise _stopping()
            if event.finish_reason in ("error", "abort"):
                raise EngineError("The engine ended this request before it was complete.")
            yield index, event

    def cancel(self) -> None:
        """Cancel every sequence that has not ended; their last events still come (finish reason `abort`)."""
        for sequence in self._sequences:
            if sequence.open:
                self._engine.cancel(sequence.request)

    def close(self) -> None:
        """Cancel every sequence that has not ended. Idempotent."""
        for sequence in self._sequences:
            if sequence.open:
                sequence.open = False
                self._engine.cancel(sequence.request)

    @property
    def ended(self) -> bool:
        return not any(s.open for s in self._sequences)

    def stats(self, index: int) -> RequestStats:
        """Final statistics of a sequence once it has ended, the engine's running ones before."""
        sequence = self._sequences[index]
        if sequence.final is not None and sequence.final.stats is not None:
            return sequence.final.stats
        return sequence.request.stats
