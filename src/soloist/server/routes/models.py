"""GET /v1/models and /v1/models/{id}."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from soloist.server.reply import JsonReply
from soloist.server.service import Service

router = APIRouter()


def _card(service: Service, name: str) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": service.options.created,
        "owned_by": "soloist",
        "root": service.options.root,
        "parent": None,
        "max_model_len": service.engine.max_len,
        "cache_unit": service.options.cache_unit,
    }


@router.get("/v1/models")
async def models(request: Request) -> Response:
    """Every alias of the served model, with the context size in `max_model_len`."""
    service: Service = request.app.state.service
    return JsonReply({"object": "list", "data": [_card(service, name) for name in service.options.names]})


@router.get("/v1/models/{name:path}")
async def model(request: Request, name: str) -> Response:
    """One alias; 404 for others."""
    service: Service = request.app.state.service
    return JsonReply(_card(service, service.check_model(name)))
