"""The line under an answer: how fast it came and how much was guessed or remembered."""

from __future__ import annotations

from soloist.chat.client import Answer


def status_line(answer: Answer) -> str:
    """Token count, rate, TTFT, tokens per step, acceptance and cached prompt tokens, as far as they are known.

    TTFT is what the user waited. The rate is the server's decode rate when it reports one, otherwise tokens over the
    time from the first to the last piece of text.
    """
    parts: list[str] = []
    tokens = answer.usage.get("completion_tokens")
    if tokens is not None:
        parts.append(f"{tokens} tokens")
    rate = _rate(answer, tokens)
    if rate is not None:
        parts.append(f"{rate:.0f} tok/s" if rate >= 10 else f"{rate:.1f} tok/s")
    if answer.first is not None:
        parts.append(f"TTFT {_duration(answer.first - answer.asked)}")
    drafts = answer.metrics.get("speculative_decoding") or {}
    if drafts.get("mean_acceptance_length") is not None:
        parts.append(f"{drafts['mean_acceptance_length']:.2f} tokens/step")
    if drafts.get("draft_acceptance_rate") is not None:
        parts.append(f"{drafts['draft_acceptance_rate']:.0%} accepted")
    cached = (answer.usage.get("prompt_tokens_details") or {}).get("cached_tokens")
    if cached is not None:
        parts.append(f"{cached}/{answer.usage['prompt_tokens']} cached")
    if answer.finish_reason == "length":
        parts.append("cut at the length limit")
    elif answer.finish_reason is None:
        parts.append(f"stopped after {_duration(answer.ended - answer.asked)}")
    return " · ".join(parts)


def _rate(answer: Answer, tokens: int | None) -> float | None:
    gap_ms = answer.metrics.get("mean_itl_ms")
    if gap_ms:
        return 1000 / gap_ms
    if tokens is None or tokens < 2 or answer.first is None or answer.ended <= answer.first:
        return None
    return (tokens - 1) / (answer.ended - answer.first)


def _duration(seconds: float) -> str:
    return f"{seconds * 1000:.0f} ms" if seconds < 1 else f"{seconds:.1f} s"
