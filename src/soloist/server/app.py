"""The application: routes, middleware in one visible list, and one handler per kind of error."""

from __future__ import annotations

from fastapi import FastAPI, Request
from pydantic import BaseModel, ValidationError
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect
from starlette.responses import Response

from soloist.errors import SoloistError
from soloist.server.auth import ApiKeys
from soloist.server.body import BodyLimit
from soloist.server.errors import failure_of
from soloist.server.protocol.anthropic import CountRequest, MessagesRequest
from soloist.server.protocol.chat import ChatRequest
from soloist.server.protocol.completions import CompletionRequest
from soloist.server.protocol.responses import ResponsesRequest
from soloist.server.protocol.tokenize import DetokenizeRequest, TokenizeRequest
from soloist.server.reply import json_response
from soloist.server.routes import anthropic, models, openai_chat, openai_completions, ops, responses, tokenize
from soloist.server.schema import install
from soloist.server.service import Service
from soloist.server.stream import ClientGone

_BODIES: list[type[BaseModel]] = [
    ChatRequest,
    CompletionRequest,
    MessagesRequest,
    CountRequest,
    ResponsesRequest,
    TokenizeRequest,
    DetokenizeRequest,
]
_ROUTERS = [
    openai_chat.router,
    openai_completions.router,
    anthropic.router,
    responses.router,
    models.router,
    tokenize.router,
    ops.router,
]


def build_app(service: Service) -> FastAPI:
    """The ASGI application of one service. Nothing is global: two apps can live in one process."""
    options = service.options
    middleware = [
        Middleware(
            CORSMiddleware,
            allow_origins=list(options.cors_origins),
            allow_methods=["*"],
            allow_headers=["*"],
            expose_headers=["x-soloist-ignored"],
        ),
        *([Middleware(ApiKeys, keys=options.api_keys)] if options.api_keys else []),
        Middleware(BodyLimit, limit=options.max_body),
    ]
    app = FastAPI(title="Soloist", version=ops.package_version(), middleware=middleware, docs_url=None, redoc_url=None)
    app.state.service = service
    app.state.draining = False
    for router in _ROUTERS:
        app.include_router(router)
    for kind in (SoloistError, ValidationError, HTTPException):
        app.add_exception_handler(kind, _answer)
    app.add_exception_handler(Exception, _answer)
    app.add_exception_handler(ClientGone, _gone)  # before the reply was complete
    app.add_exception_handler(ClientDisconnect, _gone)  # before the body was
    install(app, ops.package_version(), _BODIES)
    return app


async def _answer(request: Request, error: Exception) -> Response:
    return json_response(failure_of(error), request.url.path)


async def _gone(request: Request, error: Exception) -> Response:
    return Response(status_code=499)
