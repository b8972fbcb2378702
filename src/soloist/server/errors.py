"""The error tree as protocol bodies: one mapping for OpenAI's shape and one for Anthropic's."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError
from starlette.exceptions import HTTPException

from soloist.errors import ContextLengthError, EngineDeadError, EngineError, OverloadedError, RequestError, UserError

log = logging.getLogger("soloist.server")

_ANTHROPIC_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


@dataclass(frozen=True)
class Failure:
    """One error, protocol-neutral: what both body shapes are made from."""

    status: int
    kind: str
    message: str
    param: str | None = None
    code: str | int | None = None
    retry_after: int | None = None
    anthropic_message: str | None = None
    allow: str | None = None

    @property
    def headers(self) -> dict[str, str]:
        given = {"Retry-After": self.retry_after, "Allow": self.allow}
        return {name: str(value) for name, value in given.items() if value is not None}

    def openai(self) -> dict[str, Any]:
        code = self.status if self.code is None else self.code
        return {"error": {"message": self.message, "type": self.kind, "param": self.param, "code": code}}

    def anthropic(self) -> dict[str, Any]:
        kind = _ANTHROPIC_TYPES.get(self.status, "api_error")
        return {"type": "error", "error": {"type": kind, "message": self.anthropic_message or self.message}}


def failure_of(error: BaseException) -> Failure:
    """Map any exception; what is not ours is logged with its traceback and answered by a plain 500."""
    if isinstance(error, ContextLengthError):
        return Failure(
            error.status,
            error.kind,
            str(error),
            error.param,
            error.code,
            anthropic_message=f"prompt is too long: {error.tokens} tokens > {error.limit} maximum",
        )
    if isinstance(error, RequestError):
        return Failure(error.status, error.kind, str(error), error.param, error.code)
    if isinstance(error, ValidationError):
        return _validation(error)
    if isinstance(error, HTTPException):
        return _routing(error)
    if isinstance(error, OverloadedError):
        return Failure(503, "ServiceUnavailableError", str(error), retry_after=error.retry_after)
    if isinstance(error, EngineDeadError):
        return Failure(500, "InternalServerError", str(error) or "The engine has stopped; restart the server.")
    if isinstance(error, EngineError):
        log.error("request failed: %s", error)  # the engine has logged the traceback
        return Failure(500, "InternalServerError", str(error))
    if isinstance(error, UserError):
        return Failure(400, "BadRequestError", str(error))
    log.error("request failed", exc_info=error)
    return Failure(500, "InternalServerError", f"Internal error ({type(error).__name__}); the server's log has more.")


def _routing(error: HTTPException) -> Failure:
    """What the router itself refuses: a path or a method that does not exist."""
    kinds = {404: "NotFoundError", 405: "MethodNotAllowedError"}
    words = {404: "This path does not exist here; GET /openapi.json lists those that do.", 405: "Wrong method."}
    allowed = (error.headers or {}).get("Allow")
    message = f"This path takes {allowed}." if allowed else words.get(error.status_code, str(error.detail))
    return Failure(error.status_code, kinds.get(error.status_code, "BadRequestError"), message, allow=allowed)


def _validation(error: ValidationError) -> Failure:
    first = error.errors(include_url=False, include_input=False, include_context=False)[0]
    path = ".".join(["body", *(str(part) for part in first["loc"])])
    more = error.error_count() - 1
    message = f"{path}: {first['msg']}" + (f" (and {more} more)" if more else "")
    return Failure(400, "Bad Request", message, path)
