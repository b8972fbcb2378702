"""`soloist serve`: claim the port, read the checkpoint, build the engine, serve until told to stop.

The port is claimed before weights are read, so that a taken port fails in a second; connections are refused until the
engine stands, and until then Ctrl-C ends the process at once. SIGTERM drains: no new connections, running answers go on
for at most DRAIN_S and then end with an error event; the exit status is 0 either way. When the engine's thread ends,
every stream gets an error event and the process exits with 1, for the supervisor to start it again.
"""

from __future__ import annotations

import asyncio
import errno
import hashlib
import logging
import os
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import FrameType
from typing import TYPE_CHECKING

from soloist.errors import SettingError
from soloist.progress import READY, Progress
from soloist.server.auth import warn_if_open
from soloist.server.load import server_options
from soloist.settings import Settings

if TYPE_CHECKING:
    import uvicorn

    from soloist.engine.engine import Engine
    from soloist.engine.kept import Kept
    from soloist.server.face import EngineFace
    from soloist.server.service import Service

_GRACE_S = 1.0  # from the engine's end to the process's: time for the error events to leave

log = logging.getLogger("soloist.server")


def run(settings: Settings, progress: Progress) -> None:
    """Serve until a signal; raises UserError for what a person can fix, exits with 1 when the engine ends."""
    _log_to_stderr(settings.log_level)
    listener = claim(settings.host, settings.port)
    try:
        with _interruptible():
            service, engine_close = build_service(settings, progress)
        warn_if_open(settings.host, settings.api_key)

        def ready() -> None:
            progress(READY, 1, 1)  # a progress bar ends here, and what is said afterwards stands below it
            _announce(service, settings)

        server = _server(service, settings, ready)
        try:
            asyncio.run(server.serve(sockets=[listener]))
        finally:
            if not service.engine.alive:
                # After a device fault nothing below can be trusted to shut down, nor be waited for.
                logging.shutdown()
                os._exit(1)
            engine_close()
    finally:
        listener.close()


@contextmanager
def _interruptible() -> Iterator[None]:
    """Inside, Ctrl-C ends the process: a start works on a thread of its own, whose end Python would wait for."""
    before = signal.getsignal(signal.SIGINT)
    if before is not signal.default_int_handler:  # ignored, or somebody else's
        yield
        return

    def end(*_: object) -> None:
        if sys.stderr.isatty():
            print("\x1b[?25h", file=sys.stderr, flush=True)  # the cursor, which a progress bar hides
        os._exit(128 + signal.SIGINT)

    signal.signal(signal.SIGINT, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def build_service(settings: Settings, progress: Progress) -> tuple[Service, Callable[[], None]]:
    """(service, function that stops its engine). Text files are read first: their faults show before weights load."""
    from soloist.engine.build import build_engine, model_directory
    from soloist.engine.sleep import Sleeper
    from soloist.server.service import Service
    from soloist.server.template import ChatTemplate
    from soloist.server.tokenizer import Tokenizer

    progress("tokenizer", 0, 1)
    directory = model_directory(settings.model)
    tokenizer, template = Tokenizer.load(directory), ChatTemplate.load(directory)
    options = server_options(settings, directory)
    progress("tokenizer", 1, 1)

    def build(kept: Kept | None) -> Engine:
        return build_engine(settings, progress if kept is None else None, keep_sessions=True, kept=kept)

    engine = Sleeper(build, idle_s=60 * settings.idle_release_min, max_queue=settings.max_queue)
    options = replace(options, fingerprint=fingerprint(engine))
    return Service(engine, tokenizer, template, options, sleeper=engine), engine.close


def fingerprint(engine: EngineFace) -> str:
    """What `system_fingerprint` says: equal for equal knobs, of which the numerics are a part."""
    knobs = sorted(engine.status().knobs.items())
    return f"soloist-{hashlib.sha256(repr(knobs).encode()).hexdigest()[:12]}"


def claim(host: str, port: int) -> socket.socket:
    """A bound socket that does not listen yet. Raises SettingError when the address cannot be had."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            raise SettingError(f"Port {port} on {host} is taken.", "Stop the other server or choose PORT.") from None
        raise SettingError(f"Cannot listen on {host}:{port} ({error.strerror}).", "Choose another HOST.") from None
    listener.set_inheritable(False)
    return listener


def _server(service: Service, settings: Settings, on_ready: Callable[[], None]) -> uvicorn.Server:
    import uvicorn

    from soloist.server.app import build_app
    from soloist.server.ending import CUT_S, end_after

    app = build_app(service)

    class Draining(uvicorn.Server):
        """Tells /ready about a coming end, and ends when the engine does."""

        announced = False
        dead_ticks = 0

        def handle_exit(self, sig: int, frame: FrameType | None) -> None:
            # The signal is not recorded for uvicorn to raise again: the engine is still to be closed after serve().
            app.state.draining = True
            self.force_exit = self.force_exit or (self.should_exit and sig == signal.SIGINT)
            self.should_exit = True

        async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
            ending = asyncio.ensure_future(end_after(service, settings.drain_s, self.server_state.connections))
            await super().shutdown(sockets)
            ending.cancel()

        async def on_tick(self, counter: int) -> bool:
            if not self.announced:
                self.announced = True
                on_ready()
            if not service.engine.alive:
                self.dead_ticks += 1
                if self.dead_ticks == 1:
                    log.error("The engine has stopped; the server ends.")
                if self.dead_ticks * 0.1 >= _GRACE_S:
                    return True
            return await super().on_tick(counter)

    config = uvicorn.Config(
        app,
        log_config=None,
        log_level=settings.log_level,
        access_log=False,
        timeout_graceful_shutdown=settings.drain_s + int(CUT_S) + 3,  # never reached: `end_after` is there first
    )
    return Draining(config)


def _announce(service: Service, settings: Settings) -> None:
    host = f"[{settings.host}]" if ":" in settings.host else settings.host
    log.info(
        "serving %s on http://%s:%d (context %d tokens)",
        ", ".join(service.options.names),
        host,
        settings.port,
        service.engine.max_len,
    )
    for sentence in service.engine.status().degraded:
        log.warning("%s", sentence)


class _ToStderr(logging.Handler):
    """Writes to what sys.stderr is at the time: a progress bar replaces it while it is shown."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            print(self.format(record), file=sys.stderr, flush=True)
        except Exception:
            self.handleError(record)


def _log_to_stderr(level: str) -> None:
    handler = _ToStderr()
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s", "%H:%M:%S"))
    root = logging.getLogger("soloist")
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    root.propagate = False
