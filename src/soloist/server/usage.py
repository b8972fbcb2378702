"""Token counts of a reply."""

from __future__ import annotations

from typing import Any


def usage(prompt: int, completion: int, cached: int, reasoning: int | None = None) -> dict[str, Any]:
    """OpenAI's `usage` object; `cached_tokens` is always present."""
    out: dict[str, Any] = {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": cached},
    }
    if reasoning is not None:
        out["completion_tokens_details"] = {"reasoning_tokens": reasoning}
    return out
