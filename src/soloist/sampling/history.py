"""What the sampler must remember of one sequence: everything steps 1-4 of the processors look at.

A History stands at the end of the emitted tokens. `push` walks one draft down a path and `pop` comes
back, so a row of a proposal tree is always processed with exactly its ancestors counted; `advance`
makes an emitted token permanent. Cost: a few dictionary operations per token, nothing for options
that are off.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from soloist.errors import EngineError
from soloist.sampling.grammar import Grammar
from soloist.sampling.params import SamplingParams


class History:
    """Counts, suffix, budget and grammar state of one sequence; the same along any drafted path.

    `position` is the absolute index of the next token. The grammar, if any, is driven from here and by nobody else.
    """

    def __init__(self, params: SamplingParams, prompt: Sequence[int], vocab_size: int, grammar: Grammar | None = None):
        self.params = params
        self.vocab_size = vocab_size
        self.grammar = grammar
        self.output: list[int] = []
        self._prompt_tokens = len(prompt)
        self._pushed: list[bool] = []  # per pushed token: did the grammar take it
        self._end_of_thinking: int | None = None
        p = params
        self._counting = (p.repetition_penalty, p.presence_penalty, p.frequency_penalty) != (1.0, 0.0, 0.0)
        # True if steps 1-4 leave every logit of every row untouched.
        self.plain = not (
            self._counting
            or grammar is not None
            or p.allowed_ids is not None
            or p.min_tokens
            or p.logit_bias
            or p.bad_words
            or p.thinking is not None
        )
        if self._counting:
            self.seen = np.zeros(vocab_size, dtype=np.int32)  # occurrences in prompt + output
            self.seen += np.bincount(np.asarray(prompt, dtype=np.int64), minlength=vocab_size)[:vocab_size]
            self.counts = np.zeros(vocab_size, dtype=np.int32)  # occurrences in the output

    @property
    def position(self) -> int:
        return self._prompt_tokens + len(self.output)

    @property
    def counting(self) -> bool:
        """True if a penalty is on (then `seen` and `counts` exist)."""
        return self._counting

    @property
    def depth(self) -> int:
        """Drafts pushed and not popped."""
        return len(self._pushed)

    def push(self, token: int) -> None:
        """Walk one token down the path. A token the grammar refuses is a fault of the caller: it cannot be emitted."""
        taken = False
        if self.grammar is not None and token not in self.params.stop_ids:
            taken = self.grammar.advance(token)
            if not taken:
                raise EngineError(f"Token {token} at position {self.position} is not allowed by the grammar.")
        self._pushed.append(taken)
        thinking = self.params.thinking
        closes = thinking is not None and (token == thinking.end_id or token in thinking.also_ends)
        if closes and self._end_of_thinking is None:
            self._end_of_thinking = len(self.output)
        self.output.append(token)
        if self._counting:
            self.seen[token] += 1
            self.counts[token] += 1

    def pop(self, tokens: int = 1) -> None:
        """Undo the last `tokens` pushes."""
        for _ in range(tokens):
            token = self.output.pop()
            if self._pushed.pop():
                assert self.grammar is not None
                self.grammar.rollback(1)
            if self._end_of_thinking == len(self.output):
                self._end_of_thinking = None
            if self._counting:
                self.seen[token] -= 1
                self.counts[token] -= 1

    def advance(self, token: int) -> None:
        """Take an emitted token for good."""
        assert not self._pushed, "advance() while a path is pushed"
        self.push(token)
        self._pushed.clear()

    def forced_token(self) -> int | None:
        """The token the thinking budget dictates here, or None.

        Budget N: outputs 0..N-1 are free; unless one of them closed the block, outputs N.. are `close_ids`.
        """
        thinking = self.params.thinking
        if thinking is None:
            return None
        if self._end_of_thinking is not None and self._end_of_thinking < thinking.tokens:
            return None
        place = len(self.output) - thinking.tokens
        return thinking.close_ids[place] if 0 <= place < len(thinking.close_ids) else None

    def banned_words(self) -> list[int]:
        """Tokens that would complete one of `bad_words` after the output so far."""
        out = self.output
        return [
            word[-1]
            for word in self.params.bad_words
            if len(word) == 1 or (len(word) <= len(out) + 1 and tuple(out[1 - len(word) :]) == word[:-1])
        ]
