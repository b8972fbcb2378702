"""What every scenario is given, and the two ways requests are sent: a cohort together, or one by one."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from soloist.bench.client import Answer, Client
from soloist.bench.serving import OwnServer

Send = Callable[[], Awaitable[Answer]]
GREEDY: dict[str, Any] = {"temperature": 0.0}


@dataclass
class Context:
    """The server under test and how to treat it.

    `tick(text)` tells the progress bar that one request is done. `fields` are sent with every request (thinking
    off, a seed). `repeats` and `warm_up` count whole passes and single requests.
    """

    client: Client
    repeats: int = 1
    warm_up: int = 2
    fields: dict[str, Any] = field(default_factory=dict)
    tick: Callable[[str], None] = lambda _: None
    server: OwnServer | None = None

    async def warm(self, max_tokens: int = 24) -> None:
        """Requests whose times are thrown away: compilation, first touch of memory, connection set-up."""
        for n in range(self.warm_up):
            await self.chat(f"Count slowly from {n + 1} to ten.", max_tokens=max_tokens, **GREEDY)

    async def chat(self, messages: list[dict[str, Any]] | str, **fields: Any) -> Answer:
        return await self.client.chat(messages, **{**self.fields, **fields})


@dataclass
class Batch:
    """Answers of requests that ran together, and how long the whole took in seconds."""

    answers: list[Answer]
    wall_s: float

    @property
    def errors(self) -> list[str]:
        return [a.error for a in self.answers if a.error]


async def together(sends: Sequence[Send], tick: Callable[[str], None] = lambda _: None) -> Batch:
    """Start all at once and wait for all."""

    async def one(send: Send) -> Answer:
        answer = await send()
        tick("")
        return answer

    start = time.perf_counter()
    answers = await asyncio.gather(*(one(send) for send in sends))
    return Batch(list(answers), time.perf_counter() - start)


async def in_cohorts(sends: Sequence[Send], size: int, tick: Callable[[str], None] = lambda _: None) -> Batch:
    """Groups of `size`, each started together, one group after the other."""
    answers: list[Answer] = []
    wall = 0.0
    for start in range(0, len(sends), size):
        batch = await together(sends[start : start + size], tick)
        answers += batch.answers
        wall += batch.wall_s
    return Batch(answers, wall)


def salt() -> str:
    """A word no cache has seen. It goes to the front of a prompt, so that any server's prefix cache misses."""
    return uuid.uuid4().hex[:12]


def salted(text: str, word: str | None = None) -> str:
    return f"[{word or salt()}] {text}"
