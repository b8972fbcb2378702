"""Soloist without a server: `from soloist import Engine`.

    engine = Engine("demo")
    print(engine.chat("Hello").content)
    for text in engine.stream("Tell me a story."):
        print(text, end="", flush=True)

The same engine, template and parsers as behind HTTP; calls may come from several threads.
"""

from __future__ import annotations

import os
import queue
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any

from soloist.engine.request import Event, Picture, Request, RequestStats
from soloist.errors import EngineError, RequestError
from soloist.sampling.params import SamplingParams
from soloist.server.choice import Choice, ChoiceRules, PlainContent
from soloist.server.face import EngineFace
from soloist.server.load import picture_rules, sampling_defaults
from soloist.server.logprobs import TokenNames
from soloist.server.messages import normalise
from soloist.server.parsers.parts import Content, Reasoning, marker_ids
from soloist.server.pictures import PLACEHOLDER, PictureRules, expand, load_inline, place
from soloist.server.prompting import thinking_left_open
from soloist.server.template import ChatTemplate
from soloist.server.text import StopHalt, TextStream
from soloist.server.tokenizer import Tokenizer

GENERATE_TOKENS = 128

Messages = str | Sequence[dict[str, Any]]


@dataclass(frozen=True)
class Output:
    """One answer. `content` is everything for `generate`; `reasoning` is the think block of a chat."""

    content: str
    reasoning: str
    tokens: tuple[int, ...]
    finish_reason: str
    stats: RequestStats


