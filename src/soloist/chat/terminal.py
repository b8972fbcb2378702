"""The terminal: lines in, styled text out. Everything the model writes passes `printable` first."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TextIO

BLOCK = '"""'
# C0 and C1 control characters except tab and newline: escape sequences in a model's text must not reach the terminal.
CONTROLS = dict.fromkeys([*range(0x09), *range(0x0B, 0x20), *range(0x7F, 0xA0)])


def printable(text: str) -> str:
    """`text` without control characters."""
    return text.translate(CONTROLS)


class Screen:
    """Writes to one stream; styles only where it is a terminal and NO_COLOR is unset."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self.is_terminal = stream.isatty()
        self._styled = self.is_terminal and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
        self._at_line_start = True

    def write(self, text: str, style: str = "") -> None:
        """Write text as it is; `style` is an SGR code such as "2" (dim) or "1;36"."""
        text = printable(text)
        if not text:
            return
        self._at_line_start = text.endswith("\n")
        self._stream.write(f"\x1b[{style}m{text}\x1b[0m" if style and self._styled else text)
        self._stream.flush()

    def line(self, text: str = "", style: str = "") -> None:
        """Write text on a line of its own."""
        self.end_line()
        self.write(text + "\n", style)

    def end_line(self) -> None:
        """Go to the start of a line, if not there already."""
        if not self._at_line_start:
            self.write("\n")

    def prompt(self, text: str, style: str) -> str:
        """A prompt for `input`, its styling marked as zero-width for readline."""
        return f"\x01\x1b[{style}m\x02{text}\x01\x1b[0m\x02" if self._styled else text


def read_message(ask: Callable[[str], str], first: str, more: str) -> str:
    r"""One message of one or more lines from `ask(prompt)`.

    A line that ends in a backslash goes on in the next. A line that starts with three quotes opens a block that the
    next three quotes at the end of a line close. Raises EOFError at the end of input.
    """
    line = ask(first)
    if line.lstrip().startswith(BLOCK):
        text = line.lstrip().removeprefix(BLOCK)
        while not text.rstrip().endswith(BLOCK):
            text += "\n" + ask(more)
        return text.rstrip().removesuffix(BLOCK).strip("\n")
    while line.endswith("\\"):
        line = line[:-1] + "\n" + ask(more)
    return line


def remember_lines() -> None:
    """Give `input` line editing and a history that outlives the session, where readline exists."""
    try:
        import readline
    except ImportError:
        return
    state = Path(os.environ.get("XDG_STATE_HOME") or "~/.local/state").expanduser() / "soloist"
    history = state / "chat_history"
    try:
        state.mkdir(parents=True, exist_ok=True)
        if history.exists():
            readline.read_history_file(history)
    except OSError as error:
        print(f"soloist: no input history ({error}).", file=sys.stderr)
        return

    import atexit

    readline.set_history_length(1000)
    atexit.register(_save_history, history)


def _save_history(path: Path) -> None:
    import contextlib
    import readline

    # The session is over and its answers are on the screen: a full disk is no reason for a traceback.
    with contextlib.suppress(OSError):
        readline.write_history_file(path)
