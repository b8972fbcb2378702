"""`/v1/messages`: the request's fields. Blocks stay plain mappings; `server/anthropic.py` states the rules."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from soloist.server.protocol.common import StopText


class CountRequest(BaseModel):
    """`/v1/messages/count_tokens`."""

    model_config = ConfigDict(extra="allow", protected_namespaces=())

    model: str | None = None
    messages: list[dict[str, Any]]
    system: str | list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: dict[str, Any] | None = None
    thinking: dict[str, Any] | None = None
    output_config: dict[str, Any] | None = None


class MessagesRequest(CountRequest):
    max_tokens: Annotated[int, Field(ge=1)]
    stop_sequences: Annotated[list[StopText], Field(max_length=64)] | None = None
    temperature: Annotated[float, Field(ge=0)] | None = None
    top_p: float | None = None
    top_k: int | None = None
    stream: bool | None = False
    chat_template_kwargs: dict[str, Any] | None = None
