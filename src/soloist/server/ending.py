"""The end of a drain: what still runs after DRAIN_S is ended in its protocol's own words, then the wire is cut."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable
from typing import Any

from soloist.server.service import Service

CUT_S = 2.0  # from the error events to the cutting of connections that nobody reads

log = logging.getLogger("soloist.server")


async def end_after(service: Service, drain_s: float, connections: Iterable[Any]) -> None:
    """Let answers run for `drain_s` seconds, then end them; cut (uvicorn's) `connections` that are left after CUT_S.

    Every stream gets an error event of its protocol, every other request a 503, and late ones are refused.
    """
    await asyncio.sleep(drain_s)
    service.live.stopping = True
    cut = [request for _, requests in service.live.open.values() for request in requests]
    if cut:
        log.warning("%d answers were still running after DRAIN_S (%g s); they end with an error.", len(cut), drain_s)
    for request in cut:
        service.engine.cancel(request)
    await asyncio.sleep(CUT_S)
    for connection in list(connections):
        if connection.transport is not None:
            connection.transport.abort()
