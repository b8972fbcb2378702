"""Structured output by llguidance: grammars compiled once, matchers that look ahead and roll back.

`GrammarCompiler` turns a JSON schema, a regex, a list of choices, a Lark or GBNF grammar or structural tags into a
`LLGrammar`; `AfterThinking` delays any grammar until the reasoning block is closed. Both implement
`sampling.grammar.Grammar`.

What can go wrong: JSON allows any amount of whitespace between elements, and a small greedy model then writes blanks
for ever; runs are limited to `MAX_WHITESPACE` characters. Schemas with keywords llguidance does not know are refused by
name, never half enforced.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Sequence
from threading import Lock
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from llguidance import LLMatcher, LLTokenizer, StructTag, grammar_from
from tokenizers import Tokenizer

from soloist.errors import EngineError, RequestError
from soloist.sampling.grammar import Grammar

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

MAX_WHITESPACE = 32
_CACHED = 64


class GrammarCompiler:
    """Compiles grammars for one tokenizer; safe to call from several threads.

    tokenizer   a `tokenizers.Tokenizer`
    vocab_size  width of the model's logits; ids without a token are never allowed
    eos_ids     the ids that may end an answer
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_ids: Sequence[int]) -> None:
        self._source = tokenizer
        self._vocab_size = vocab_size
        self._eos_ids = list(eos_ids)
        self._tokenizer: LLTokenizer | None = None
        self._pristine: OrderedDict[str, LLMatcher] = OrderedDict()
        self._lock = Lock()

    def json_schema(
        self,
        schema: dict[str, Any] | str | bool,
        *,
        any_whitespace: bool = True,
        whitespace_pattern: str | None = None,
        param: str = "response_format",
    ) -> LLGrammar:
        """A value of the schema. Raises RequestError with the compiler's message; `param` names the request field."""
        options: JsonCompileOptions = {"whitespace_flexible": False}
        if any_whitespace:
            options = {"whitespace_pattern": whitespace_pattern or rf"[\x20\x0A\x0D\x09]{{1,{MAX_WHITESPACE}}}"}
        try:
            text = schema if isinstance(schema, str) else json.dumps(schema)
            source = LLMatcher.grammar_from_json_schema(text, overrides=options)
        except (TypeError, ValueError) as error:
            raise self._refusal("JSON schema", error, param) from None
        return self._compile("JSON schema", source, param)

    def json_object(self, **options: Any) -> LLGrammar:
        """Any JSON object."""
        return self.json_schema({"type": "object"}, **options)

    def regex(self, pattern: str, *, param: str = "structured_outputs") -> LLGrammar:
        """Text that matches the whole pattern (Rust regex syntax)."""
        return self._compile("regex", LLMatcher.grammar_from_regex(pattern), param)

    def choice(self, options: Sequence[str], *, param: str = "structured_outputs") -> LLGrammar:
        """Exactly one of the strings."""
        if not options or not all(isinstance(o, str) and o for o in options):
            raise RequestError("choice must be a list of non-empty strings.", param=param)
        lark = "start: " + " | ".join(json.dumps(o, ensure_ascii=False) for o in options)
        return self._compile("choice", LLMatcher.grammar_from_lark(lark), param)

    def grammar(self, text: str, *, param: str = "structured_outputs") -> LLGrammar:
        """A grammar in llguidance's Lark dialect (`start: ...`) or in GBNF (`root ::= ...`)."""
        try:
            source = grammar_from("grammar", text)
        except ValueError as error:
            raise self._refusal("grammar", error, param) from None
        return self._compile("grammar", source, param)

    def structural_tag(
        self, structures: Sequence[dict[str, Any]], triggers: Sequence[str], *, param: str = "response_format"
    ) -> LLGrammar:
        """Free text in which each `trigger` must go on as one of `structures` ({"begin", "schema", "end"})."""
        tags = []
        for s in structures:
            trigger = next((t for t in triggers if s["begin"].startswith(t)), None)
            if trigger is None:
                raise RequestError(f"No trigger is a prefix of the tag {s['begin']!r}.", param=param)
            tags.append(StructTag(trigger=trigger, begin=s["begin"], grammar=s["schema"], end=s["end"]))
        if not tags:
            raise RequestError("structures must be a list of at least one tag.", param=param)
        return self._compile("structural tag", grammar_from("lark", StructTag.to_grammar(tags)), param)

    def _compile(self, kind: str, source: str, param: str) -> LLGrammar:
        with self._lock:
            pristine = self._pristine.get(source)
            if self._tokenizer is None:
                self._tokenizer = LLTokenizer(
                    self._source.to_str(), n_vocab=self._vocab_size, eos_token=self._eos_ids or None
                )
        if pristine is None:
            # Outside the lock: a large schema takes a second, during which llguidance releases the GIL.
            pristine = LLMatcher(self._tokenizer, source, log_level=0)
            if pristine.is_error():
                raise self._refusal(kind, pristine.get_error(), param)
        with self._lock:
            self._pristine[source] = pristine
            self._pristine.move_to_end(source)
            while len(self._pristine) > _CACHED:
                self._pristine.popitem(last=False)
            return LLGrammar(pristine.deep_copy())

    @staticmethod
    def _refusal(kind: str, error: object, param: str) -> RequestError:
        return RequestError(f"The {kind} cannot be used: {str(error).strip()}", param=param)


