"""What a request must be before it may wait: refused at once if it can never run, completed where it left things open.

Called on the submitter's thread, so it reads what never changes after boot and writes to the request alone.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace

from soloist.engine.memory import Memory
from soloist.engine.request import Request
from soloist.errors import ContextLengthError, RequestError
from soloist.models.pictures import Sight
from soloist.models.vision import VisionTower
from soloist.sampling.history import History
from soloist.sampling.verify import Mode


@dataclass(frozen=True)
class Intake:
    """The limits of one engine. `sampler` is SAMPLER: auto, rejection or coupled; `tower` None where vision is off."""

    max_len: int
    vocab_size: int
    sampler: str
    memory: Memory
    tower: VisionTower | None

    def check(self, request: Request) -> None:
        """ContextLengthError or RequestError for what can never run, with the numbers; settles what was left open."""
        tokens = len(request.prompt)
        if not tokens:
            raise RequestError("The prompt has no tokens.", param="prompt")
        if tokens >= self.max_len:
            raise ContextLengthError(tokens, self.max_len)
        if not self.memory.fits_ever(tokens + 1):
            raise ContextLengthError(tokens, self.memory.pages.total * 64 - 1)
        if min(request.prompt) < 0 or max(request.prompt) >= self.vocab_size:
            raise RequestError(f"Token ids must be below {self.vocab_size}.", param="prompt")
        self._see(request)
        request.params.validate(self.vocab_size)
        if request.params.max_tokens > self.max_len - tokens:
            limit = self.max_len - tokens
            floor = min(request.params.min_tokens, limit)
            request.params = replace(request.params, max_tokens=limit, min_tokens=floor)
        seed = request.params.seed
        request.seed = int.from_bytes(os.urandom(8), "little") if seed is None else seed % 2**64
        request.mode = self._mode(request)
        request.history = History(request.params, request.prompt, self.vocab_size, request.grammar)

    def _see(self, request: Request) -> None:
        if not request.pictures:
            return
        if self.tower is None:
            raise RequestError("The prompt has a picture, and vision is off.", "Start with VISION=1.", param="messages")
        at = 0
        for picture in request.pictures:
            if picture.start < at or picture.end > len(request.prompt):
                raise RequestError("A picture's rows do not lie in the prompt, one after the other.", param="messages")
            at = picture.end
        request.sight = Sight(request.pictures, self.tower.encode)

    def _mode(self, request: Request) -> Mode:
        if request.params.greedy:
            return "greedy"
        if self.sampler == "auto":
            return "coupled" if request.params.seed is not None else "rejection"
        return "rejection" if self.sampler == "rejection" else "coupled"
