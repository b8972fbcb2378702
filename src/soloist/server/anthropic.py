"""Anthropic Messages to a protocol-neutral turn.

| in the request                                   | becomes                                                          |
|--------------------------------------------------|------------------------------------------------------------------|
| `system` text or blocks, role `system` inside    | system messages; late ones follow `server/messages.py`           |
| an attribution block (`x-anthropic-billing-...`) | nothing: it differs in every request and is not for the model    |
| `tool_result`                                    | a tool message before the rest of that user turn                 |
| `is_error`                                       | the text begins with "Error: "                                   |
| `thinking` / `redacted_thinking`                 | reasoning / nothing                                              |
| a final assistant text                           | the beginning of the answer, continued                           |
| tools without `input_schema` (server-side tools) | ignored, listed in `x-soloist-ignored`                           |
| no `thinking` field                              | thinking off, as in Anthropic's API                              |
| `thinking.adaptive`                              | the template decides                                             |
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from soloist.errors import RequestError
from soloist.server.protocol.anthropic import CountRequest, MessagesRequest
from soloist.server.protocol.common import SamplingFields
from soloist.server.thinking import Thinking, resolve_thinking
from soloist.server.turn import ToolChoice, Turn

_ATTRIBUTION = "x-anthropic-billing-header"
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}


def turn_of(body: CountRequest) -> tuple[Turn, list[str]]:
    """(turn, what of it is ignored). Raises RequestError naming the place."""
    tools, ignored = _tools(body.tools or [])
    choice, parallel = _tool_choice(body.tool_choice, tools)
    messages = _system(body.system)
    places = ["system"] * len(messages)
    for i, message in enumerate(body.messages):
        converted = _message(message, f"messages.{i}")
        messages += converted
        places += [f"messages.{i}"] * len(converted)
    turn = Turn(
        fields=_sampling(body),
        messages=messages,
        tools=tools,
        tool_choice=choice,
        parallel=parallel,
        thinking=_thinking(body),
        continue_final=_is_prefill(body.messages),
        places=places,
    )
    if isinstance(body, MessagesRequest):
        turn.max_tokens = body.max_tokens
        turn.template_kwargs = {k: v for k, v in (body.chat_template_kwargs or {}).items() if k != "enable_thinking"}
    return turn, ignored


def _sampling(body: CountRequest) -> SamplingFields:
    if not isinstance(body, MessagesRequest):
        return SamplingFields()
    output_format = (body.output_config or {}).get("format")
    response_format = None
    if isinstance(output_format, dict):
        if output_format.get("type") != "json_schema" or not isinstance(output_format.get("schema"), dict):
            raise RequestError("output_config.format must be a json_schema with a schema.", param="output_config")
        response_format = {"type": "json_schema", "json_schema": {"name": "output", "schema": output_format["schema"]}}
    return SamplingFields(
        temperature=body.temperature,
        top_p=body.top_p,
        top_k=body.top_k,
        stop=body.stop_sequences or None,
        response_format=response_format,
    )


def _thinking(body: CountRequest) -> Thinking:
    kwargs = body.chat_template_kwargs if isinstance(body, MessagesRequest) else None
    switch = body.thinking
    if switch is None and (kwargs or {}).get("enable_thinking") is None:
        switch = {"type": "disabled"}
    thinking = resolve_thinking(kwargs, thinking=switch)
    effort = (body.output_config or {}).get("effort")
    if effort is None or thinking.enabled is False:
        return thinking
    return replace(thinking, effort=resolve_thinking(reasoning_effort=effort).effort)


def _system(system: str | list[dict[str, Any]] | None) -> list[dict[str, Any]]:
    if isinstance(system, str):
        texts = [system]
    else:
        texts = [_block_text(block, f"system.{i}") for i, block in enumerate(system or [])]
    text = "\n\n".join(t for t in map(_without_attribution, texts) if t)
    return [{"role": "system", "content": text}] if text else []


def _without_attribution(text: str) -> str:
    """The text without the line that says who pays: it changes with every request and would spoil the prefix."""
    return text.partition("\n")[2].lstrip("\n") if text.startswith(_ATTRIBUTION) else text


def _block_text(block: Any, place: str) -> str:
    if not isinstance(block, dict) or block.get("type") != "text" or not isinstance(block.get("text"), str):
        raise RequestError(f"{place} must be a text block.", param=place)
    text: str = block["text"]
    return text


def _message(message: dict[str, Any], place: str) -> list[dict[str, Any]]:
    role, content = message.get("role"), message.get("content")
    if role not in ("user", "assistant", "system"):
        raise RequestError(f"{place}.role must be user, assistant or system.", param=f"{place}.role")
    if role == "system":
        return _system(content)
    if isinstance(content, str):
        return [{"role": role, "content": content}]
    if not isinstance(content, list):
        raise RequestError(f"{place}.content must be a string or a list of blocks.", param=f"{place}.content")
    blocks = [(block, f"{place}.content.{i}") for i, block in enumerate(content)]
    for block, here in blocks:
        if not isinstance(block, dict):
            raise RequestError(f"{here} must be an object.", param=here)
    return _assistant(blocks) if role == "assistant" else _user(blocks)


def _user(blocks: list[tuple[dict[str, Any], str]]) -> list[dict[str, Any]]:
    results: list[dict[str, Any]] = []
    parts: list[dict[str, Any]] = []
    for block, here in blocks:
        match block.get("type"):
            case "text":
                parts.append({"type": "text", "text": _block_text(block, here)})
            case "image":
                parts.append(_image(block, here))
            case "tool_result":
                results.append(_tool_result(block, here))
            case kind:
                raise RequestError(f"{here}: blocks of type {kind!r} are not supported.", param=here)
    return results + ([{"role": "user", "content": parts}] if parts else [])


def _tool_result(block: dict[str, Any], here: str) -> dict[str, Any]:
    content = block.get("content")
    parts: list[dict[str, Any]] = []
    if isinstance(content, str):
        parts = [{"type": "text", "text": content}]
    elif isinstance(content, list):
        for i, inner in enumerate(content):
            place = f"{here}.content.{i}"
            if isinstance(inner, dict) and inner.get("type") == "image":
                parts.append(_image(inner, place))
            else:
                parts.append({"type": "text", "text": _block_text(inner, place)})
    elif content is not None:
        raise RequestError(f"{here}.content must be a string or a list of blocks.", param=here)
    if block.get("is_error"):
        parts.insert(0, {"type": "text", "text": "Error: "})
    return {"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": parts}


def _image(block: dict[str, Any], here: str) -> dict[str, Any]:
    source = block.get("source")
    if isinstance(source, dict) and source.get("type") == "base64":
        url = f"data:{source.get('media_type')};base64,{source.get('data')}"
    elif isinstance(source, dict) and source.get("type") == "url":
        url = str(source.get("url"))
    else:
        raise RequestError(f"{here}.source must be of type base64 or url.", param=here)
    return {"type": "image_url", "image_url": {"url": url}}


def _assistant(blocks: list[tuple[dict[str, Any], str]]) -> list[dict[str, Any]]:
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[dict[str, Any]] = []
    for block, here in blocks:
        match block.get("type"):
            case "text":
                texts.append(_block_text(block, here))
            case "thinking" if isinstance(block.get("thinking"), str):
                thoughts.append(block["thinking"])
            case "redacted_thinking":
                pass
            case "tool_use":
                function = {"name": block.get("name"), "arguments": block.get("input")}
                calls.append({"id": block.get("id"), "type": "function", "function": function})
            case kind:
                raise RequestError(f"{here}: blocks of type {kind!r} are not supported.", param=here)
    out: dict[str, Any] = {"role": "assistant", "content": "".join(texts)}
    if thoughts:
        out["reasoning"] = "\n".join(thoughts)
    if calls:
        out["tool_calls"] = calls
    return [out]


def _is_prefill(messages: list[dict[str, Any]]) -> bool:
    if not messages or messages[-1].get("role") != "assistant":
        return False
    content = messages[-1].get("content")
    if isinstance(content, list):
        return bool(content) and all(isinstance(b, dict) and b.get("type") == "text" for b in content)
    return bool(content)


def _tools(tools: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], list[str]]:
    out, ignored = [], []
    for i, tool in enumerate(tools):
        if not isinstance(tool.get("name"), str):
            raise RequestError(f"tools.{i} must have a name.", param=f"tools.{i}.name")
        if not isinstance(tool.get("input_schema"), dict):
            if tool.get("type") in (None, "custom"):
                raise RequestError(f"tools.{i} must have an input_schema.", param=f"tools.{i}.input_schema")
            ignored.append(f"tools.{tool['type']}")
            continue
        function = {"name": tool["name"], "parameters": tool["input_schema"]}
        if isinstance(tool.get("description"), str):
            function = {"name": tool["name"], "description": tool["description"], "parameters": tool["input_schema"]}
        out.append({"type": "function", "function": function})
    return out, ignored


def _tool_choice(choice: dict[str, Any] | None, tools: list[dict[str, Any]]) -> tuple[ToolChoice, bool]:
    names = [tool["function"]["name"] for tool in tools]
    if choice is None:
        return ToolChoice("auto" if names else "none"), True
    parallel = not choice.get("disable_parallel_tool_use")
    kind = choice.get("type")
    if kind == "tool":
        if choice.get("name") not in names:
            raise RequestError(
                f"tool_choice names {choice.get('name')!r}, which is not among the tools.", param="tool_choice"
            )
        return ToolChoice("named", choice["name"]), parallel
    if kind not in _CHOICES:
        raise RequestError("tool_choice.type must be auto, any, tool or none.", param="tool_choice")
    if kind == "any" and not names:
        raise RequestError("tool_choice any needs tools.", param="tool_choice")
    return ToolChoice(_CHOICES[kind] if names else "none"), parallel  # type: ignore[arg-type]
