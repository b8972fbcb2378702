"""Notices a draft source whose guesses have stopped being right, and says so.

A drafter that is wrong costs no text, only time, so nobody sees it: a head quantised badly, a drafter of another
model or a damaged cache all look like a slow machine. With sound weights a run of `QUIET` steps that drafted and had
nothing accepted does not happen: where one first draft in five is right, its odds are 5e-10. Steps count over all
requests, for the gain rule soon stops drafting within one.
"""

from __future__ import annotations

import logging
from collections.abc import Collection

log = logging.getLogger("soloist.drafting")

QUIET = 96


class AcceptanceWatch:
    """Counts, per source, the steps in a row in which it drafted and nobody's draft was accepted.

    A step in which another source was right says nothing: during a copy the lookup takes every row that counts.
    """

    def __init__(self, quiet: int = QUIET) -> None:
        self._quiet = quiet
        self._barren: dict[str, int] = {}

    def observe(self, drafted: Collection[str], accepted: Collection[str]) -> None:
        """One step of one request: the sources its proposal came from, and those of its accepted nodes."""
        for source in accepted:
            if self._barren.get(source, 0) >= self._quiet:
                log.info("Drafts of %s are accepted again.", source)
            self._barren[source] = 0
        if accepted:
            return
        for source in set(drafted):
            self._barren[source] = self._barren.get(source, 0) + 1
            if self._barren[source] == self._quiet:
                log.warning("%s", self._sentence(source))

    @property
    def sentences(self) -> tuple[str, ...]:
        """What is wrong now, one sentence per source. Safe on any thread."""
        return tuple(self._sentence(s) for s, steps in sorted(self._barren.copy().items()) if steps >= self._quiet)

    def _sentence(self, source: str) -> str:
        return (
            f"No draft of {source} was accepted in its last {self._quiet} steps or more: answers are right but slow. "
            "`soloist inspect` shows whether the drafter belongs to this checkpoint."
        )
