"""What the server asks of an engine, and nothing more.

The server never sees pages, slots or drafts; it submits requests made of token ids and gets events back.
`tests/fakes.py` implements this face with scripted tokens, so that every rule of the server is tested for
any number of tokens a step.
"""

from __future__ import annotations

from typing import Protocol

from soloist.engine.request import Request
from soloist.engine.status import EngineStatus


class EngineFace(Protocol):
    """The engine as the server sees it.

    Event contract: `request.on_event` is called on the engine's thread, in order, at most once a step. The tokens
    of an event include the stop id that ended the request (EOS is a counted token); after a stop string they
    end with the token that completed it. The last event has `finish_reason` and `stats`, also after `cancel`.
    """

    max_len: int
    vocab_size: int
    eos_ids: tuple[int, ...]

    @property
    def alive(self) -> bool:
        """False once the engine thread has ended; it never comes back."""

    def submit(self, request: Request) -> None:
        """Queue a request (thread-safe).

        Raises ContextLengthError, RequestError, OverloadedError (queue full) or EngineDeadError; after a raise
        no event follows.
        """

    def cancel(self, request: Request) -> None:
        """Drop a request (thread-safe, idempotent); slot and pages are free within one step."""

    def status(self) -> EngineStatus:
        """A consistent snapshot for metrics, readiness and the status page (thread-safe, cheap)."""


class Sleeps(Protocol):
    """An engine that can give its card back; blocking, from any thread."""

    def sleep(self, timeout: float | None = None) -> None:
        """Return when the card is free. Raises OverloadedError while requests run or wait."""

    def wake(self, timeout: float | None = None) -> None:
        """Return when requests can run. Raises OverloadedError when the card cannot be had."""
