"""Answers remembered by the ids they were generated with.

Sampled ids are often not what the tokenizer yields for the same text, and templates reformat arguments and thinking.
A history that is encoded afresh then differs from what the caches know, from the first such token on. So the server
keeps, for recent answers, the text that the history will render to once the answer is part of it, and the ids of
prompt and answer. A prompt that begins with such a text gets those ids for it.

Nothing is guessed: unless the rendered text is equal to the last character, the tokenizer's ids are used.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict


class Transcripts:
    """The most recent ones, at most `limit` characters in all. Not thread-safe: lives on the event loop.

    end   the text that ends a turn (`<|im_end|>`); what the template writes after it belongs to the next message
    """

    def __init__(self, end: str, limit: int = 16 << 20) -> None:
        self._end = end
        self._limit = limit
        self._size = 0
        self._ids: OrderedDict[str, array[int]] = OrderedDict()

    def put(self, text: str, ids: list[int]) -> None:
        """Remember that the history `text`, up to its last end of turn, stands for `ids`."""
        at = text.rfind(self._end)
        if at < 0:
            return
        text = text[: at + len(self._end)]
        self._drop(text)
        self._ids[text] = array("i", ids)
        self._size += len(text)
        while self._size > self._limit and self._ids:
            self._drop(next(iter(self._ids)))

    def splice(self, text: str) -> tuple[list[int], str]:
        """(ids of the longest remembered beginning of the text, the rest of the text)."""
        known = max((t for t in self._ids if text.startswith(t)), key=len, default=None)
        if known is None:
            return [], text
        self._ids.move_to_end(known)
        return self._ids[known].tolist(), text[len(known) :]

    def _drop(self, text: str) -> None:
        if self._ids.pop(text, None) is not None:
            self._size -= len(text)