class Engine:
    """A loaded model. `knobs` are those of `soloist knobs`, in lower case: `Engine("demo", max_len=4096)`.

    Raises the same errors as `soloist serve` does for a directory or a knob that cannot be used.
    """

    def __init__(self, model: str | Path = "demo", **knobs: Any) -> None:
        from soloist.engine.build import build_engine, model_directory
        from soloist.settings import KNOBS, resolve

        flags = {name: KNOBS[name].show(value) if name in KNOBS else str(value) for name, value in knobs.items()}
        settings = resolve({"model": str(model), **flags}, os.environ, {})
        directory = model_directory(settings.model)
        tokenizer, template = Tokenizer.load(directory), ChatTemplate.load(directory)
        defaults = sampling_defaults(directory) if settings.generation_defaults else {}
        pictures = picture_rules(settings, directory) if settings.vision else None
        engine = build_engine(settings)
        # A script that just ends must not tear the interpreter down under a running thread.
        weakref.finalize(self, engine.close)
        self._assemble(engine, tokenizer, template, defaults, pictures)

    @classmethod
    def assembled(
        cls,
        engine: EngineFace,
        tokenizer: Tokenizer,
        template: ChatTemplate,
        defaults: dict[str, Any] | None = None,
        pictures: PictureRules | None = None,
    ) -> Engine:
        """An Engine around parts that exist already (tests, embedding)."""
        self = cls.__new__(cls)
        self._assemble(engine, tokenizer, template, defaults or {}, pictures)
        return self

    def _assemble(
        self,
        engine: EngineFace,
        tokenizer: Tokenizer,
        template: ChatTemplate,
        defaults: dict[str, Any],
        pictures: PictureRules | None,
    ) -> None:
        self.engine = engine
        self.tokenizer = tokenizer
        self.template = template
        self.defaults = defaults
        self.pictures = pictures
        self._markers = marker_ids(tokenizer)

    def chat(
        self, messages: Messages, *, thinking: bool | None = None, stop: Sequence[str] = (), **params: Any
    ) -> Output:
        """The answer to a message or a conversation. `params` are fields of SamplingParams. Pictures are parts of type
        `image_url` with a data URL, as over HTTP."""
        request, choice, events = self._start_chat(messages, thinking, stop, params)
        for event in self._events(request, events):
            choice.take(event)
        return self._output(choice, request)

    def stream(
        self, messages: Messages, *, thinking: bool | None = None, stop: Sequence[str] = (), **params: Any
    ) -> Iterator[str]:
        """The answer's content as it grows, reasoning left out. Closing the iterator cancels the request."""
        request, choice, events = self._start_chat(messages, thinking, stop, params)
        for event in self._events(request, events):
            text = "".join(part.text for part in choice.take(event).parts if isinstance(part, Content))
            if text:
                yield text

    def stream_parts(
        self, messages: Messages, *, thinking: bool | None = None, stop: Sequence[str] = (), **params: Any
    ) -> Iterator[Content | Reasoning]:
        """Like `stream`, with reasoning: `Reasoning` and `Content` parts in order."""
        request, choice, events = self._start_chat(messages, thinking, stop, params)
        for event in self._events(request, events):
            yield from (part for part in choice.take(event).parts if isinstance(part, Content | Reasoning))

    def generate(
        self, prompts: Sequence[str] | Sequence[Sequence[int]], params: SamplingParams | None = None
    ) -> list[Output]:
        """Raw continuations of several prompts (texts or token ids), run together; no chat template.

        Without `params`: the model's sampling defaults and at most `GENERATE_TOKENS` tokens. `params` without stop ids
        end at the model's EOS.
        """
        given = params or self._params({"max_tokens": GENERATE_TOKENS})
        if not given.stop_ids:
            given = replace(given, stop_ids=self.engine.eos_ids)
        started = []
        for prompt in prompts:
            ids = self.tokenizer.encode_with_specials(prompt) if isinstance(prompt, str) else list(prompt)
            started.append(self._start(ids, given, (), ChoiceRules(thinking_open=False), {}))
        outputs = []
        for request, choice, events in started:
            for event in self._events(request, events):
                choice.take(event)
            outputs.append(self._output(choice, request))
        return outputs

    def close(self) -> None:
        """Stop the engine's thread."""
        self.engine.close()  # type: ignore[attr-defined]

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def _params(self, given: dict[str, Any]) -> SamplingParams:
        known = {"max_tokens": self.engine.max_len, "stop_ids": self.engine.eos_ids, **self.defaults, **given}
        return SamplingParams(**known)

    def _start_chat(
        self, messages: Messages, thinking: bool | None, stop: Sequence[str], given: dict[str, Any]
    ) -> tuple[Request, Choice, queue.SimpleQueue[Event]]:
        history = [{"role": "user", "content": messages}] if isinstance(messages, str) else list(messages)
        switch = {} if thinking is None else {"enable_thinking": thinking}
        shown = normalise(history, self.pictures is not None)
        rasters = load_inline(shown, self.pictures)
        text = self.template.render(shown, {**switch, "add_generation_prompt": True, "tools": None})
        ids = self.tokenizer.encode(expand(text, rasters))
        pictures = place(ids, self.tokenizer.id_of(PLACEHOLDER), rasters) or ()
        if len(pictures) != len(rasters):
            raise RequestError(f"This model's tokenizer does not keep {PLACEHOLDER} as one token.", param="messages")
        rules = ChoiceRules(thinking_left_open(self.tokenizer, ids), reopen=thinking is not False)
        return self._start(ids, self._params(given), stop, rules, self._markers, pictures)

    def _start(
        self,
        ids: list[int],
        params: SamplingParams,
        stop: Sequence[str],
        rules: ChoiceRules,
        markers: dict[int, str],
        pictures: tuple[Picture, ...] = (),
    ) -> tuple[Request, Choice, queue.SimpleQueue[Event]]:
        def text() -> TextStream:
            return TextStream(self.tokenizer, tuple(stop), markers=markers)

        choice = Choice(0, rules, text(), PlainContent(), markers, TokenNames(self.tokenizer))
        events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        room = max(self.engine.max_len - len(ids), 1)
        params = replace(params, max_tokens=min(params.max_tokens, room)).validate(self.engine.vocab_size)
        halt = StopHalt(text()) if stop else None
        request = Request(ids, params, events.put, halt=halt, eos_ids=self.engine.eos_ids, pictures=pictures)
        self.engine.submit(request)
        return request, choice, events

    def _events(self, request: Request, events: queue.SimpleQueue[Event]) -> Iterator[Event]:
        ended = False
        try:
            while not ended:
                event = events.get()
                ended = event.finish_reason is not None
                if event.error is not None:
                    raise event.error
                if event.finish_reason in ("abort", "error"):
                    raise EngineError("The engine ended this request before it was complete.")
                yield event
        finally:
            if not ended:
                self.engine.cancel(request)

    @staticmethod
    def _output(choice: Choice, request: Request) -> Output:
        assert choice.finish is not None
        answer = choice.answer
        return Output(answer.content, answer.reasoning, tuple(choice.tokens), choice.finish.reason, request.stats)
