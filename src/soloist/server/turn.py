"""A chat request without a protocol: what the three chat endpoints are converted to, and how it is run."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal

from soloist.engine.request import Event
from soloist.errors import EngineError, RequestError
from soloist.sampling.grammar import Grammar
from soloist.sampling.llg import LLGrammar
from soloist.sampling.params import SamplingParams, ThinkingBudget
from soloist.server.choice import Choice, ChoiceRules, ContentParser, PlainContent, Update
from soloist.server.generation import Generation, Plan
from soloist.server.logprobs import TokenNames
from soloist.server.messages import normalise
from soloist.server.observe import Observer
from soloist.server.parsers.parts import CALL_CLOSE, CALL_OPEN
from soloist.server.parsers.tools_qwen import ToolParser
from soloist.server.prompting import thinking_left_open
from soloist.server.protocol.common import SamplingFields
from soloist.server.sampling import choice_seed, resolve_max_tokens, sampling_params
from soloist.server.service import Service
from soloist.server.structured import after_thinking, constraint_of
from soloist.server.text import TextStream
from soloist.server.thinking import Thinking
from soloist.server.tool_grammar import tool_grammar

_LONG_TEXT = 20_000  # characters above which encoding leaves the event loop
_CUT = "\x00\x00continue here\x00\x00"
CLOSE_TEXT = "\n</think>\n\n"  # as the templates write it, so that the history renders to the same ids


@dataclass(frozen=True)
class ToolChoice:
    kind: Literal["none", "auto", "required", "named"] = "none"
    name: str | None = None


@dataclass
class Turn:
    """One chat request. `fields` carries the sampling fields; `tools` are in OpenAI's nested form."""

    fields: SamplingFields
    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] = field(default_factory=list)
    tool_choice: ToolChoice = field(default_factory=ToolChoice)
    parallel: bool = True
    template_kwargs: dict[str, Any] = field(default_factory=dict)
    thinking: Thinking = field(default_factory=Thinking)
    include_reasoning: bool = True
    max_tokens: int | None = None
    max_tokens_param: str = "max_tokens"
    logprobs: int | None = None
    add_generation_prompt: bool = True
    continue_final: bool = False


def render(service: Service, turn: Turn) -> str:
    """The prompt text of a turn."""
    messages = normalise(turn.messages, service.options.vision)
    variables = {
        **turn.template_kwargs,
        **turn.thinking.template_variables(service.template.source),
        "add_generation_prompt": turn.add_generation_prompt and not turn.continue_final,
        "tools": turn.tools or None,
    }
    if not turn.continue_final:
        return service.template.render(messages, **variables)
    last = messages[-1]
    if last["role"] != "assistant" or not isinstance(last["content"], str):
        raise RequestError("continue_final_message needs an assistant message at the end.", param="messages")
    text = service.template.render([*messages[:-1], {**last, "content": last["content"] + _CUT}], **variables)
    head, mark, _ = text.rpartition(_CUT)
    if not mark:
        raise RequestError("The chat template does not show the final message.", param="continue_final_message")
    return head


async def encode(service: Service, text: str) -> list[int]:
    """Ids of a rendered prompt; long texts are encoded on a thread, so that streams keep flowing."""
    if len(text) > _LONG_TEXT:
        return await asyncio.to_thread(service.tokenizer.encode, text)
    return service.tokenizer.encode(text)


