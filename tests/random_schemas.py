"""Random JSON schemas inside the subset that the grammar library enforces, and a second opinion on the answers.

`random_schema(rng)` draws nested objects, arrays, tuples, unions, references (also recursive), string and number
bounds, patterns and formats. `violation(value, schema)` asks the jsonschema package, which shares no code with the
grammar.
"""

from __future__ import annotations

import random
from typing import Any

from jsonschema import Draft202012Validator

DEPTH = 3
NAMES = ("a", "b", "name", "ünï", "x y", 'q"', "long_property_name", "")
WORDS = ("a", "b", "Größe", 'say "x"', "two\nlines", 1, 2.5, None, True)
PATTERNS = ("^[a-z]{2,5}$", "^x+y?$", "^[0-9]{3}-[A-Z]$", "^(on|off)$")
FORMATS = ("date", "time", "uuid", "ipv4", "email")


def random_schema(rng: random.Random) -> dict[str, Any]:
    """One schema; about one in six refers to a shared definition, which may contain itself."""
    if rng.random() < 1 / 6:
        shared = _schema(rng, 1, shared=True)
        return {**_schema(rng, 0, shared=True), "$defs": {"shared": shared}}
    return _schema(rng, 0)


def _schema(rng: random.Random, depth: int, shared: bool = False) -> dict[str, Any]:
    leaves = ["string", "integer", "number", "boolean", "null", "enum", "const", "nullable"]
    kind = rng.choice(leaves if depth >= DEPTH else [*leaves, *["object"] * 3, "array", "tuple", "anyOf"])
    if kind == "object" and shared and depth and rng.random() < 0.5:
        # A reference can be left out, so that a recursive schema has an end.
        return {"type": "object", "properties": {"next": {"$ref": "#/$defs/shared"}}, "additionalProperties": False}

    def inner() -> dict[str, Any]:
        return _schema(rng, depth + 1, shared)

    match kind:
        case "object":
            names = rng.sample(NAMES, rng.randint(1, 4))
            return {
                "type": "object",
                "properties": {name: inner() for name in names},
                "required": [n for n in names if rng.random() < 0.6],
                "additionalProperties": rng.choice([False, False, {"type": "integer"}]),
            }
        case "array":
            low = rng.randint(0, 2)
            return {"type": "array", "items": inner(), "minItems": low, "maxItems": low + rng.randint(1, 2)}
        case "tuple":
            items = [inner() for _ in range(rng.randint(1, 3))]
            return {"type": "array", "prefixItems": items, "items": False, "minItems": len(items)}
        case "anyOf":
            return {"anyOf": [inner() for _ in range(rng.randint(2, 3))]}
        case "enum":
            return {"enum": rng.sample(WORDS, rng.randint(1, 4))}
        case "const":
            return {"const": rng.choice(WORDS)}
        case "nullable":
            return {"type": [rng.choice(["string", "integer", "boolean"]), "null"]}
        case "string":
            return _string(rng)
        case "integer" | "number":
            return _number(rng, kind)
    return {"type": kind}


def _string(rng: random.Random) -> dict[str, Any]:
    low = rng.randint(0, 3)
    return {
        "type": "string",
        **rng.choice(
            [
                {"maxLength": low + 6},
                {"minLength": low, "maxLength": low + rng.randint(0, 9)},
                {"pattern": rng.choice(PATTERNS)},
                {"format": rng.choice(FORMATS)},
            ]
        ),
    }


def _number(rng: random.Random, kind: str) -> dict[str, Any]:
    low = rng.randint(-50, 50)
    high = low + rng.randint(1, 200)
    bounds = [{}, {"minimum": low}, {"minimum": low, "maximum": high}, {"exclusiveMinimum": low, "maximum": high}]
    return {"type": kind, **rng.choice(bounds)}


def violation(value: Any, schema: dict[str, Any]) -> str | None:
    """Why a value does not satisfy a schema, or None."""
    validator = Draft202012Validator(schema, format_checker=Draft202012Validator.FORMAT_CHECKER)
    return next((error.message for error in validator.iter_errors(value)), None)
