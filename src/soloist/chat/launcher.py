"""Starts a server in the background for the length of a chat, and stops it again.

The child leads its own session, so Ctrl-C in the terminal reaches the chat only. It watches its stdin, whose other
end this process holds: however the chat ends, the server ends too. Its output goes to a log file.
"""

from __future__ import annotations

import os
import selectors
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from soloist.errors import SoloistError, UserError
from soloist.progress import READY, Progress, parse
from soloist.settings import KNOBS, Settings

STOP_SECONDS = 5.0
POLL_SECONDS = 0.02


def listening(settings: Settings) -> bool:
    """True when something accepts connections at the server's address."""
    try:
        with socket.create_connection(settings.address, timeout=1):
            return True
    except OSError:
        return False


@dataclass
class Server:
    """A server this process started; `progress_fd` is the reading end of its progress pipe."""

    process: subprocess.Popen[bytes]
    progress_fd: int
    log: Path

    def wait(self, settings: Settings, progress: Progress) -> None:
        """Return once the server accepts connections, passing its progress on.

        Raises UserError or SoloistError with the server's own words if it ends before that.
        """
        os.set_blocking(self.progress_fd, False)
        pending = b""
        with selectors.DefaultSelector() as selector, os.fdopen(self.progress_fd, "rb", buffering=0) as pipe:
            selector.register(pipe, selectors.EVENT_READ)
            while not listening(settings):
                if self.process.poll() is not None:
                    raise self._early_end()
                if not selector.get_map():
                    time.sleep(POLL_SECONDS)
                elif selector.select(POLL_SECONDS):
                    data = pipe.read() or b""
                    if not data:
                        selector.unregister(pipe)
                    *whole, pending = (pending + data).split(b"\n")
                    for line in whole:
                        if report := parse(line.decode(errors="replace")):
                            progress(*report)
        progress(READY, 1, 1)

    def stop(self) -> None:
        """End the server, politely, then by force. The log of one that ended by itself is kept."""
        died = self.process.poll() is not None
        self.process.terminate()
        if self.process.stdin:
            self.process.stdin.close()
        try:
            self.process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        if not died:
            self.log.unlink(missing_ok=True)

    def last_words(self, lines: int = 15) -> str:
        """The end of the server's log."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])

    def _early_end(self) -> SoloistError:
        code = self.process.returncode
        words = self.last_words() or f"It printed nothing; see {self.log}."
        if code == 2:
            return UserError(f"The server refused to start:\n{words}")
        return SoloistError(f"The server ended while starting (exit code {code}):\n{words}")


def start(settings: Settings) -> Server:
    """Start `soloist serve` with the same settings; return at once."""
    # Flags travel as environment variables, which win over .env just as flags do, and which `ps` does not show.
    flags = {
        knob.env: knob.show(getattr(settings, name))
        for name, knob in KNOBS.items()
        if settings.origins.get(name) == "flag"
    }
    reading, writing = os.pipe()
    output, log = tempfile.mkstemp(prefix=f"soloist-{settings.port}-", suffix=".log")
    try:
        process = subprocess.Popen(
            [sys.executable, "-m", "soloist", "serve", "--progress-fd", str(writing)],
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=output,
            pass_fds=(writing,),
            env={**os.environ, **flags},
            start_new_session=True,
        )
    finally:
        os.close(writing)
        os.close(output)
    return Server(process, reading, Path(log))