class ChatRun:
    """A turn that was submitted: iterate `updates`, then read `choices` and `generation.stats`."""

    def __init__(
        self,
        service: Service,
        turn: Turn,
        prompt: list[int],
        observer: Observer,
        grammar: Callable[[], Grammar] | None = None,
    ) -> None:
        self.prompt = prompt
        self.cancelled = False
        self.choices: list[Choice] = []
        self.prompt_logprobs: Event | None = None
        self._service = service
        self._turn = turn
        thinking_open = thinking_left_open(service.tokenizer, prompt)
        params = self._params(thinking_open)
        self._rules = ChoiceRules(
            thinking_open=thinking_open,
            reopen=turn.thinking.enabled is not False,
            parse_calls=bool(turn.tools) and turn.tool_choice.kind != "none",
            parallel=turn.parallel,
            include_reasoning=turn.include_reasoning,
            budget=params.thinking.tokens if params.thinking else None,
            logprobs=turn.logprobs is not None,
            show_stop_id=turn.fields.include_stop_str_in_output,
        )
        names = TokenNames(service.tokenizer, turn.fields.return_tokens_as_token_ids)
        plans = []
        for index in range(turn.fields.choices):
            self.choices.append(Choice(index, self._rules, self._text(), self._content(), service.markers, names))
            plans.append(
                Plan(
                    prompt=prompt,
                    params=replace(params, seed=choice_seed(params.seed, index)),
                    text=self._text,
                    has_stops=bool(turn.fields.stop),
                    grammar=grammar() if grammar else None,
                    cache_salt=turn.fields.cache_salt or "",
                )
            )
        self.generation = Generation(service.engine, plans, observer)

    def _params(self, thinking_open: bool) -> SamplingParams:
        turn, service = self._turn, self._service
        budget = None
        if turn.thinking.budget is not None and thinking_open and service.think_close is not None:
            close = tuple(service.tokenizer.encode(CLOSE_TEXT))
            budget = ThinkingBudget(turn.thinking.budget, close, service.think_close)
        return sampling_params(
            turn.fields,
            max_tokens=resolve_max_tokens(
                turn.max_tokens, len(self.prompt), service.engine.max_len, turn.max_tokens_param
            ),
            logprobs=turn.logprobs,
            defaults=service.options.defaults,
            tokenizer=service.tokenizer,
            eos_ids=service.engine.eos_ids,
            vocab_size=service.engine.vocab_size,
            thinking=budget,
        )

    def _text(self) -> TextStream:
        fields = self._turn.fields
        return TextStream(
            self._service.tokenizer,
            fields.stop or (),
            fields.include_stop_str_in_output,
            fields.skip_special_tokens,
            self._service.markers,
            fields.min_tokens,
        )

    def _content(self) -> ContentParser:
        return ToolParser(self._turn.tools) if self._rules.parse_calls else PlainContent()

    async def updates(self) -> AsyncIterator[Update]:
        """One update per event, in order of arrival."""
        try:
            async for index, event in self.generation.events():
                if event.prompt_logprobs is not None and self.prompt_logprobs is None:
                    self.prompt_logprobs = event
                yield self.choices[index].take(event)
        except EngineError:
            if not self.cancelled:
                raise

    def finish_reason(self, choice: Choice) -> str:
        """OpenAI's word: `tool_calls` exactly when there are calls, unless the length limit cut the last one."""
        assert choice.finish is not None
        if choice.has_calls and not choice.call_cut:
            return "tool_calls"
        return choice.finish.reason

    @property
    def completion_tokens(self) -> int:
        return sum(len(choice.tokens) for choice in self.choices)

    @property
    def reasoning_tokens(self) -> int:
        return sum(choice.reasoning_tokens for choice in self.choices)

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens the first choice got from the cache (the engine books them when it schedules)."""
        return self.generation.stats(0).cached_tokens

    def close(self) -> None:
        self.generation.close()

    def cancel(self) -> None:
        """Stop generating while somebody still reads: `updates` ends without an error."""
        self.cancelled = True
        self.generation.cancel()


async def start(service: Service, turn: Turn, observer: Observer) -> ChatRun:
    """Render, encode, validate and submit. Every error of the request is raised here, before the first byte."""
    prompt = await encode(service, render(service, turn))
    build = grammar_of(service, turn)
    if build is None:
        return ChatRun(service, turn, prompt, observer)
    await asyncio.to_thread(build)  # a large schema takes a second to compile; the compiler keeps the result
    opened = thinking_left_open(service.tokenizer, prompt)

    def grammar() -> Grammar:
        fresh = build()
        return after_thinking(fresh, service.tokenizer, service.engine.eos_ids) if opened else fresh

    return ChatRun(service, turn, prompt, observer, grammar)


def grammar_of(service: Service, turn: Turn) -> Callable[[], LLGrammar] | None:
    """How to compile what binds the answer: a forced tool call, a response format, or either of the two."""
    constraint = constraint_of(turn.fields)
    forced = turn.tool_choice.kind in ("required", "named")
    if turn.tool_choice.kind == "none" or (constraint is None and not forced):
        return None if constraint is None else partial(constraint.build, service.grammars)
    if constraint is not None and (forced or constraint.schema is None):
        raise RequestError(
            f"{constraint.field} does not combine with tools{' that must be called' if forced else ''}.",
            "Send tool_choice none, or leave one of them out.",
            param=constraint.field,
        )
    opening, closing = service.tokenizer.id_of(CALL_OPEN), service.tokenizer.id_of(CALL_CLOSE)
    if opening is None or closing is None:
        raise RequestError("This model's tokenizer has no tool-call tokens.", param="tool_choice")
    source = partial(
        tool_grammar,
        turn.tools,
        (opening, closing),
        only=turn.tool_choice.name,
        parallel=turn.parallel,
        answer=constraint.schema if constraint else None,
    )

    def build() -> LLGrammar:
        param = constraint.field if constraint else "tool_choice"
        try:
            return service.grammars.grammar(source(), param=param)
        except RequestError:  # a parameter's schema that llguidance does not know in full: its value is free text
            return service.grammars.grammar(source(typed=False), param=param)

    return build
