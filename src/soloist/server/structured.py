"""Which grammar binds an answer: `response_format`, `structured_outputs`, the older `guided_*`, or a forced tool call.

A request may ask for one constraint only. Compiling happens before the first byte, so that an unusable schema is a
400 with the compiler's message. With thinking on, the grammar starts after the think block.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from soloist.errors import RequestError
from soloist.sampling.grammar import Grammar
from soloist.sampling.llg import AfterThinking, GrammarCompiler, LLGrammar
from soloist.server.parsers.parts import CALL_OPEN, THINK_CLOSE
from soloist.server.protocol.common import SamplingFields
from soloist.server.tokenizer import Tokenizer

Build = Callable[[GrammarCompiler], LLGrammar]


@dataclass(frozen=True)
class Constraint:
    """What binds the answer. `field` is the request field that asked; `schema` is set when it is plain JSON."""

    field: str
    build: Build
    schema: Any = None


_KINDS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")
_GUIDED = {"guided_json": "json", "guided_regex": "regex", "guided_choice": "choice", "guided_grammar": "grammar"}


def constraint_of(fields: SamplingFields) -> Constraint | None:
    """The one constraint of a request, or None when the answer is free. Raises RequestError."""
    found: list[Constraint] = []
    if fields.response_format is not None:
        constraint = _response_format(fields.response_format)
        if constraint is not None:
            found.append(constraint)
    if fields.structured_outputs is not None:
        found.append(Constraint("structured_outputs", _structured_outputs(fields.structured_outputs)))
    for name, kind in _GUIDED.items():
        value = getattr(fields, name)
        if value is not None:
            found.append(Constraint(name, _by_kind(kind, value, name, {})))
    if len(found) > 1:
        raise RequestError(
            f"{found[1].field} and {found[0].field} both constrain the answer.",
            "Send one of them.",
            param=found[1].field,
        )
    return found[0] if found else None


def _response_format(spec: dict[str, Any]) -> Constraint | None:
    param = "response_format"
    match spec.get("type"):
        case "text":
            return None
        case "json_object":
            return Constraint(param, lambda c: c.json_object(param=param), {"type": "object"})
        case "json_schema":
            inner = spec.get("json_schema")
            schema = inner.get("schema", inner.get("json_schema")) if isinstance(inner, dict) else None
            if not isinstance(schema, dict | bool):
                raise RequestError("response_format.json_schema must hold a schema.", param=param)
            return Constraint(param, lambda c: c.json_schema(schema, param=param), schema)
        case "structural_tag":
            return Constraint(param, _structural_tag(spec, param))
        case "grammar" if isinstance(spec.get("grammar"), str):
            return Constraint(param, lambda c: c.grammar(spec["grammar"], param=param))
    raise RequestError("response_format.type must be text, json_object, json_schema or structural_tag.", param=param)


def _structured_outputs(spec: dict[str, Any]) -> Build:
    param = "structured_outputs"
    options: dict[str, Any] = {}
    if spec.get("disable_any_whitespace"):
        options["any_whitespace"] = False
    if spec.get("whitespace_pattern") is not None:
        if not isinstance(spec["whitespace_pattern"], str):
            raise RequestError("whitespace_pattern must be a string.", param=param)
        options["whitespace_pattern"] = spec["whitespace_pattern"]
    unknown = sorted(
        k for k, v in spec.items() if v and k not in (*_KINDS, "disable_any_whitespace", "whitespace_pattern")
    )
    if unknown:
        raise RequestError(f"structured_outputs.{unknown[0]} is not supported.", param=param)
    given = [kind for kind in _KINDS if spec.get(kind) not in (None, False)]
    if len(given) != 1:
        raise RequestError(f"structured_outputs must hold exactly one of {', '.join(_KINDS)}.", param=param)
    return _by_kind(given[0], spec[given[0]], param, options)


def _by_kind(kind: str, value: Any, param: str, options: dict[str, Any]) -> Build:
    """The compile step of one kind; wrong types are found here, wrong contents by the compiler."""
    if kind == "json" and isinstance(value, dict | str):
        return lambda c: c.json_schema(value, param=param, **options)
    if kind == "json_object":
        return lambda c: c.json_object(param=param, **options)
    if kind == "regex" and isinstance(value, str):
        return lambda c: c.regex(value, param=param)
    if kind == "choice" and isinstance(value, list):
        return lambda c: c.choice(value, param=param)
    if kind == "grammar" and isinstance(value, str):
        return lambda c: c.grammar(value, param=param)
    if kind == "structural_tag" and isinstance(value, dict):
        return _structural_tag(value, param)
    raise RequestError(f"{param}: {kind} has the wrong type.", param=param)


def _structural_tag(spec: dict[str, Any], param: str) -> Build:
    structures, triggers = spec.get("structures"), spec.get("triggers")
    well_formed = (
        isinstance(structures, list)
        and all(
            isinstance(s, dict) and isinstance(s.get("begin"), str) and isinstance(s.get("end"), str) and "schema" in s
            for s in structures
        )
        and _strings(triggers)
    )
    if not well_formed:
        raise RequestError("structural_tag needs structures (begin, schema, end) and triggers (strings).", param=param)
    return lambda c: c.structural_tag(structures, triggers, param=param)  # type: ignore[arg-type]


def _strings(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str) and all(isinstance(v, str) for v in value)


class AnswerRequired:
    """Binds from the first token: while the think block is open it may neither end the answer nor call a tool.

    `inner` is the grammar of what must follow the block.
    """

    def __init__(self, inner: AfterThinking, banned: Sequence[int]) -> None:
        self._inner = inner
        self._banned = list(banned)

    @property
    def active(self) -> bool:
        return True

    @property
    def finished(self) -> bool:
        return self._inner.finished

    def advance(self, token: int) -> bool:
        return (self._inner.active or token not in self._banned) and self._inner.advance(token)

    def rollback(self, tokens: int) -> None:
        self._inner.rollback(tokens)

    def mask(self, row: torch.Tensor) -> None:
        if self._inner.active:
            self._inner.mask(row)
        else:
            row[self._banned] = -torch.inf

    def forced(self, limit: int) -> list[int]:
        return self._inner.forced(limit)


def after_thinking(grammar: LLGrammar, tokenizer: Tokenizer, eos_ids: Sequence[int]) -> Grammar:
    """A grammar that waits for `</think>` and the blank line after it; until then the answer may not end."""
    end = tokenizer.id_of(THINK_CLOSE)
    assert end is not None, "a prompt that leaves a think block open has the token that closes it"
    breaks = {ids[0] for text in ("\n", "\n\n") if len(ids := tokenizer.encode(text)) == 1}
    call = tokenizer.id_of(CALL_OPEN)
    banned = [*eos_ids, *([call] if call is not None else [])]
    return AnswerRequired(AfterThinking(grammar, end, sorted(breaks), lead=2), banned)
