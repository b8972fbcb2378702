"""A chat turn on the engine: submitted, read, and remembered for the next one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from functools import partial

from soloist.engine.request import Event
from soloist.errors import EngineError, RequestError
from soloist.sampling.grammar import Grammar
from soloist.sampling.llg import LLGrammar
from soloist.sampling.params import SamplingParams, ThinkingBudget
from soloist.server.choice import Choice, ChoiceRules, ContentParser, Finish, PlainContent, Update
from soloist.server.generation import Generation, Plan
from soloist.server.logprobs import TokenNames
from soloist.server.observe import Observer
from soloist.server.parsers.parts import CALL_CLOSE, CALL_OPEN, TURN_END
from soloist.server.parsers.tools_qwen import ToolParser
from soloist.server.prompting import Prompt, prepare, thinking_left_open
from soloist.server.sampling import choice_seed, resolve_max_tokens, sampling_params
from soloist.server.service import Service
from soloist.server.structured import after_thinking, constraint_of
from soloist.server.text import TextStream
from soloist.server.tool_grammar import tool_grammar
from soloist.server.turn import Turn

CLOSE_TEXT = "\n</think>\n\n"  # as the templates write it, so that the history renders to the same ids


class ChatRun:
    """A turn that was submitted: iterate `updates`, then read `choices` and `generation.stats`."""

    def __init__(
        self,
        service: Service,
        turn: Turn,
        prompt: Prompt,
        observer: Observer,
        grammar: Callable[[], Grammar] | None = None,
    ) -> None:
        self.prompt = prompt.ids
        self.cancelled = False
        self.choices: list[Choice] = []
        self.prompt_logprobs: Event | None = None
        self._service = service
        self._turn = turn
        self._rendered = prompt
        thinking_open = thinking_left_open(service.tokenizer, self.prompt)
        self._parses_calls = bool(turn.tools) and turn.tool_choice.kind != "none"
        params = self._params(thinking_open)
        self._rules = ChoiceRules(
            thinking_open=thinking_open,
            reopen=turn.thinking.enabled is not False,
            parse_calls=self._parses_calls,
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
                    prompt=self.prompt,
                    params=replace(params, seed=choice_seed(params.seed, index)),
                    text=self._text,
                    has_stops=bool(turn.fields.stop),
                    grammar=grammar() if grammar else None,
                    cache_salt=turn.fields.cache_salt or "",
                    pictures=prompt.pictures,
                )
            )
        self.generation = Generation(service.engine, plans, observer)

    def _params(self, thinking_open: bool) -> SamplingParams:
        turn, service = self._turn, self._service
        budget = None
        if turn.thinking.budget is not None and thinking_open and service.think_close is not None:
            close = tuple(service.tokenizer.encode(CLOSE_TEXT))
            call = service.tokenizer.id_of(CALL_OPEN)
            ends = (call,) if call is not None and self._parses_calls else ()
            budget = ThinkingBudget(turn.thinking.budget, close, service.think_close, ends)
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
                update = self.choices[index].take(event)
                if update.finish is not None:
                    self._remember(self.choices[index], update.finish)
                yield update
        except EngineError:
            if not self.cancelled:
                raise

    def _remember(self, choice: Choice, finish: Finish) -> None:
        """Keep the generated ids, for when this answer comes back as history (see `server/transcripts.py`)."""
        whole = finish.reason == "stop" and choice.tokens[-1] == self._service.tokenizer.id_of(TURN_END)
        shown = self._turn.include_reasoning and self._turn.parallel and not self._turn.continue_final
        if whole and shown and len(self.choices) == 1:
            ids = [*self.prompt, *choice.tokens]
            self._service.transcripts.put(self._rendered.with_answer(choice.answer), ids)

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
    try:
        return await _start(service, turn, observer)
    except RequestError as error:
        field, dot, rest = (error.param or "").partition(".")
        if field in turn.names:
            error.param = turn.names[field] + dot + rest
        raise


async def _start(service: Service, turn: Turn, observer: Observer) -> ChatRun:
    prompt = await prepare(service, turn)
    if prompt.has_history and not turn.continue_final:
        service.meters.splice(hit=prompt.spliced > 0)
    build = grammar_of(service, turn)
    if build is None:
        return ChatRun(service, turn, prompt, observer)
    await asyncio.to_thread(build)  # a large schema takes a second to compile; the compiler keeps the result
    opened = thinking_left_open(service.tokenizer, prompt.ids)

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
