"""`/v1/completions`: the request's fields."""

from __future__ import annotations

from soloist.server.protocol.common import SamplingFields


class CompletionRequest(SamplingFields):
    """`prompt` may be a text, several texts, token ids, or several lists of token ids."""

    prompt: str | list[str] | list[int] | list[list[int]]
    max_tokens: int | None = 16
    echo: bool = False
    logprobs: int | None = None
    add_special_tokens: bool = True
