"""One chat from start to end: find or start a server, then question, answer, status line, again."""

from __future__ import annotations

import contextlib
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from types import FrameType

from soloist import progress
from soloist.chat import launcher
from soloist.chat.session import Session
from soloist.errors import SoloistError, UserError
from soloist.settings import Settings

REPEAT_S = 0.2


def chat(settings: Settings, url: str | None = None, system: str = "", may_start: bool = True) -> None:
    """Talk to the server at `url`, or at the settings' address, starting one there if none answers.

    With a terminal on stdin this is a conversation; otherwise all of stdin is one question, and the answer's text is
    all that goes to stdout.
    """
    with _server(settings, url, may_start) as target:
        # Imported here, so that a server that has to be started is already loading meanwhile.
        from soloist.chat.client import Client
        from soloist.chat.talk import Talk

        client = Client(target, settings.api_key[0] if settings.api_key else None)
        try:
            talk = Talk(client, client.served(), Session(system=system))
            if sys.stdin.isatty():
                talk.converse()
            else:
                talk.answer_once(sys.stdin.read())
        finally:
            client.close()


@contextlib.contextmanager
def _server(settings: Settings, url: str | None, may_start: bool) -> Iterator[str]:
    """The address to talk to; a server started for it is stopped at the end of the block."""
    if url is not None:
        yield url
        return
    target = settings.url
    if launcher.listening(settings):
        _mention_unused(settings, target)
        yield target
        return
    if not may_start:
        raise UserError(f"No server answers at {target}.", "Start one with `soloist serve`, or leave out --no-start.")

    server = launcher.start(settings)
    try:
        with _ends_on_hangup():
            # The client's imports take a third of the time the server needs to load: do them side by side.
            import soloist.chat.talk  # noqa: F401

            with progress.bar(f"Loading {settings.model}") as shown:
                server.wait(settings, shown)
            yield target
    except SoloistError as error:
        if server.process.poll() not in (None, 2):
            print(f"soloist: the server ended; its log is {server.log}", file=sys.stderr)
        raise error
    finally:
        server.stop()


@contextlib.contextmanager
def _ends_on_hangup() -> Iterator[None]:
    """Turn SIGTERM and SIGHUP into an orderly exit, so that the server is stopped.

    A handler runs between two instructions of Python, so one whose signal comes just before readline waits for keys
    waits for a key itself, and what it raises inside a finaliser goes no further. A thread, woken by the signal's own
    byte, repeats the signal until the block is left.
    """

    def leave(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    def repeat() -> None:
        with woken:
            while received := woken.recv(1):
                while received[0] in signals and not left.wait(REPEAT_S):
                    signal.pthread_kill(main, received[0])

    signals = (signal.SIGTERM, signal.SIGHUP)
    left, main = threading.Event(), threading.get_ident()
    woken, waking = socket.socketpair()
    waking.setblocking(False)
    threading.Thread(target=repeat, daemon=True).start()
    outer = signal.set_wakeup_fd(waking.fileno(), warn_on_full_buffer=False)
    before = [signal.signal(s, leave) for s in signals]
    try:
        yield
    finally:
        left.set()
        for s, handler in zip(signals, before, strict=True):
            signal.signal(s, handler)
        signal.set_wakeup_fd(outer)
        waking.close()


def _mention_unused(settings: Settings, target: str) -> None:
    """Flags that describe a server have no effect on one that already runs."""
    unused = [n for n, origin in settings.origins.items() if origin == "flag" and n not in ("host", "port", "api_key")]
    if unused:
        names = ", ".join(n.upper() for n in unused)
        print(f"soloist: a server already answers at {target}; {names} has no effect on it.", file=sys.stderr)
