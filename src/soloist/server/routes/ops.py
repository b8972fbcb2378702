"""Health, readiness, version, metrics: what supervisors and dashboards ask."""

from __future__ import annotations

import asyncio
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as installed_version
from importlib.resources import files

from fastapi import APIRouter, Request
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.responses import Response

from soloist.errors import RequestError
from soloist.server.face import Sleeps
from soloist.server.reply import JsonReply
from soloist.server.service import Service

router = APIRouter()

_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'; img-src data:"


def package_version() -> str:
    """The installed package's version; "0" when run from a source tree that is not installed."""
    try:
        return installed_version("soloist")
    except PackageNotFoundError:
        return "0"


@router.get("/health")
@router.get("/ping")
@router.post("/ping")
async def health(request: Request) -> Response:
    """200 while the engine lives and moves; 503 once its thread has ended or one step hangs."""
    service: Service = request.app.state.service
    return Response(status_code=200 if service.trouble() is None else 503)


@router.get("/ready")
async def ready(request: Request) -> Response:
    """200 when a request sent now would be admitted, also by waking the engine; else 503 with the reason."""
    service: Service = request.app.state.service
    status = service.engine.status()
    cannot_wake = f"cannot wake: {status.fault}" if status.fault else None
    reason = service.trouble() or ("draining" if request.app.state.draining else cannot_wake)
    body = {
        "ready": reason is None,
        "reason": reason,
        "state": status.wakefulness,
        "running": status.running,
        "waiting": status.waiting,
        "degraded": list(status.degraded),
    }
    return JsonReply(body, status_code=200 if reason is None else 503)


@router.post("/sleep")
async def sleep(request: Request) -> Response:
    """Give the card back; answers when it is free. 503 while requests run or wait."""
    await asyncio.to_thread(_sleeper(request).sleep)
    return _wakefulness(request)


@router.post("/wake_up")
async def wake_up(request: Request) -> Response:
    """Take the card again; answers when requests can run. 503 when the card cannot be had."""
    await asyncio.to_thread(_sleeper(request).wake)
    return _wakefulness(request)


@router.get("/is_sleeping")
async def is_sleeping(request: Request) -> Response:
    """Whether the next request has to wake the engine first."""
    return _wakefulness(request)


def _sleeper(request: Request) -> Sleeps:
    sleeper: Sleeps | None = request.app.state.service.sleeper
    if sleeper is None:
        raise RequestError("This engine does not sleep.", status=501, kind="NotImplementedError")
    return sleeper


def _wakefulness(request: Request) -> Response:
    state = request.app.state.service.engine.status().wakefulness
    return JsonReply({"is_sleeping": state != "awake", "state": state})


@router.get("/status")
async def status(request: Request) -> Response:
    """What the status page shows: no prompt, no answer, no key."""
    service: Service = request.app.state.service
    now = service.engine.status()
    body = {
        "model": service.options.names[0],
        "context": service.engine.max_len,
        "trouble": service.trouble(),
        "draining": request.app.state.draining,
        "state": now.wakefulness,
        "running": now.running,
        "waiting": now.waiting,
        "parked": now.parked,
        "pages_used": now.pages_used,
        "pages_total": now.pages_total,
        "slots_used": now.slots_used,
        "slots_total": now.slots_total,
        "degraded": list(now.degraded),
        "knobs": dict(now.knobs),
        "counters": dict(now.counters),
        **service.live.snapshot(),
    }
    return JsonReply(body)


@router.get("/", include_in_schema=False)
async def page() -> Response:
    """The status page: one file, nothing from elsewhere."""
    html = files("soloist.server").joinpath("page/status.html").read_bytes()
    return Response(html, media_type="text/html", headers={"Content-Security-Policy": _POLICY})


@router.get("/version")
async def version() -> Response:
    """The package's version."""
    return JsonReply({"version": package_version()})


@router.get("/props")
async def props(request: Request) -> Response:
    """What this server is: the model's context, the knobs as resolved, the parts in use, what is degraded."""
    service: Service = request.app.state.service
    status = service.engine.status()
    body = {
        "version": package_version(),
        "models": list(service.options.names),
        "max_model_len": service.engine.max_len,
        "knobs": dict(status.knobs),
        "slots": status.slots_total,
        "pages": status.pages_total,
        "page_tokens": service.options.cache_unit,
        "degraded": list(status.degraded),
    }
    return JsonReply(body)


@router.get("/metrics")
async def metrics(request: Request) -> Response:
    """Prometheus text format."""
    service: Service = request.app.state.service
    return Response(service.meters.exposition(), media_type=CONTENT_TYPE_LATEST)
