"""A word to the running server, for commands that steer it."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from typing import Any

from soloist.errors import SoloistError, UserError
from soloist.settings import from_process

TIMEOUT_S = 600.0  # waking a large model from a slow disk takes minutes


def post(path: str, url: str | None, key: str | None) -> dict[str, Any]:
    """The JSON a POST is answered with. Raises UserError for what a person can mend, SoloistError for the rest."""
    settings = from_process()
    base = (url or settings.url).rstrip("/").removesuffix("/v1")
    key = key or next(iter(settings.api_key), None)
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    try:
        request = urllib.request.Request(base + path, method="POST", headers=headers)
        with urllib.request.urlopen(request, timeout=TIMEOUT_S) as reply:
            return _object(reply.read(), base)
    except urllib.error.HTTPError as error:
        raise _refusal(error.code, error.read(), base) from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "reason", error)
        raise UserError(f"No server answers at {base} ({reason}).", "Start one with `soloist serve`.") from None


def _object(body: bytes, base: str) -> dict[str, Any]:
    try:
        found = json.loads(body)
    except ValueError:
        found = None
    if not isinstance(found, dict) or "state" not in found:
        raise UserError(f"What answers at {base} is not Soloist.", "Give the --url of a Soloist server.")
    return found


def _refusal(status: int, body: bytes, base: str) -> SoloistError:
    if status == 401:
        return UserError(f"{base} refuses the key.", "Set API_KEY to the server's, or pass --key.")
    try:
        return SoloistError(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return UserError(
            f"What answers at {base} is not Soloist (status {status}).", "Give the --url of a Soloist server."
        )
