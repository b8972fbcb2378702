"""A live uvicorn on a free port, in a thread: what the HTTP tests talk to."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections.abc import Iterator
from typing import Any

import uvicorn

from soloist.server.app import build_app
from soloist.server.options import ServerOptions
from soloist.server.service import Service
from soloist.server.template import ChatTemplate
from soloist.server.tokenizer import Tokenizer


class Live:
    """A running server: `url` for clients, `service` and `engine` to look inside."""

    def __init__(self, service: Service, url: str) -> None:
        self.service = service
        self.engine: Any = service.engine
        self.url = url


@contextlib.contextmanager
def serving(engine: Any, tokenizer: Tokenizer, template: ChatTemplate, **options: Any) -> Iterator[Live]:
    """Serve until the block ends; the engine is the caller's to close."""
    service = Service(engine, tokenizer, template, ServerOptions(**options))
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    config = uvicorn.Config(build_app(service), log_level="warning", lifespan="on", timeout_graceful_shutdown=2)
    server = uvicorn.Server(config)
    thread = threading.Thread(target=lambda: asyncio.run(server.serve(sockets=[listener])), daemon=True)
    thread.start()
    try:
        while not server.started and thread.is_alive():
            threading.Event().wait(0.005)
        yield Live(service, f"http://127.0.0.1:{port}")
    finally:
        server.should_exit = True
        thread.join(10)
        listener.close()
