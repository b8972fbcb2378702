"""`/v1/chat/completions`: the request's fields."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict

from soloist.server.protocol.common import SamplingFields


class FunctionSpec(BaseModel):
    model_config = ConfigDict(extra="allow")

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None


class ToolSpec(BaseModel):
    model_config = ConfigDict(extra="allow")

    type: str = "function"
    function: FunctionSpec


class ChatRequest(SamplingFields):
    """Messages stay plain mappings: `server/messages.py` states the rules for them."""

    messages: list[dict[str, Any]]
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = False
    top_logprobs: int | None = None
    tools: list[ToolSpec] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = True
    functions: list[FunctionSpec] | None = None
    function_call: str | dict[str, Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    enable_thinking: bool | None = None
    thinking: dict[str, Any] | bool | None = None
    reasoning_effort: str | None = None
    include_reasoning: bool = True
    thinking_token_budget: int | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    echo: bool = False
