"""From request fields to `SamplingParams`: defaults, limits and the rules that join several fields."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from soloist.errors import ContextLengthError, RequestError
from soloist.sampling.params import SamplingParams, ThinkingBudget
from soloist.sampling.rng import derive_seed
from soloist.server.protocol.common import SamplingFields
from soloist.server.tokenizer import Tokenizer, bad_word_ids

MIN_TEMPERATURE = 0.01  # below this (but above 0) logits / T leaves the range of fp32 for no visible gain

_DEFAULTED = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")


def resolve_max_tokens(wanted: int | None, prompt: int, max_len: int, param: str = "max_tokens") -> int:
    """Tokens this request may emit: what it asks for, clamped to the rest of the context.

    Raises ContextLengthError when the prompt leaves no room for one token, RequestError when `wanted` alone
    exceeds the context or is below 1.
    """
    if prompt >= max_len:
        raise ContextLengthError(prompt, max_len)
    if wanted is None:
        return max_len - prompt
    if wanted < 1:
        raise RequestError(f"{param} must be at least 1, got {wanted}.", param=param)
    if wanted > max_len:
        raise RequestError(
            f"{param}={wanted} is more than this model's maximum context length of {max_len} tokens.", param=param
        )
    return min(wanted, max_len - prompt)


def sampling_params(
    fields: SamplingFields,
    *,
    max_tokens: int,
    logprobs: int | None,
    defaults: Mapping[str, Any],
    tokenizer: Tokenizer,
    eos_ids: tuple[int, ...],
    vocab_size: int,
    thinking: ThinkingBudget | None = None,
) -> SamplingParams:
    """Validated parameters of one sequence. A silent request takes `defaults`, then the neutral value."""
    check_joint_rules(fields)
    values = {
        name: value
        for name in _DEFAULTED
        if (value := getattr(fields, name) if getattr(fields, name) is not None else defaults.get(name)) is not None
    }
    if values.get("top_k") == -1:
        values["top_k"] = 0
    if 0 < values.get("temperature", 1.0) < MIN_TEMPERATURE:
        values["temperature"] = MIN_TEMPERATURE
    if values.get("temperature", 1.0) == 0 and fields.choices > 1:
        raise RequestError("n must be 1 when using greedy sampling (temperature 0).", param="n")
    stop_ids = tuple(fields.stop_token_ids or ()) + (() if fields.ignore_eos else eos_ids)
    return SamplingParams(
        max_tokens=max_tokens,
        min_tokens=min(fields.min_tokens, max_tokens) if fields.min_tokens > 0 else fields.min_tokens,
        logit_bias=_logit_bias(fields.logit_bias),
        allowed_ids=tuple(fields.allowed_token_ids) if fields.allowed_token_ids is not None else None,
        bad_words=_bad_words(tokenizer, fields.bad_words),
        stop_ids=tuple(dict.fromkeys(stop_ids)),
        seed=None if fields.seed == -1 else fields.seed,
        logprobs=logprobs,
        prompt_logprobs=fields.prompt_logprobs,
        thinking=thinking,
        **values,
    ).validate(vocab_size)


def check_joint_rules(fields: SamplingFields) -> None:
    """Fields that exclude or need one another."""
    if fields.stream_options is not None and not fields.stream:
        raise RequestError("stream_options needs stream: true.", param="stream_options")
    if fields.stream and fields.prompt_logprobs is not None:
        raise RequestError("prompt_logprobs does not go with stream.", param="prompt_logprobs")


def _logit_bias(table: Mapping[str, float] | None) -> dict[int, float]:
    out = {}
    for key, value in (table or {}).items():
        if not (key.isascii() and key.isdigit()):
            raise RequestError(f"logit_bias keys must be token ids, got {key!r}.", param="logit_bias")
        if not (math.isfinite(value) and -100 <= value <= 100):
            raise RequestError(f"logit_bias of token {key} must be in [-100, 100].", param="logit_bias")
        out[int(key[:12])] = float(value)
    return out


def _bad_words(tokenizer: Tokenizer, words: list[str] | None) -> tuple[tuple[int, ...], ...]:
    if any(not word.strip() for word in words or ()):
        raise RequestError("bad_words must hold non-empty words.", param="bad_words")
    return bad_word_ids(tokenizer, words or ())


def choice_seed(seed: int | None, index: int) -> int | None:
    """Seed of the index-th choice; the first keeps the request's, so that n = 1 and n > 1 begin alike."""
    if seed is None or index == 0:
        return seed
    return derive_seed(seed, index)
