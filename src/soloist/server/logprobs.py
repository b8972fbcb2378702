"""Log-probabilities in the shapes of the protocols."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from soloist.engine.request import TokenLogprobs
from soloist.server.tokenizer import Tokenizer

FLOOR = -9999.0  # JSON has no -inf; masked tokens show as this, like elsewhere in the field


def _number(logprob: float) -> float:
    return max(logprob, FLOOR)


class TokenNames:
    """How tokens are spelled in listings: as text, or as `token_id:N` when the request asks for that."""

    def __init__(self, tokenizer: Tokenizer, as_ids: bool = False) -> None:
        self._tokenizer = tokenizer
        self._as_ids = as_ids

    def __call__(self, token: int) -> str:
        return f"token_id:{token}" if self._as_ids else self._tokenizer.token_text(token)

    def entry(self, token: int, logprob: float) -> dict[str, Any]:
        raw = self._tokenizer.token_bytes(token)
        return {"token": self(token), "logprob": _number(logprob), "bytes": list(raw)}


def chat_entry(item: TokenLogprobs, names: TokenNames) -> dict[str, Any]:
    """One element of `logprobs.content`."""
    return {
        **names.entry(item.token, item.logprob),
        "top_logprobs": [names.entry(token, value) for token, value in item.top],
    }


def prompt_listing(items: Sequence[TokenLogprobs | None], tokenizer: Tokenizer) -> list[dict[str, Any] | None]:
    """`prompt_logprobs`: per position a map of token id to value; the first has no predecessor and is null."""
    out: list[dict[str, Any] | None] = []
    for item in items:
        if item is None:
            out.append(None)
            continue
        ranked = [(token, value, rank) for rank, (token, value) in enumerate(item.top, start=1)]
        row = {token: (value, rank) for token, value, rank in [*ranked, (item.token, item.logprob, item.rank)]}
        out.append(
            {
                str(token): {"logprob": _number(value), "rank": rank, "decoded_token": tokenizer.token_text(token)}
                for token, (value, rank) in row.items()
            }
        )
    return out


class CompletionLogprobs:
    """The parallel lists of `/v1/completions`; offsets run on across the chunks of a stream."""

    def __init__(self, names: TokenNames) -> None:
        self._names = names
        self._offset = 0

    def listing(self, items: Sequence[TokenLogprobs | None], tokens: Sequence[int]) -> dict[str, Any]:
        """Lists for `tokens`; an item of None (the first prompt token) has null entries."""
        out: dict[str, list[Any]] = {"text_offset": [], "token_logprobs": [], "tokens": [], "top_logprobs": []}
        for item, token in zip(items, tokens, strict=True):
            text = self._names(token)
            out["tokens"].append(text)
            out["text_offset"].append(self._offset)
            self._offset += len(text)
            if item is None:
                out["token_logprobs"].append(None)
                out["top_logprobs"].append(None)
                continue
            out["token_logprobs"].append(_number(item.logprob))
            table = {self._names(i): _number(value) for i, value in item.top}
            table.setdefault(text, _number(item.logprob))
            out["top_logprobs"].append(table)
        return out
