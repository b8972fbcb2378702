"""Messages made acceptable to every chat template of the family, by stated rules.

| what a client sends                         | what the template sees                                              |
|---------------------------------------------|---------------------------------------------------------------------|
| role `developer`                            | role `system`                                                       |
| several system messages at the head         | one, texts joined by a blank line                                   |
| a system message after the first other turn | stays in its place, as `<system-reminder>` text at the end of the   |
|                                             | user or tool message before it, else as a user message of its own   |
| content parts                               | their texts joined; `None` or missing becomes ""                    |
| pictures in user and tool messages          | parts of type `image`, between the texts (VISION=1)                 |
| `tool_calls[].function.arguments` as text   | parsed to an object; "" is {}; what is no object is {"arguments": x} |
| legacy `function_call` / role `function`    | `tool_calls` / role `tool`                                          |
| `reasoning` or `reasoning_content`          | both names carry it                                                 |
| no user message at all                      | an empty one after the system text                                  |

A late system message never moves earlier tokens: the rendered prompt up to it stays what it was, so the prefix
cache keeps hitting. Unknown roles and malformed parts are the client's fault (RequestError naming the place).
"""

from __future__ import annotations

import json
from typing import Any

from soloist.errors import RequestError
from soloist.server.pictures import address_of

_ROLES = ("system", "developer", "user", "assistant", "tool", "function")
_TEXT_PARTS = ("text", "input_text", "output_text", "refusal")
_SEEING = ("user", "tool", "function")
_IMAGE_PARTS = ("image_url", "input_image", "image")


def normalise(
    messages: list[dict[str, Any]], vision: bool = False, places: list[str] | None = None
) -> list[dict[str, Any]]:
    """A new list of messages that follow the table above. Raises RequestError with `param` such as messages.2.

    `places`: what to call each message in errors, where the client's request is not a list of these messages.
    """
    if not messages:
        raise RequestError("messages must hold at least one message.", param="messages")
    out: list[dict[str, Any]] = []
    for i, message in enumerate(messages):
        _append(out, _one(message, places[i] if places else f"messages.{i}", vision))
    if not any(m["role"] == "user" for m in out):
        head = 1 if out[0]["role"] == "system" else 0
        out.insert(head, {"role": "user", "content": ""})
    return out


def _append(out: list[dict[str, Any]], message: dict[str, Any]) -> None:
    if message["role"] != "system":
        out.append(message)
        return
    text = message["content"]
    if not out:
        out.append(message)
    elif len(out) == 1 and out[0]["role"] == "system":
        out[0] = {"role": "system", "content": "\n\n".join(t for t in (out[0]["content"], text) if t)}
    elif text:
        reminder = f"<system-reminder>\n{text}\n</system-reminder>"
        last = out[-1]
        if last["role"] in ("user", "tool") and isinstance(last["content"], str):
            joined = f"{last['content']}\n\n{reminder}" if last["content"] else reminder
            out[-1] = {**last, "content": joined}
        else:
            out.append({"role": "user", "content": reminder})


def _one(message: Any, place: str, vision: bool) -> dict[str, Any]:
    if not isinstance(message, dict):
        raise RequestError(f"{place} must be an object.", param=place)
    role = message.get("role")
    if role not in _ROLES:
        raise RequestError(f"{place}.role must be one of {', '.join(_ROLES)}.", param=f"{place}.role")
    out: dict[str, Any] = {
        "role": {"developer": "system", "function": "tool"}.get(role, role),
        "content": _content(message.get("content"), f"{place}.content", role, vision),
    }
    if role == "assistant":
        reasoning = message.get("reasoning") or message.get("reasoning_content")
        if isinstance(reasoning, str):
            out["reasoning"] = out["reasoning_content"] = reasoning
        calls = message.get("tool_calls") or []
        if not calls and isinstance(message.get("function_call"), dict):
            calls = [{"type": "function", "function": message["function_call"]}]
        if not isinstance(calls, list):
            raise RequestError(f"{place}.tool_calls must be a list.", param=f"{place}.tool_calls")
        if calls:
            out["tool_calls"] = [_call(c, f"{place}.tool_calls.{j}") for j, c in enumerate(calls)]
    if out["role"] == "tool" and isinstance(message.get("tool_call_id"), str):
        out["tool_call_id"] = message["tool_call_id"]
    if isinstance(message.get("name"), str):
        out["name"] = message["name"]
    return out


def _content(content: Any, place: str, role: str, vision: bool) -> str | list[dict[str, Any]]:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise RequestError(f"{place} must be a string or a list of parts.", param=place)
    parts: list[dict[str, Any]] = []
    for i, part in enumerate(content):
        here = f"{place}.{i}"
        kind = part.get("type") if isinstance(part, dict) else None
        if isinstance(part, str):
            parts.append({"type": "text", "text": part})
        elif kind in _TEXT_PARTS and isinstance(part.get("text", part.get("refusal")), str):
            parts.append({"type": "text", "text": part.get("text", part.get("refusal"))})
        elif kind in _IMAGE_PARTS:
            if not vision:
                raise RequestError(f"{here} is a picture, and vision is off.", "Start with VISION=1.", param=here)
            if role not in _SEEING:
                raise RequestError(f"{here}: a message of role {role} cannot hold a picture.", param=here)
            parts.append({"type": "image", "image_url": {"url": address_of(part, here)}, "place": here})
        else:
            raise RequestError(f"{here} has an unsupported type {kind!r}; text parts are supported.", param=here)
    if all(part["type"] == "text" for part in parts):
        return "".join(part["text"] for part in parts)
    return parts


def _call(call: Any, place: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise RequestError(f"{place} must hold a function with a name.", param=place)
    return {
        "id": call.get("id"),
        "type": "function",
        "function": {"name": function["name"], "arguments": parse_arguments(function.get("arguments"))},
    }


def parse_arguments(arguments: Any) -> dict[str, Any]:
    """Tool-call arguments as the mapping that templates iterate."""
    if isinstance(arguments, str):
        try:
            parsed = json.loads(arguments) if arguments.strip() else {}
        except (ValueError, RecursionError):
            parsed = arguments
        arguments = parsed
    if arguments is None:
        return {}
    return arguments if isinstance(arguments, dict) else {"arguments": arguments}
