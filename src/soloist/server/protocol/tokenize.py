"""`/tokenize` and `/detokenize`: the requests' fields."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict

from soloist.server.protocol.chat import ToolSpec


class TokenizeRequest(BaseModel):
    """Either `prompt` or `messages`."""

    model_config = ConfigDict(extra="allow", protected_namespaces=())

    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    tools: list[ToolSpec] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool = False


class DetokenizeRequest(BaseModel):
    model_config = ConfigDict(extra="allow", protected_namespaces=())

    model: str | None = None
    tokens: list[int]
