"""The engine: one thread that turns requests into events, and the thread-safe face in front of it.

    loop:  take in new requests and cancellations -> scheduler.next() -> runner.prefill | runner.decode

What can go wrong is sorted here: a fault of one request ends that request; a fault of a whole step is
retried request by request, so that only the guilty one ends; a fault of the loop itself ends the engine, with
every open request told, and `alive` says so from then on.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping

import torch

from soloist.engine.intake import Intake
from soloist.engine.memory import Memory
from soloist.engine.request import Event, FinishReason, Phase, Request
from soloist.engine.reuse import Reuse
from soloist.engine.runner import Runner
from soloist.engine.scheduler import DecodeStep, PrefillSlice, Scheduler
from soloist.engine.settle import Settler
from soloist.engine.speculation import Speculation
from soloist.engine.status import EngineStatus
from soloist.engine.tidy import Tidier
from soloist.errors import EngineDeadError, EngineError, OverloadedError, SoloistError
from soloist.models.qwen3_5 import Qwen35
from soloist.models.vision import VisionTower

log = logging.getLogger("soloist.engine")


def device_fault(error: BaseException) -> bool:
    """True if the card itself failed: every later call on it fails too, so the process must end."""
    kind = getattr(torch, "AcceleratorError", None)
    return (kind is not None and isinstance(error, kind)) or "CUDA error" in str(error)


class Engine:
    """Serves requests on its own thread; see `server/face.py` for the contract."""

    def __init__(
        self,
        model: Qwen35,
        memory: Memory,
        speculation: Speculation,
        reuse: Reuse,
        *,
        settle: bool = True,
        max_len: int,
        max_queue: int,
        prefill_slice_ms: float,
        verify_rows: int,
        sampler: str,
        knobs: Mapping[str, str],
        degraded: tuple[str, ...] = (),
        tower: VisionTower | None = None,
    ) -> None:
        self.max_len = max_len
        self.vocab_size = model.config.vocab_size
        self.eos_ids = model.config.eos_ids
        self.model, self.memory, self.speculation, self.tower = model, memory, speculation, tower
        self._max_queue = max_queue
        self._intake = Intake(max_len, self.vocab_size, sampler, memory, tower)
        self._knobs, self._degraded = dict(knobs), degraded
        self.reuse = reuse
        self.scheduler = Scheduler(self._guarded(reuse.admit), self._guarded(reuse.resume), prefill_slice_ms)
        self.runner = Runner(
            model, memory, speculation, max_len, verify_rows, reuse.computed, self._finish, self._fault
        )
        self.settler = Settler(memory, reuse, self.runner) if settle else None
        self.counters: Counter[str] = Counter()
        self.worst_gap_ms = 0.0
        self._inbox: list[Request] = []
        self._cancels: list[Request] = []
        self._tasks: list[tuple[Callable[[], None], queue.Queue[BaseException | None]]] = []
        self._wake = threading.Condition()
        self._stopping = False
        self._retire: queue.Queue[bool] | None = None
        self._retired = False
        self._alive = True
        self._busy_since = 0.0
        self._tidier = Tidier()
        self._thread = threading.Thread(target=self._run, name="soloist-engine", daemon=True)
        self._thread.start()

    # -- the face: any thread --------------------------------------------------------------------------------------

    @property
    def alive(self) -> bool:
        return self._alive

    def submit(self, request: Request) -> None:
        """Queue a request; raises ContextLengthError, RequestError, OverloadedError or EngineDeadError."""
        self._intake.check(request)
        with self._wake:
            if not self._alive or self._stopping:
                raise EngineDeadError("The engine has stopped; restart the server.")
            if len(self._inbox) + len(self.scheduler.waiting) >= self._max_queue:
                raise OverloadedError(f"{self._max_queue} requests are waiting already (MAX_QUEUE).", retry_after=2)
            self._inbox.append(request)
            self._wake.notify()

    def cancel(self, request: Request) -> None:
        with self._wake:
            request.cancelled = True
            self._cancels.append(request)
            self._wake.notify()

    def status(self) -> EngineStatus:
        scheduler, memory = self.scheduler, self.memory
        busy = self._busy_since
        return EngineStatus(
            running=len(scheduler.decoding) + len(scheduler.prefilling),
            waiting=len(scheduler.waiting) + len(self._inbox),
            parked=len(scheduler.parked),
            settling=self.settler.backlog if self.settler is not None else 0,
            slots_used=memory.slots_used,
            slots_total=memory.state.slots,
            pages_used=memory.pages.used,
            pages_total=memory.pages.total,
            idle_s=time.perf_counter() - busy if busy else 0.0,
            counters=self._counts(),
            knobs=self._knobs,
            degraded=self._degraded + self.speculation.complaints,
        )

    def _counts(self) -> dict[str, float]:
        counts: dict[str, float] = dict(self.counters)
        if self.settler is not None:
            counts["settled_tokens"] = self.settler.tokens
        if self.reuse.prefix is not None:
            counts |= {f"cache_{name}": value for name, value in vars(self.reuse.prefix.stats).items()}
            counts["cache_host_bytes"] = self.reuse.prefix.host_used
        return counts

    def everyone(self) -> list[Request]:
        """Requests and settle passes that may hold pages or a slot, for integrity checks on the engine's thread."""
        return self.scheduler.running() + (self.settler.running() if self.settler is not None else [])

    def call(self, task: Callable[[], None], timeout: float = 60.0) -> None:
        """Run `task` on the engine's thread between two steps and wait; its exception is raised here."""
        answer: queue.Queue[BaseException | None] = queue.Queue()
        with self._wake:
            if not self._alive or self._stopping:
                raise EngineDeadError("The engine has stopped; restart the server.")
            self._tasks.append((task, answer))
            self._wake.notify()
        error = answer.get(timeout=timeout)
        if error is not None:
            raise error

    def close(self, timeout: float = 10.0) -> None:
        """Stop the thread; open requests end with `abort`."""
        with self._wake:
            self._stopping = True
            self._wake.notify()
        self._thread.join(timeout)

    def retire(self) -> bool:
        """Stop like `close`, but only if nothing is asked of the engine, and leave the cache in host memory instead of
        closing it. False, and nothing has changed, when a request is there. Raises EngineDeadError."""
        answer: queue.Queue[bool] = queue.Queue()
        with self._wake:
            if not self._alive or self._stopping:
                raise EngineDeadError("The engine has stopped; restart the server.")
            self._retire = answer
            self._wake.notify()
        if not answer.get():
            return False
        self._thread.join()
        return True

    # -- the loop: the engine thread -------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while self._take_in():
                self.step()
                self._busy_since = time.perf_counter()
        except BaseException as error:  # the loop itself failed: nothing can be trusted any more
            log.critical("the engine stopped: %s", error, exc_info=True)
            self._shut(EngineDeadError(f"The engine stopped: {error}"))
        else:
            self._shut(None)

    def _take_in(self) -> bool:
        """Wait for work, then take over what other threads left; False when the engine is to stop."""
        with self._wake:
            while not (self._stopping or self._retire is not None or self._asked()):
                self._busy_since = 0.0
                if self._settling() or self._tidier.due:
                    break
                self._wake.wait()
            if self._retire is not None:
                self._retired = not (self._stopping or self._asked())
                self._stopping = self._stopping or self._retired
                self._retire.put(self._retired)
                self._retire = None
            if self._stopping:
                return False
            self._busy_since = self._busy_since or time.perf_counter()
            arrived, self._inbox = self._inbox, []
            cancelled, self._cancels = self._cancels, []
            tasks, self._tasks = self._tasks, []
        if arrived:
            self._tidier.used()
        elif self._tidier.due and not self._has_work():
            self._tidier.tidy()
        for request in arrived:
            self.scheduler.add(request)
        for request in cancelled:
            self._cancel(request)
        for task, answer in tasks:
            try:
                task()
            except Exception as error:  # the caller's to hear
                answer.put(error)
            else:
                answer.put(None)
        return True

    def _asked(self) -> bool:
        return bool(self._inbox or self._cancels or self._tasks or self._has_work())

    def _has_work(self) -> bool:
        scheduler = self.scheduler
        return bool(scheduler.prefilling or scheduler.decoding or scheduler.waiting or scheduler.parked)

    def _settling(self) -> bool:
        return self.settler is not None and self.settler.pending

    def step(self) -> None:
        """One piece of work: a request's if there is any, else a slice of a finished turn."""
        if not self._has_work():
            self._idle()
            return
        self._make_settling_wait()
        work = self.scheduler.next()
        if isinstance(work, PrefillSlice):
            self._prefill(work)
        elif isinstance(work, DecodeStep):
            self._decode(work)
        elif self.scheduler.waiting:
            self._refuse_the_impossible()

    def _make_settling_wait(self) -> None:
        if self.settler is None:
            return
        try:
            self.settler.interrupt()
        except Exception as error:
            self.settler.fail(error)

    def _idle(self) -> None:
        self.reuse.idle()
        if self.settler is None or not self.settler.pending:
            return
        try:
            self.settler.step()
        except Exception as error:
            self.settler.fail(error)

    def _cancel(self, request: Request) -> None:
        if request.phase is Phase.DONE:
            return
        if request.phase is Phase.PREFILL:
            self._keep(request)
        self._end(request, Event(tokens=(), finish_reason="abort", stats=request.stats))

    def _prefill(self, work: PrefillSlice) -> None:
        request = work.request
        began = time.perf_counter()
        request.stats.scheduled = request.stats.scheduled or began
        try:
            if self.reuse.catch_up(request):
                return  # there is less to do than the slice says
            if request.sight is not None:
                request.sight.look(request.settled, work.tokens)
                began = time.perf_counter()  # slices are sized by what their tokens cost
            complete = self.runner.prefill(work)
        except Exception as error:
            if device_fault(error):
                raise
            self._fault(request, error)
            return
        self.scheduler.prefilled(work.tokens, 1000 * (time.perf_counter() - began))
        self.counters["prompt_tokens"] += work.tokens
        if complete and request.phase is Phase.PREFILL:
            self.scheduler.started(request)

    def _decode(self, work: DecodeStep) -> None:
        ready = [r for r in work.requests if r.phase is Phase.DECODE and self._room(r)]
        ready = [r for r in ready if r.phase is Phase.DECODE]  # making room may have parked one of them
        if not ready:
            return
        try:
            self.runner.decode(ready)
        except Exception as error:
            if device_fault(error):
                raise
            # Tokens that were handed out but not settled cannot be taken back; such a request ends. The others have
            # nothing of the step: find the guilty one by running each alone.
            for request in ready:
                if request.phase is Phase.DECODE and (len(ready) == 1 or request.settled != request.length - 1):
                    self._fault(request, error)
            ready = [r for r in ready if r.phase is Phase.DECODE]
            if ready:
                log.warning("a step of several requests failed (%s); running them one by one", error)
            for request in ready:
                self._decode(DecodeStep((request,)))
            return
        self.counters["steps"] += 1

    def _room(self, request: Request) -> bool:
        """Pages for the anchor and the position after it. In a dry pool the youngest request makes way."""
        while not self.memory.grow(request, request.length + 1):
            youngest = max(self.scheduler.running(), key=lambda r: r.id)
            if len(self.scheduler.running()) == 1:
                self._fault(request, EngineError(f"The pool of {self.memory.pages.total} pages is full."))
                return False
            self._make_way(youngest)
            if youngest is request:
                return False
        return True

    def _make_way(self, request: Request) -> None:
        """Move a request off the device: parked if it decodes, back to the front of the queue if it was prefilling."""
        self.counters["preemptions"] += 1
        if request.phase is Phase.DECODE:
            try:
                self.reuse.park(request)
            except Exception as error:  # host memory is out: this request ends, the others have the room
                self._fault(request, error)
            else:
                self.scheduler.park(request)
            return
        self._keep(request)
        self.speculation.drop(request)
        self.memory.release(request)
        self.scheduler.requeue(request)

    def _keep(self, request: Request) -> None:
        """What was computed of a prompt stays usable; if it cannot be kept, nothing else is lost."""
        try:
            self.reuse.keep(request)
        except Exception:
            log.exception("the prefix of request %d was not kept", request.id)

    def _guarded(self, admit: Callable[[Request], bool]) -> Callable[[Request], bool]:
        """`admit`, where a fault ends the request it was asked for instead of the engine."""

        def guarded(request: Request) -> bool:
            try:
                return admit(request)
            except Exception as error:
                self._fault(request, error)
                return False

        return guarded

    def _refuse_the_impossible(self) -> None:
        """Nothing runs and the first in line still does not fit: it never will."""
        if not self.scheduler.running():
            request = self.scheduler.waiting[0]
            self._fault(request, EngineError("The request does not fit an empty pool."))

    # -- endings ---------------------------------------------------------------------------------------------------

    def _finish(self, request: Request, event: Event) -> None:
        """A request came to its own end (called by the runner, with its last event)."""
        self._end(request, event)

    def _fault(self, request: Request, error: Exception) -> None:
        """End one request with an error; nothing else is touched."""
        if request.phase is Phase.DONE:
            return
        if not isinstance(error, SoloistError):
            log.error("request %d failed", request.id, exc_info=error)
            error = EngineError(f"{type(error).__name__}: {error}")
        self._end(request, Event(tokens=(), finish_reason="error", error=error, stats=request.stats))

    def _end(self, request: Request, event: Event) -> None:
        self.scheduler.remove(request)
        self.speculation.drop(request)
        self.memory.release(request)
        request.parked_as = None
        if request.sight is not None:
            request.sight.release()
        if self.settler is not None and event.finish_reason in ("stop", "length"):
            self.settler.add(request)
        stats = request.stats
        stats.finished = time.perf_counter()
        self.worst_gap_ms = max(self.worst_gap_ms, 1000 * stats.worst_gap)
        self.counters[f"finished_{event.finish_reason}"] += 1
        for name in ("output_tokens", "cached_tokens", "drafted", "accepted", "draft_steps"):
            self.counters[name] += getattr(stats, name)
        self._tell(request, event)

    @staticmethod
    def _tell(request: Request, event: Event) -> None:
        try:
            request.on_event(event)
        except Exception:  # the listener is somebody else's code; its fault must not end the engine
            log.exception("the listener of request %d failed", request.id)

    def _shut(self, error: EngineDeadError | None) -> None:
        try:
            if error is None and self.settler is not None:
                self.settler.interrupt()
            if self._retired:
                self.reuse.vacate()
            else:
                self.reuse.close()
        except Exception:
            log.exception("closing the cache")
        with self._wake:
            self._alive = False
            leftover, self._inbox = list(self.scheduler) + self._inbox, []
            tasks, self._tasks = self._tasks, []
            if self._retire is not None:
                self._retire.put(False)
        for _, answer in tasks:
            answer.put(error or EngineDeadError("The engine has stopped."))
        reason: FinishReason = "error" if error else "abort"
        for request in leftover:
            self.scheduler.remove(request)
            self._tell(request, Event(tokens=(), finish_reason=reason, error=error, stats=request.stats))