class LLGrammar:
    """One sequence's matcher. It starts with the first token and is always active."""

    def __init__(self, matcher: LLMatcher) -> None:
        self._matcher = matcher

    @property
    def active(self) -> bool:
        return True

    @property
    def finished(self) -> bool:
        return self._matcher.is_stopped()

    def copy(self) -> LLGrammar:
        """An independent matcher in the same state (for n > 1)."""
        return LLGrammar(self._matcher.deep_copy())

    def advance(self, token: int) -> bool:
        taken = self._matcher.try_consume_tokens([token]) == 1
        self._check()
        return taken

    def rollback(self, tokens: int) -> None:
        if tokens and not self._matcher.rollback(tokens):
            raise EngineError(f"The grammar cannot roll back {tokens} tokens: {self._matcher.get_error()}")

    def mask(self, row: torch.Tensor) -> None:
        packed = self._matcher.compute_bitmask()
        self._check()
        bits = np.unpackbits(np.frombuffer(packed, dtype=np.uint8), bitorder="little")
        banned = np.ones(row.shape[0], dtype=bool)
        width = min(len(bits), len(banned))
        banned[:width] = bits[:width] == 0
        row.masked_fill_(torch.from_numpy(banned).to(row.device), -torch.inf)

    def forced(self, limit: int) -> list[int]:
        return self._matcher.compute_ff_tokens()[:limit]

    def _check(self) -> None:
        """llguidance reports its limits by a state, not by an exception: after one, every mask allows only the end."""
        if self._matcher.is_error():
            raise EngineError(f"The grammar gave up: {self._matcher.get_error().splitlines()[0]}")


class AfterThinking:
    """A grammar that starts once `end_id` (`</think>`) was seen; up to `lead` of `lead_ids` may come between.

    The template closes a block with `</think>` and a blank line, which no JSON grammar would take: `lead_ids` are those
    newline tokens, allowed beside what the grammar allows until the first other token.
    """

    def __init__(self, grammar: Grammar, end_id: int, lead_ids: Sequence[int] = (), lead: int = 1) -> None:
        self._grammar = grammar
        self._end_id = end_id
        self._lead_ids = list(lead_ids)
        self._lead = lead
        # One entry per token taken: "thinking", "end", "lead" or "grammar".
        self._trail: list[str] = []
        self._open = True

    @property
    def active(self) -> bool:
        return not self._open

    @property
    def finished(self) -> bool:
        return not self._open and self._grammar.finished

    def advance(self, token: int) -> bool:
        if self._open:
            self._open = token != self._end_id
            self._trail.append("thinking" if self._open else "end")
            return True
        if self._may_lead() and token in self._lead_ids:
            self._trail.append("lead")
            return True
        if not self._grammar.advance(token):
            return False
        self._trail.append("grammar")
        return True

    def rollback(self, tokens: int) -> None:
        for _ in range(tokens):
            kind = self._trail.pop()
            if kind == "grammar":
                self._grammar.rollback(1)
            elif kind == "end":
                self._open = True

    def mask(self, row: torch.Tensor) -> None:
        if self._open:
            return
        lead = self._lead_ids if self._may_lead() else []
        kept = row[lead].clone()
        self._grammar.mask(row)
        row[lead] = kept

    def forced(self, limit: int) -> list[int]:
        return [] if self._open else self._grammar.forced(limit)

    def _may_lead(self) -> bool:
        leads = 0
        while self._trail[-1 - leads] == "lead":
            leads += 1
        return leads < self._lead and self._trail[-1 - leads] == "end"
