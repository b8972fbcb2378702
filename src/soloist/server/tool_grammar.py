"""`tool_choice` required or named, as a grammar of the XML form: llguidance writes what the parser reads.

Tags, names and parameter names are dictated (and so are free drafts); a parameter's value is free text for strings,
one of the words for string enums, and JSON of its schema for anything else. Parameters come in the order in which the
tool declares them, the required ones always. Free text never contains a tag that the parser would end it at.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from soloist.server.parsers.schema_types import Types

MAX_CALLS = 16
_JSON_OPTIONS = {"whitespace_pattern": r"[\x20\x0A]{1,4}"}
_FREE = r"""
text[suffix="\n</parameter>"]: TEXT
TEXT: /(?s:.*)/ & ~/(?s:.*(<parameter=|<\/function>|<\/parameter>|<\/tool_call>).*)/
KEY: /[A-Za-z0-9_.\-]{1,64}/
"""


def tool_grammar(
    tools: Sequence[Mapping[str, Any]],
    tokens: tuple[int, int],
    *,
    only: str | None = None,
    parallel: bool = True,
    answer: Any = None,
    typed: bool = True,
) -> str:
    """Lark text of one or more calls.

    tokens   ids of `<tool_call>` and `</tool_call>`
    only     the one tool that may be called (exactly once)
    answer   a JSON schema: instead of calling, the model may answer with such a value
    typed    False drops the schemas of values, for tools whose schemas llguidance does not know in full
    """
    chosen = [t["function"] for t in tools if only in (None, t["function"]["name"])]
    more = f'("\\n" call){{0,{MAX_CALLS - 1}}}' if parallel and only is None else ""
    rules = [f"calls: call {more}".rstrip(), "call: " + " | ".join(f"f{i}" for i in range(len(chosen)))]
    if answer is None:
        rules.insert(0, "start: calls")
    else:
        rules.insert(0, "start: calls | answer")
        rules.append(f"answer: {_json(answer)}")
    for i, function in enumerate(chosen):
        opening = _quote(f"\n<function={function['name']}>")
        closing = _quote("\n</function>\n")
        body = _parameters(function.get("parameters"), typed)
        rules.append(f"f{i}: <[{tokens[0]}]> {opening} {body} {closing} <[{tokens[1]}]>")
    return "\n".join(rules) + _FREE


def _parameters(schema: Any, typed: bool) -> str:
    types = Types(schema)
    root = schema if isinstance(schema, dict) else {}
    declared = root.get("properties")
    properties: dict[str, Any] = declared if isinstance(declared, dict) else {}
    required = [name for name in root.get("required") or [] if isinstance(name, str)]
    if not properties and not required:
        return '("\\n<parameter=" KEY ">\\n" text)*'
    parts = []
    for name in dict.fromkeys([*properties, *required]):
        value = _value(types, types.of_parameter(name), root) if typed else "text"
        opening = _quote(f"\n<parameter={name}>\n")
        part = f"{opening} {value}"
        parts.append(part if name in required else f"({part})?")
    return " ".join(parts)


def _value(types: Types, schema: Any, root: Mapping[str, Any]) -> str:
    kinds = types.kinds(schema)
    closing = _quote("\n</parameter>")
    words = schema.get("enum", [schema["const"]] if "const" in schema else None) if isinstance(schema, dict) else None
    if words and all(isinstance(word, str) for word in words):
        return "(" + " | ".join(_quote(word) for word in words) + f") {closing}"
    if not kinds or "string" in kinds:
        return "text"
    shared = {key: root[key] for key in ("$defs", "definitions") if key in root}
    return f"{_json({**shared, **schema})} {closing}"


def _json(schema: Any) -> str:
    return "%json " + json.dumps({**schema, "x-guidance": _JSON_OPTIONS} if isinstance(schema, dict) else schema)


def _quote(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
