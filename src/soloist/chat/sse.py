"""Server-sent events, as far as chat completions use them: the `data:` payloads in order."""

from __future__ import annotations

from collections.abc import Iterable, Iterator


def payloads(lines: Iterable[str]) -> Iterator[str]:
    """The data of each event, from lines without their line ends; comments and other fields are skipped.

    Several data lines of one event are joined by newlines. An event cut off before its blank line is dropped.
    """
    data: list[str] = []
    for line in lines:
        if not line:
            if data:
                yield "\n".join(data)
                data = []
        elif line.startswith("data:"):
            data.append(line[5:].removeprefix(" "))
