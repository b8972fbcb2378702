"""What a request may ask of the sampler. Plain values, validated once, before the engine sees them."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from soloist.errors import RequestError

MAX_LOGPROBS = 20


@dataclass(frozen=True)
class ThinkingBudget:
    """Force `close_ids` once `tokens` tokens were generated inside the think block.

    The block is open from the first generated token; `end_id` (`</think>`) closes it by itself, and so does each of
    `also_ends` (a tool call begun without closing the block: forcing the closing tag into it would break the call).
    """

    tokens: int
    close_ids: tuple[int, ...]
    end_id: int
    also_ends: tuple[int, ...] = ()


@dataclass(frozen=True)
class SamplingParams:
    """Sampling fields of one sequence, in the order of spec: see `sampling/processors.py` for what each does.

    `temperature` 0 is greedy. `top_k` 0 is off. `seed` None means one is drawn at admission.
    `logprobs` None = none; 0 = the emitted token only; n = the n best as well (<= 20).
    `stop_ids` end the sequence (EOS included unless the request ignores it); `min_tokens` masks them.
    """

    max_tokens: int = 16
    min_tokens: int = 0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] = field(default_factory=dict)
    allowed_ids: tuple[int, ...] | None = None
    bad_words: tuple[tuple[int, ...], ...] = ()
    stop_ids: tuple[int, ...] = ()
    seed: int | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    thinking: ThinkingBudget | None = None

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0

    def validate(self, vocab_size: int) -> SamplingParams:
        """Return self, or raise RequestError naming the field and its legal range."""

        def check(ok: bool, param: str, rule: str) -> None:
            if not ok:
                raise RequestError(f"{param} must be {rule}.", param=param)

        finite = all(
            math.isfinite(x)
            for x in (
                self.temperature,
                self.top_p,
                self.min_p,
                self.repetition_penalty,
                self.presence_penalty,
                self.frequency_penalty,
            )
        )
        check(finite, "temperature", "finite, like every sampling field")
        check(self.max_tokens >= 1, "max_tokens", "at least 1")
        check(0 <= self.min_tokens <= self.max_tokens, "min_tokens", "between 0 and max_tokens")
        check(self.temperature >= 0, "temperature", "at least 0")
        check(self.top_k >= 0, "top_k", "0 or -1 (off) or at least 1")
        check(0 < self.top_p <= 1, "top_p", "in (0, 1]")
        check(0 <= self.min_p <= 1, "min_p", "in [0, 1]")
        check(self.repetition_penalty > 0, "repetition_penalty", "above 0")
        check(-2 <= self.presence_penalty <= 2, "presence_penalty", "in [-2, 2]")
        check(-2 <= self.frequency_penalty <= 2, "frequency_penalty", "in [-2, 2]")
        for name, n in (("top_logprobs", self.logprobs), ("prompt_logprobs", self.prompt_logprobs)):
            check(n is None or 0 <= n <= MAX_LOGPROBS, name, f"between 0 and {MAX_LOGPROBS}")
        check(self.seed is None or -(2**63) <= self.seed < 2**63, "seed", "a 64-bit integer")
        check(self.allowed_ids is None or len(self.allowed_ids) > 0, "allowed_token_ids", "a list of at least one id")
        for name, ids in (
            ("logit_bias", self.logit_bias),
            ("allowed_token_ids", self.allowed_ids or ()),
            ("stop_token_ids", self.stop_ids),
            ("bad_words", [t for w in self.bad_words for t in w]),
        ):
            check(all(0 <= i < vocab_size for i in ids), name, f"made of token ids below {vocab_size}")
        check(all(self.bad_words), "bad_words", "made of non-empty words")
        if self.thinking is not None:
            check(self.thinking.tokens >= 0, "thinking_token_budget", "at least 0")
            check(
                self.thinking.end_id in self.thinking.close_ids
                and all(0 <= i < vocab_size for i in self.thinking.close_ids),
                "thinking_token_budget",
                "used with a model whose close sequence holds its end-of-thinking token",
            )
        return self
