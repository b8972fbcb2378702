"""Server-sent events, as far as chat completions use them: the `data:` payloads in order.

Lines are split at newline bytes only: text may hold U+2028 and other characters that `str.splitlines` breaks at.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator


def payloads(chunks: Iterable[bytes]) -> Iterator[str]:
    """The data of each event in a byte stream, however it is cut; comments and other fields are skipped.

    Several data lines of one event are joined by newlines. An event cut off before its blank line is dropped.
    """
    data: list[str] = []
    for line in _lines(chunks):
        if not line:
            if data:
                yield "\n".join(data)
                data = []
        elif line.startswith(b"data:"):
            data.append(line[5:].removeprefix(b" ").decode())


def _lines(chunks: Iterable[bytes]) -> Iterator[bytes]:
    pending = b""
    for chunk in chunks:
        *whole, pending = (pending + chunk).split(b"\n")
        for line in whole:
            yield line.removesuffix(b"\r")
