"""Is thinking on? Four places may say so; they must agree.

| where                                        | off            | on                                    |
|----------------------------------------------|----------------|---------------------------------------|
| `chat_template_kwargs.enable_thinking`       | false          | true                                  |
| `enable_thinking`                            | false          | true                                  |
| `reasoning_effort` / `reasoning.effort`      | "none"         | any other effort                      |
| `thinking` (Anthropic's object, or a bool)   | disabled       | enabled (with its budget), adaptive   |

A silent request leaves it to the template. Two places that contradict each other are a RequestError. `adaptive`
leaves the choice to the model, so it agrees with everything.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from soloist.errors import RequestError

_EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
# The family's newer templates know three efforts and raise on others.
_XHIGH_TEMPLATE = {
    "minimal": "low",
    "low": "low",
    "medium": "medium",
    "high": "xhigh",
    "xhigh": "xhigh",
    "max": "xhigh",
}


@dataclass(frozen=True)
class Thinking:
    """`enabled` None: the template decides. `budget` caps the tokens of the think block."""

    enabled: bool | None = None
    effort: str | None = None
    budget: int | None = None

    def template_variables(self, source: str) -> dict[str, Any]:
        """What the template with this source is told."""
        variables: dict[str, Any] = {}
        if self.enabled is not None:
            variables["enable_thinking"] = self.enabled
        if self.effort not in (None, "none") and "reasoning_effort" in source:
            effort = str(self.effort)
            variables["reasoning_effort"] = _XHIGH_TEMPLATE[effort] if "xhigh" in source else effort
        return variables


def resolve_thinking(
    template_kwargs: Mapping[str, Any] | None = None,
    enable_thinking: bool | None = None,
    reasoning_effort: str | None = None,
    thinking: Mapping[str, Any] | bool | None = None,
    budget: int | None = None,
) -> Thinking:
    """Merge the switches. Raises RequestError naming the field that contradicts an earlier one."""
    votes: list[tuple[str, bool]] = []
    nested = (template_kwargs or {}).get("enable_thinking")
    if nested is not None:
        if not isinstance(nested, bool):
            raise RequestError(
                "chat_template_kwargs.enable_thinking must be true or false.", param="chat_template_kwargs"
            )
        votes.append(("chat_template_kwargs", nested))
    if enable_thinking is not None:
        votes.append(("enable_thinking", enable_thinking))
    if reasoning_effort is not None:
        if reasoning_effort not in _EFFORTS:
            raise RequestError(f"reasoning_effort must be one of {', '.join(_EFFORTS)}.", param="reasoning_effort")
        votes.append(("reasoning_effort", reasoning_effort != "none"))
    if isinstance(thinking, bool):
        votes.append(("thinking", thinking))
    elif thinking is not None:
        kind = thinking.get("type")
        if kind not in ("enabled", "disabled", "adaptive"):
            raise RequestError("thinking.type must be enabled, disabled or adaptive.", param="thinking")
        if kind != "adaptive":
            votes.append(("thinking", kind == "enabled"))
        if kind == "enabled" and thinking.get("budget_tokens") is not None:
            tokens = thinking["budget_tokens"]
            if isinstance(tokens, bool) or not isinstance(tokens, int) or tokens < 1:
                raise RequestError("thinking.budget_tokens must be a positive integer.", param="thinking")
            if budget is not None and budget != tokens:
                raise RequestError("thinking_token_budget contradicts thinking.budget_tokens.", param="thinking")
            budget = tokens
    for name, value in votes[1:]:
        if value != votes[0][1]:
            raise RequestError(
                f"{name} switches thinking {'on' if value else 'off'}, {votes[0][0]} the other way.",
                "Say it once, or the same everywhere.",
                param=name,
            )
    if budget is not None and budget < 0:
        raise RequestError("thinking_token_budget must be at least 0.", param="thinking_token_budget")
    return Thinking(votes[0][1] if votes else None, reasoning_effort, budget)
