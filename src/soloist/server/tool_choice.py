"""OpenAI's `tool_choice`, for both of its protocols."""

from __future__ import annotations

from typing import Any

from soloist.errors import RequestError
from soloist.server.turn import ToolChoice


def parse_tool_choice(choice: str | dict[str, Any] | None, names: list[str]) -> ToolChoice:
    """`auto` with tools and `none` without is the default; a named choice must name an offered tool."""
    if choice is None:
        return ToolChoice("auto" if names else "none")
    if isinstance(choice, str):
        if choice not in ("none", "auto", "required"):
            raise RequestError(
                "tool_choice must be none, auto, required or {type: function, function: {name}}.", param="tool_choice"
            )
        if choice == "none":
            return ToolChoice("none")
        if not names:
            raise RequestError("tool_choice needs tools.", param="tool_choice")
        return ToolChoice("auto" if choice == "auto" else "required")
    function = choice.get("function", choice)
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str):
        raise RequestError("tool_choice must name a function.", param="tool_choice")
    if name not in names:
        raise RequestError(f"tool_choice names {name!r}, which is not among the tools.", param="tool_choice")
    return ToolChoice("named", name)
