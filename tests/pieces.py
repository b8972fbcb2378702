"""Texts of the model's XML form, cut into pieces in every way a stream may cut them."""

from __future__ import annotations

import re

from soloist.server.parsers.parts import MARKER_NAMES, Answer, Part
from soloist.server.text import Piece

_MARKERS = re.compile("(" + "|".join(map(re.escape, MARKER_NAMES)) + ")")


def pieces(text: str, cuts: list[int] | None = None) -> list[Piece]:
    """Structural tags as markers, the text between them cut at `cuts` (or whole)."""
    out: list[Piece] = []
    at = 0
    for run in _MARKERS.split(text):
        if run in MARKER_NAMES:
            out.append(Piece(run, MARKER_NAMES[run]))
        else:
            inner = sorted({c - at for c in cuts or [] if at < c < at + len(run)})
            out += [Piece(run[a:b]) for a, b in zip([0, *inner], [*inner, len(run)]) if run[a:b]]
        at += len(run)
    return out


def fold(parts: list[Part]) -> Answer:
    answer = Answer()
    for part in parts:
        answer.add(part)
    return answer
