"""Request bodies in the OpenAPI document: routes read raw JSON, so their schemas are attached here."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

_TEMPLATE = "#/components/schemas/{model}"


def body_of(model: type[BaseModel]) -> dict[str, Any]:
    """`openapi_extra` of a route whose JSON body is `model`."""
    return {
        "requestBody": {
            "required": True,
            "content": {"application/json": {"schema": {"$ref": _TEMPLATE.format(model=model.__name__)}}},
        }
    }


def install(app: FastAPI, version: str, models: list[type[BaseModel]]) -> None:
    """Make `app.openapi()` include the components of `models`."""

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            document = get_openapi(title="Soloist", version=version, routes=app.routes)
            _, schemas = models_json_schema([(m, "validation") for m in models], ref_template=_TEMPLATE)
            components = document.setdefault("components", {}).setdefault("schemas", {})
            components.update(schemas.get("$defs", {}))
            app.openapi_schema = document
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]
