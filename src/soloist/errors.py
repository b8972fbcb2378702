"""Every error Soloist raises on purpose, in one tree.

    SoloistError
    |-- UserError                 something a person can fix; carries `remedy`; commands exit with 2
    |   |-- SettingError          an unknown knob, value or combination
    |   |-- CheckpointError       a model directory that cannot be served as it is
    |   |-- CapacityError         does not fit this card, pool or disk (the numbers are in the message)
    |   `-- RequestError          one request is at fault: HTTP 4xx with `status`, `kind`, `param`
    |       `-- ContextLengthError    prompt longer than the context (code context_length_exceeded)
    |-- OverloadedError           try again later: HTTP 503 with `retry_after`
    `-- EngineError               our fault: HTTP 500
        `-- EngineDeadError       the engine thread has stopped; /health says so

The server maps this tree to protocol error bodies in one place (`server/errors.py`); the command
line prints `message` and `remedy` and exits with 2 (UserError) or 1 (anything else).
"""

from __future__ import annotations


class SoloistError(Exception):
    """Root of the tree."""


class UserError(SoloistError):
    """A fault the user can mend. `remedy` is one imperative sentence, shown on its own line."""

    def __init__(self, message: str, remedy: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.remedy = remedy

    def __str__(self) -> str:
        return f"{self.message} {self.remedy}".strip()


class SettingError(UserError):
    """An unknown knob, a value outside its set, or two knobs that exclude each other."""


class CheckpointError(UserError):
    """A model directory that is incomplete, damaged or of an unsupported kind."""


class CapacityError(UserError):
    """A demand larger than the card, the page pool, the host or the disk; the message has the numbers."""


class RequestError(UserError):
    """One request is wrong. `param` names the field, `status` the HTTP status, `code` a machine-readable word."""

    def __init__(
        self,
        message: str,
        remedy: str = "",
        *,
        param: str | None = None,
        status: int = 400,
        kind: str = "BadRequestError",
        code: str | None = None,
    ) -> None:
        super().__init__(message, remedy)
        self.param = param
        self.status = status
        self.kind = kind
        self.code = code


class ContextLengthError(RequestError):
    """The prompt does not fit the context. Clients search the text for "maximum context length"."""

    def __init__(self, tokens: int, limit: int, param: str = "input_tokens") -> None:
        super().__init__(
            f"This model's maximum context length is {limit} tokens, but the request has {tokens} input tokens.",
            "Shorten the input or raise MAX_LEN.",
            param=param,
            code="context_length_exceeded",
        )
        self.tokens = tokens
        self.limit = limit


class OverloadedError(SoloistError):
    """The admission queue is full; `retry_after` is in seconds."""

    def __init__(self, message: str, retry_after: int = 1) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class EngineError(SoloistError):
    """An internal fault that ended one request."""


class EngineDeadError(EngineError):
    """The engine thread has stopped; nothing can be served until the process restarts."""
