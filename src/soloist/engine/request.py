"""One sequence from admission to its last token, and the events it sends back.

The engine speaks token ids. Whoever submits a request may hand it a `halt` (stop strings) and a
`grammar`; both see tokens one by one, in order, however many a step accepted.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from typing import Literal, Protocol

from soloist.cache.parking import Parked
from soloist.cache.tree import Trail
from soloist.models.pictures import Picture, Sight, cache_keys
from soloist.sampling.grammar import Grammar
from soloist.sampling.history import History
from soloist.sampling.logprobs import TokenLogprobs
from soloist.sampling.params import SamplingParams
from soloist.sampling.verify import Mode

__all__ = ["Event", "FinishReason", "Halt", "Phase", "Picture", "Request", "RequestStats", "TokenLogprobs"]

FinishReason = Literal["stop", "length", "abort", "error"]


class Halt(Protocol):
    """Decides, token by token, whether the text is complete (a stop string was found)."""

    def push(self, token: int) -> str | None:
        """Take one emitted token; return the matched stop string, or None to go on."""


class Phase(Enum):
    WAITING = "waiting"  # in the queue, nothing allocated
    PREFILL = "prefill"  # holds a slot and pages; prompt partly computed
    DECODE = "decode"  # in the batch
    PARKED = "parked"  # pages and state moved to host memory until the pool has room
    DONE = "done"


@dataclass
class RequestStats:
    """Times are `time.perf_counter()` seconds; counts are tokens unless they say steps."""

    arrived: float = 0.0
    scheduled: float = 0.0
    first_token: float = 0.0
    last_token: float = 0.0
    finished: float = 0.0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    steps: int = 0
    parked: int = 0
    draft_steps: int = 0
    drafted: int = 0
    accepted: int = 0
    accepted_histogram: list[int] = field(default_factory=list)
    accepted_by_source: dict[str, int] = field(default_factory=dict)
    worst_gap: float = 0.0


@dataclass(frozen=True)
class Event:
    """What one step produced for one request. The last event of a request has `finish_reason` set.

    `sources[i]` says where token i came from: "target" (sampled by the model) or the name of the draft source
    whose proposal was accepted. `stop_reason` is the matched stop string, or the stop id when it is not an EOS.
    """

    tokens: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] | None = None
    sources: tuple[str, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    error: Exception | None = None
    stats: RequestStats | None = None


_counter = itertools.count()


@dataclass(eq=False)
class Request:
    """Invariants are in `check`: cached <= settled <= length, and a decoding request has settled all but its anchor.

    `settled` counts tokens whose KV and recurrent state are in the caches; the newest emitted token (the
    anchor) is never settled, it is row 0 of the next step.
    """

    prompt: list[int]
    params: SamplingParams
    on_event: Callable[[Event], None]
    halt: Halt | None = None
    grammar: Grammar | None = None
    eos_ids: tuple[int, ...] = ()
    cache_salt: str = ""
    pictures: tuple[Picture, ...] = ()
    id: int = field(default_factory=lambda: next(_counter))
    # Set at admission by the engine.
    seed: int = 0
    mode: Mode = "coupled"
    history: History | None = None
    sight: Sight | None = None

    # Owned by the engine thread.
    phase: Phase = Phase.WAITING
    output: list[int] = field(default_factory=list)
    settled: int = 0
    slot: int = -1
    pages: list[int] = field(default_factory=list)
    cancelled: bool = False
    prompt_rows: list[TokenLogprobs | None] = field(default_factory=list)
    trail: Trail | None = None
    snapshot_at: tuple[int, ...] = ()
    parked_as: Parked | None = None
    stats: RequestStats = field(default_factory=RequestStats)

    def __post_init__(self) -> None:
        self.stats.arrived = time.perf_counter()
        self.stats.prompt_tokens = len(self.prompt)

    @property
    def length(self) -> int:
        """Tokens known so far, prompt and output, the anchor included."""
        return len(self.prompt) + len(self.output)

    @property
    def remaining(self) -> int:
        """Output tokens this request may still emit."""
        return self.params.max_tokens - len(self.output)

    @property
    def rope_offset(self) -> int:
        """Rotary position minus position of whatever follows the prompt."""
        return 0 if self.sight is None else self.sight.offset

    @property
    def keys(self) -> list[int]:
        """The prompt as the prefix cache compares it: equal words around other pictures are another prompt."""
        return cache_keys(self.prompt, self.pictures) if self.pictures else self.prompt

    def token(self, position: int) -> int:
        """The known token at an absolute position."""
        n = len(self.prompt)
        return self.prompt[position] if position < n else self.output[position - n]

    def check(self) -> None:
        """Assert the invariants; called after every step in debug runs and tests."""
        assert 0 <= self.stats.cached_tokens <= self.settled <= self.length
        if self.phase is Phase.DECODE:
            assert self.output and self.settled == self.length - 1
            assert self.slot >= 0 and len(self.pages) * 64 >= self.settled
        assert len(self.output) <= self.params.max_tokens
