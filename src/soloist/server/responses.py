"""OpenAI Responses to a protocol-neutral turn.

| in the request                                     | becomes                                                     |
|----------------------------------------------------|-------------------------------------------------------------|
| `instructions`                                     | a system message at the head, of this request only          |
| messages (any role, text or parts)                 | messages; see `server/messages.py` for late system text     |
| `reasoning`                                        | the reasoning of the assistant message after it             |
| `function_call`, `custom_tool_call`                | tool calls of the assistant message they follow             |
| `function_call_output`, `custom_tool_call_output`  | tool messages                                               |
| other items (searches, images made elsewhere)      | ignored, listed in `x-soloist-ignored`                      |
| tools that are no functions                        | ignored, listed in `x-soloist-ignored`                      |
| `text.verbosity`                                   | nothing; other than medium it is listed as ignored          |
| `truncation: auto`                                 | nothing is ever dropped from a prompt: too long is a 400    |
"""

from __future__ import annotations

from typing import Any

from soloist.errors import RequestError
from soloist.server.protocol.common import SamplingFields
from soloist.server.protocol.responses import ResponsesRequest
from soloist.server.response_store import ResponseStore
from soloist.server.thinking import resolve_thinking
from soloist.server.tool_choice import parse_tool_choice
from soloist.server.turn import ToolChoice, Turn

_NAMES = {"messages": "input", "response_format": "text.format"}
_LOGPROBS = "message.output_text.logprobs"


def turn_of(body: ResponsesRequest, store: ResponseStore) -> tuple[Turn, list[dict[str, Any]], list[str]]:
    """(turn, conversation without instructions, what is ignored). Raises RequestError naming the field."""
    if body.background:
        raise RequestError("background is not supported.", "Stream the response instead.", param="background")
    history: list[dict[str, Any]] = []
    if body.previous_response_id is not None:
        previous = store.get(body.previous_response_id)
        if previous is None:
            raise RequestError(
                f"Previous response with id {body.previous_response_id!r} not found; it was not stored or was evicted.",
                "Send the whole conversation as input.",
                param="previous_response_id",
                code="previous_response_not_found",
            )
        history = list(previous.messages)
    items, places, ignored = _items(body.input)
    conversation = history + items
    if not conversation:
        raise RequestError("input must hold at least one item.", param="input")
    tools, ignored_tools = _tools(body.tools or [])
    if (body.text or {}).get("verbosity") not in (None, "medium"):
        ignored.append("text.verbosity")
    reasoning = body.reasoning or {}
    kwargs = dict(body.chat_template_kwargs or {})
    thinking = resolve_thinking(kwargs, reasoning_effort=reasoning.get("effort"))
    kwargs.pop("enable_thinking", None)
    wants_logprobs = body.top_logprobs is not None or _LOGPROBS in (body.include or [])
    turn = Turn(
        fields=SamplingFields(
            temperature=body.temperature,
            top_p=body.top_p,
            top_k=body.top_k,
            seed=body.seed,
            response_format=_text_format(body.text),
            cache_salt=body.cache_salt,
        ),
        messages=([{"role": "system", "content": body.instructions}] if body.instructions else []) + conversation,
        places=(["instructions"] if body.instructions else []) + ["previous_response_id"] * len(history) + places,
        names=_NAMES,
        tools=tools,
        tool_choice=_tool_choice(body.tool_choice, [t["function"]["name"] for t in tools]),
        parallel=body.parallel_tool_calls is not False,
        template_kwargs=kwargs,
        thinking=thinking,
        max_tokens=body.max_output_tokens,
        max_tokens_param="max_output_tokens",
        logprobs=(body.top_logprobs or 0) if wants_logprobs else None,
    )
    return turn, conversation, ignored + ignored_tools


