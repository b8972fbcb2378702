"""Health, readiness, version, metrics: what supervisors and dashboards ask."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as installed_version

from fastapi import APIRouter, Request
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.responses import Response

from soloist.server.reply import JsonReply
from soloist.server.service import Service

router = APIRouter()


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
    """200 when a request sent now would be admitted; else 503 with the reason."""
    service: Service = request.app.state.service
    reason = service.trouble() or ("draining" if request.app.state.draining else None)
    status = service.engine.status()
    body = {
        "ready": reason is None,
        "reason": reason,
        "running": status.running,
        "waiting": status.waiting,
        "degraded": list(status.degraded),
    }
    return JsonReply(body, status_code=200 if reason is None else 503)


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
