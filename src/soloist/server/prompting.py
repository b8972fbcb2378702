"""What a rendered prompt says about the answer that will follow it."""

from __future__ import annotations

from collections.abc import Sequence

from soloist.server.parsers.parts import THINK_CLOSE, THINK_OPEN
from soloist.server.tokenizer import Tokenizer

TURN_START = "<|im_start|>"


def thinking_left_open(tokenizer: Tokenizer, prompt: Sequence[int]) -> bool:
    """True when the prompt's last turn leaves a think block open, so that generation starts inside it.

    Only the last turn counts: a user who writes `<think>` in a message opens nothing.
    """
    opened, closed = tokenizer.id_of(THINK_OPEN), tokenizer.id_of(THINK_CLOSE)
    start = tokenizer.id_of(TURN_START)
    for token in reversed(prompt):
        if token == opened:
            return True
        if token in (closed, start):
            return False
    return False