def _items(given: str | list[dict[str, Any]] | None) -> tuple[list[dict[str, Any]], list[str], list[str]]:
    """(messages, the item that each began with, what is ignored)."""
    if isinstance(given, str):
        return [{"role": "user", "content": given}], ["input"], []
    out: list[dict[str, Any]] = []
    places: list[str] = []
    ignored: list[str] = []
    thought: list[str] = []
    for i, item in enumerate(given or []):
        place = f"input.{i}"
        match item.get("type", "message"):
            case "message":
                message = {"role": item.get("role"), "content": item.get("content")}
                out.append(_with_thought(message, thought) if message["role"] == "assistant" else message)
            case "reasoning":
                thought = [_reasoning_text(item)]
                continue
            case "function_call":
                _add_call(out, item, item.get("arguments"), thought, place)
            case "custom_tool_call":
                _add_call(out, item, {"input": item.get("input")}, thought, place)
            case "function_call_output" | "custom_tool_call_output":
                output = item.get("output")
                if not isinstance(output, str | list):
                    raise RequestError(f"{place}.output must be a string or a list of parts.", param=place)
                out.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": output})
            case str(kind):
                ignored.append(f"input.{kind}")
                continue
            case _:
                raise RequestError(f"{place}.type must be a string.", param=place)
        thought = []
        places += [place] * (len(out) - len(places))
    return out, places, ignored


def _reasoning_text(item: dict[str, Any]) -> str:
    """The thought itself where it is given, else its summary."""
    for name in ("content", "summary"):
        parts = item.get(name)
        texts = [p["text"] for p in parts or [] if isinstance(p, dict) and isinstance(p.get("text"), str)]
        if texts:
            return "\n".join(texts)
    return ""


def _with_thought(message: dict[str, Any], thought: list[str]) -> dict[str, Any]:
    return {**message, "reasoning": thought[0]} if thought and thought[0] else message


def _add_call(out: list[dict[str, Any]], item: dict[str, Any], arguments: Any, thought: list[str], place: str) -> None:
    if not isinstance(item.get("name"), str):
        raise RequestError(f"{place} must have a name.", param=place)
    call = {
        "id": item.get("call_id"),
        "type": "function",
        "function": {"name": item["name"], "arguments": arguments},
    }
    if out and out[-1]["role"] == "assistant" and not thought:
        out[-1] = {**out[-1], "tool_calls": [*out[-1].get("tool_calls", []), call]}
    else:
        out.append(_with_thought({"role": "assistant", "content": "", "tool_calls": [call]}, thought))


def _tools(tools: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], list[str]]:
    out, ignored = [], []
    for i, tool in enumerate(tools):
        if tool.get("type") != "function":
            ignored.append(f"tools.{tool.get('type')}")
            continue
        nested = tool.get("function")
        flat: dict[str, Any] = nested if isinstance(nested, dict) else tool
        if not isinstance(flat.get("name"), str):
            raise RequestError(f"tools.{i} must have a name.", param=f"tools.{i}.name")
        function = {k: flat[k] for k in ("name", "description", "parameters") if flat.get(k) is not None}
        if not isinstance(function.get("parameters", {}), dict):
            raise RequestError(f"tools.{i}.parameters must be an object.", param=f"tools.{i}.parameters")
        out.append({"type": "function", "function": function})
    return out, ignored


def _tool_choice(choice: str | dict[str, Any] | None, names: list[str]) -> ToolChoice:
    if isinstance(choice, dict) and choice.get("type") == "allowed_tools":
        choice = choice.get("mode", "auto")
    if choice in ("auto", "none") and not names:
        return ToolChoice("none")  # every tool sent was of a kind that is ignored
    return parse_tool_choice(choice, names)


def _text_format(text: dict[str, Any] | None) -> dict[str, Any] | None:
    wanted = (text or {}).get("format")
    if not isinstance(wanted, dict):
        return None
    if wanted.get("type") == "json_schema":
        return {"type": "json_schema", "json_schema": {"name": wanted.get("name"), "schema": wanted.get("schema")}}
    return wanted
