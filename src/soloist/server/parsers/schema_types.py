"""Tool arguments come as text; the tool's JSON schema says what they are.

A text stays a string when the schema says string or says nothing. Otherwise it becomes the JSON value it spells, if
that value has an allowed type; else it stays the string it is ("abc" for an integer is "abc", and so is "007").
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from typing import Any

_ALL = frozenset({"string", "integer", "number", "boolean", "null", "object", "array"})
_MAX_DEPTH = 64


class Types:
    """Type questions about one tool's parameter schema; `$ref`s are resolved against its root."""

    def __init__(self, parameters: dict[str, Any] | None) -> None:
        self._root = parameters if isinstance(parameters, dict) else {}

    def of_parameter(self, name: str) -> Any:
        """The schema of a top-level parameter; {} when the tool does not declare it."""
        return self._property(self._resolve(self._root), name)

    def streams(self, schema: Any) -> bool:
        """True when the value is certainly a string, so that it may be sent as it grows."""
        kinds = self.kinds(schema)
        return not kinds or kinds == {"string"}

    def kinds(self, schema: Any, _depth: int = 0) -> frozenset[str]:
        """JSON types the schema allows; empty when it does not say."""
        if _depth > _MAX_DEPTH:
            return frozenset()
        schema = self._resolve(schema)
        declared = schema.get("type")
        found: set[str] = set()
        if isinstance(declared, str):
            found = {declared}
        elif isinstance(declared, list):
            found = {kind for kind in declared if isinstance(kind, str)}
        elif "const" in schema:
            found = {_kind_of(schema["const"])}
        elif isinstance(schema.get("enum"), list):
            found = {_kind_of(value) for value in schema["enum"]}
        else:
            for branch in self._branches(schema):
                found |= self.kinds(branch, _depth + 1)
            if not found and ("properties" in schema or "additionalProperties" in schema):
                found = {"object"}
            elif not found and "items" in schema:
                found = {"array"}
        if schema.get("nullable") is True and found:
            found.add("null")
        return frozenset(found & _ALL)

    def coerce(self, text: str, schema: Any) -> Any:
        """The value a parameter's text stands for."""
        return self._value(text, schema, 0)

    def _value(self, value: Any, schema: Any, depth: int) -> Any:
        if depth > _MAX_DEPTH:
            return value
        kinds = self.kinds(schema)
        if isinstance(value, str):
            parsed = _parse(value) if kinds - {"string"} else value
            if isinstance(parsed, str) or not _allowed(parsed, kinds):
                return value
            value = int(parsed) if isinstance(parsed, float) and "number" not in kinds else parsed
        if isinstance(value, dict):
            return {key: self._value(v, self._nested(schema, key, depth), depth + 1) for key, v in value.items()}
        if isinstance(value, list):
            return [self._value(v, self._item(schema, depth), depth + 1) for v in value]
        return value

    def _nested(self, schema: Any, key: str, depth: int) -> Any:
        schema = self._resolve(schema)
        found = self._property(schema, key)
        if not found and depth < _MAX_DEPTH:
            found = next(filter(None, (self._nested(b, key, depth + 1) for b in self._branches(schema))), {})
        return found

    def _item(self, schema: Any, depth: int) -> Any:
        schema = self._resolve(schema)
        if isinstance(schema.get("items"), dict):
            return schema["items"]
        if depth >= _MAX_DEPTH:
            return {}
        return next(filter(None, (self._item(b, depth + 1) for b in self._branches(schema))), {})

    @staticmethod
    def _property(schema: dict[str, Any], name: str) -> Any:
        properties = schema.get("properties")
        if isinstance(properties, dict) and name in properties:
            return properties[name]
        extra = schema.get("additionalProperties")
        return extra if isinstance(extra, dict) else {}

    @staticmethod
    def _branches(schema: dict[str, Any]) -> Iterable[Any]:
        for word in ("anyOf", "oneOf", "allOf"):
            if isinstance(schema.get(word), list):
                yield from schema[word]

    def _resolve(self, schema: Any) -> dict[str, Any]:
        """Follow `$ref`s inside the document; a broken or circular one resolves to {} (says nothing)."""
        for _ in range(_MAX_DEPTH):
            if not isinstance(schema, dict):
                return {}
            ref = schema.get("$ref")
            if not isinstance(ref, str):
                return schema
            schema = self._pointer(ref)
        return {}

    def _pointer(self, ref: str) -> Any:
        node: Any = self._root
        if not ref.startswith("#"):
            return {}
        for step in ref[1:].split("/")[1:]:
            step = step.replace("~1", "/").replace("~0", "~")
            if isinstance(node, dict):
                node = node.get(step)
            elif isinstance(node, list) and step.isdigit() and int(step) < len(node):
                node = node[int(step)]
            else:
                return {}
        return node


def dumps(value: Any) -> str:
    """JSON as arguments are written: `", "` and `": "`, non-ASCII as it is."""
    return json.dumps(value, ensure_ascii=False)


def _parse(text: str) -> Any:
    """The JSON value of a text, or the text itself when it is none that can be written back."""
    try:
        value = json.loads(text, parse_constant=_refuse)
        dumps(value).encode("utf-8")
    except (ValueError, RecursionError):
        return text
    return text if isinstance(value, float) and not math.isfinite(value) else value


def _refuse(name: str) -> Any:
    raise ValueError(name)


def _kind_of(value: Any) -> str:
    match value:
        case bool():
            return "boolean"
        case int():
            return "integer"
        case float():
            return "number"
        case None:
            return "null"
        case dict():
            return "object"
        case list():
            return "array"
    return "string"


def _allowed(value: Any, kinds: frozenset[str]) -> bool:
    kind = _kind_of(value)
    if kind == "integer":
        return bool(kinds & {"integer", "number"})
    if kind == "number":
        return "number" in kinds or ("integer" in kinds and value.is_integer())
    return kind in kinds
