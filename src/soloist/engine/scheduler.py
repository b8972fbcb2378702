"""What runs next: a slice of one prompt, or one decode step of everything that decodes. Never both.

Prompts are computed in slices on the fixed grid. While any stream decodes, a slice lasts at most
`slice_ms` and a decode step follows it; a prompt with little left overtakes a long one at a slice edge, so a
short question does not wait for somebody's document. Pure host policy: no tensors, no clock of its own.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from soloist.engine.request import Phase, Request

GRID = 64
SHORT_PROMPT = 1024
IDLE_SLICE_TOKENS = 512  # with no stream waiting: long enough to be cheap, short enough to notice a cancel
FIRST_GUESS_MS = 2.0  # per token, before the first slice was measured
REMEMBERED = 8  # slices whose time per token sizes the next one
HEADROOM = 0.85  # of the time a slice may take: the next may be slower than all that are remembered


@dataclass(frozen=True)
class PrefillSlice:
    """Compute the next `tokens` prompt tokens of `request` (a multiple of the grid, or all that is left)."""

    request: Request
    tokens: int


@dataclass(frozen=True)
class DecodeStep:
    requests: tuple[Request, ...]


class Scheduler:
    """Queues of one engine. `admit(request)` gives it a slot and pages, `resume(request)` does so for a parked one;
    both may say no."""

    def __init__(self, admit: Callable[[Request], bool], resume: Callable[[Request], bool], slice_ms: float) -> None:
        self._admit, self._resume = admit, resume
        self._slice_ms = slice_ms
        self._ms_per_token = deque([FIRST_GUESS_MS], maxlen=REMEMBERED)
        self._prefill_was_last = False
        self.waiting: deque[Request] = deque()
        self.prefilling: list[Request] = []
        self.decoding: list[Request] = []
        self.parked: list[Request] = []

    def __iter__(self) -> Iterator[Request]:
        """Every request the scheduler knows, running, parked or waiting."""
        yield from self.decoding
        yield from self.parked
        yield from self.prefilling
        yield from self.waiting

    def running(self) -> list[Request]:
        """Requests that hold a slot."""
        return self.decoding + self.prefilling

    def add(self, request: Request) -> None:
        self.waiting.append(request)

    def started(self, request: Request) -> None:
        """The prompt is complete: from now on the request decodes."""
        self.prefilling.remove(request)
        request.phase = Phase.DECODE
        self.decoding.append(request)

    def remove(self, request: Request) -> None:
        """Forget a request, wherever it is."""
        for queue in (self.waiting, self.prefilling, self.decoding, self.parked):
            if request in queue:
                queue.remove(request)
        request.phase = Phase.DONE

    def park(self, request: Request) -> None:
        """A decoding request has left the device for a while."""
        self.decoding.remove(request)
        self.parked.append(request)

    def requeue(self, request: Request) -> None:
        """A request that was prefilling has lost its place: it is first in line again."""
        self.prefilling.remove(request)
        request.phase = Phase.WAITING
        self.waiting.appendleft(request)

    def next(self) -> PrefillSlice | DecodeStep | None:
        """The next piece of work, or None when there is nothing to do (or nothing that fits)."""
        # Oldest first, and before anybody new: a parked request must not wait for ever.
        for request in sorted(self.parked, key=lambda r: r.id):
            if not self._resume(request):
                break
            self.parked.remove(request)
            self.decoding.append(request)
        while self.waiting and not self.parked and self._admit(self.waiting[0]):
            request = self.waiting.popleft()
            request.phase = Phase.PREFILL
            self.prefilling.append(request)
        if self.prefilling and not (self.decoding and self._prefill_was_last):
            self._prefill_was_last = True
            return self._slice(self._first_in_line())
        self._prefill_was_last = False
        return DecodeStep(tuple(self.decoding)) if self.decoding else None

    def _first_in_line(self) -> Request:
        for request in self.prefilling:
            if len(request.prompt) - request.settled < SHORT_PROMPT:
                return request
        return self.prefilling[0]

    def _slice(self, request: Request) -> PrefillSlice:
        left = len(request.prompt) - request.settled
        if self.decoding:
            # What a slice needs is planned for IDLE_SLICE_TOKENS.
            tokens = min(int(HEADROOM * self._slice_ms / max(self._ms_per_token)), IDLE_SLICE_TOKENS)
        else:
            tokens = IDLE_SLICE_TOKENS
        tokens = max(GRID, tokens // GRID * GRID)
        # A slice ends where a snapshot is due: the slot holds the state of the last row only.
        due = next((point - request.settled for point in request.snapshot_at if point > request.settled), left)
        return PrefillSlice(request, min(left, tokens, due))

    def prefilled(self, tokens: int, ms: float) -> None:
        """Report how long a slice took. The slowest of the last few sizes the next one: cost grows with the context and
        machines stutter, and the bound on the gap matters more than throughput."""
        self._ms_per_token.append(ms / max(tokens, 1))
