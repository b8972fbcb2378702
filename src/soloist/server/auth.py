"""API keys: who may call the paths that spend compute.

With keys configured, `/v1/*`, `/tokenize`, `/detokenize`, `/sleep` and `/wake_up` need `Authorization: Bearer KEY` or
`x-api-key: KEY`; health, readiness, version, metrics and the status page stay open.
"""

from __future__ import annotations

import hmac
import ipaddress
import logging
from collections.abc import Sequence

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from soloist.errors import RequestError
from soloist.server.errors import failure_of
from soloist.server.reply import json_response

log = logging.getLogger("soloist.server")

_PROTECTED = ("/v1/", "/tokenize", "/detokenize", "/sleep", "/wake_up")


class ApiKeys:
    """ASGI middleware. Every configured key is compared, in constant time, so that timing tells nothing."""

    def __init__(self, app: ASGIApp, keys: Sequence[str]) -> None:
        self.app = app
        self._keys = [key.encode() for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"].startswith(_PROTECTED) and not self._known(Headers(scope=scope)):
            error = RequestError(
                "The API key is missing or wrong.",
                "Send it as `Authorization: Bearer KEY`.",
                status=401,
                kind="AuthenticationError",
                code="invalid_api_key",
            )
            await json_response(failure_of(error), scope["path"])(scope, receive, send)
            return
        await self.app(scope, receive, send)

    def _known(self, headers: Headers) -> bool:
        scheme, _, bearer = headers.get("authorization", "").partition(" ")
        given = [headers.get("x-api-key", "")]
        if scheme.lower() == "bearer":
            given.append(bearer.strip())
        matches = [hmac.compare_digest(key, text.encode()) for key in self._keys for text in given if text]
        return any(matches)


def warn_if_open(host: str, keys: Sequence[str]) -> None:
    """Log a warning when the server can be reached from other machines without a key."""
    if keys or host == "localhost":
        return
    try:
        loopback = ipaddress.ip_address(host).is_loopback
    except ValueError:
        loopback = False
    if not loopback:
        log.warning("Listening on %s without API_KEY: anyone who reaches this address can use the model.", host)
