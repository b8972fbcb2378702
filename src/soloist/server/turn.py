"""A chat request without a protocol: what the three chat endpoints are converted to."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from soloist.server.protocol.common import SamplingFields
from soloist.server.thinking import Thinking


@dataclass(frozen=True)
class ToolChoice:
    kind: Literal["none", "auto", "required", "named"] = "none"
    name: str | None = None


@dataclass
class Turn:
    """One chat request. `fields` carries the sampling fields; `tools` are in OpenAI's nested form.

    `places` says where each message stands in the request (None: `messages.0` and so on) and `names` what the protocol
    calls a field of OpenAI's chat requests, so that an error names what the client sent.
    """

    fields: SamplingFields
    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] = field(default_factory=list)
    tool_choice: ToolChoice = field(default_factory=ToolChoice)
    parallel: bool = True
    template_kwargs: dict[str, Any] = field(default_factory=dict)
    thinking: Thinking = field(default_factory=Thinking)
    include_reasoning: bool = True
    max_tokens: int | None = None
    max_tokens_param: str = "max_tokens"
    logprobs: int | None = None
    add_generation_prompt: bool = True
    continue_final: bool = False
    places: list[str] | None = None
    names: Mapping[str, str] = field(default_factory=dict)
