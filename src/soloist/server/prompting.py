"""From a turn to the ids of its prompt, and what a prompt says about the answer that will follow it."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from soloist.engine.request import Picture
from soloist.errors import RequestError
from soloist.server.messages import normalise, parse_arguments
from soloist.server.parsers.parts import THINK_CLOSE, THINK_OPEN, TURN_START, Answer
from soloist.server.pictures import PLACEHOLDER, Raster, expand, load, place
from soloist.server.service import Service
from soloist.server.template import ChatTemplate
from soloist.server.tokenizer import Tokenizer
from soloist.server.turn import Turn

_LONG_TEXT = 20_000  # characters above which encoding leaves the event loop
_CUT = "\x00\x00continue here\x00\x00"
_RESERVED = ("messages", "tools", "add_generation_prompt")


@dataclass(frozen=True)
class Prompt:
    """A rendered turn. `ids` stand for `text`; the first `spliced` of them are those of a remembered transcript.

    `rasters` are its pictures in order, `pictures` the same placed among the ids.
    """

    text: str
    ids: list[int]
    spliced: int
    messages: list[dict[str, Any]]
    variables: Mapping[str, Any]
    template: ChatTemplate
    rasters: tuple[Raster, ...] = ()
    pictures: tuple[Picture, ...] = ()

    @property
    def has_history(self) -> bool:
        """True when the prompt holds earlier answers."""
        return any(message["role"] == "assistant" for message in self.messages)

    def with_answer(self, answer: Answer) -> str:
        """The text of this history once the answer is part of it, as a faithful client will send it back."""
        message: dict[str, Any] = {"role": "assistant", "content": answer.content}
        if answer.reasoning:
            message["reasoning"] = message["reasoning_content"] = answer.reasoning
        if answer.calls:
            message["tool_calls"] = [
                {"type": "function", "function": {"name": call.name, "arguments": parse_arguments(call.arguments)}}
                for call in answer.calls
            ]
        variables = {**self.variables, "add_generation_prompt": False}
        return expand(self.template.render([*self.messages, message], variables), self.rasters)


def render(service: Service, turn: Turn) -> Prompt:
    """The prompt text of a turn, not encoded yet. Raises RequestError for messages that cannot be shown."""
    messages = normalise(turn.messages, service.options.pictures is not None, turn.places)
    taken = next((name for name in _RESERVED if name in turn.template_kwargs), None)
    if taken is not None:
        raise RequestError(f"chat_template_kwargs may not set {taken}.", param="chat_template_kwargs")
    variables = {
        **turn.template_kwargs,
        **turn.thinking.template_variables(service.template.source),
        "add_generation_prompt": turn.add_generation_prompt and not turn.continue_final,
        "tools": turn.tools or None,
    }
    text = _continued(service, messages, variables) if turn.continue_final else None
    if text is None:
        text = service.template.render(messages, variables)
    return Prompt(text, [], 0, messages, variables, service.template)


def _continued(service: Service, messages: list[dict[str, Any]], variables: Mapping[str, Any]) -> str:
    """The text up to the end of the last message's content, wherever the template puts that."""
    last = messages[-1]
    if last["role"] != "assistant" or not isinstance(last["content"], str):
        raise RequestError("continue_final_message needs an assistant message at the end.", param="messages")
    text = service.template.render([*messages[:-1], {**last, "content": last["content"] + _CUT}], variables)
    head, mark, _ = text.rpartition(_CUT)
    if not mark:
        raise RequestError("The chat template does not show the final message.", param="continue_final_message")
    return head


async def prepare(service: Service, turn: Turn) -> Prompt:
    """Render and encode. Long texts are encoded on a thread, so that streams keep flowing.

    Where the history holds an answer of this server word for word, the ids it was generated with are used.
    """
    prompt = render(service, turn)
    rasters = await load(prompt.messages, service.options.pictures)
    if rasters:
        prompt = replace(prompt, text=expand(prompt.text, rasters), rasters=tuple(rasters))
    kept, rest = service.transcripts.splice(prompt.text)
    ids = [*kept, *await _encode(service, rest)]
    if not rasters:
        return replace(prompt, ids=ids, spliced=len(kept))
    pad = service.tokenizer.id_of(PLACEHOLDER)
    pictures = place(ids, pad, rasters)
    if pictures is None and kept:  # an earlier answer generated a placeholder of its own
        kept, ids = [], await _encode(service, prompt.text)
        pictures = place(ids, pad, rasters)
    if pictures is None:
        raise RequestError(f"This model's tokenizer does not keep {PLACEHOLDER} as one token.", param="messages")
    return replace(prompt, ids=ids, spliced=len(kept), pictures=pictures)


async def _encode(service: Service, text: str) -> list[int]:
    if len(text) > _LONG_TEXT:
        return await asyncio.to_thread(service.tokenizer.encode, text)
    return service.tokenizer.encode(text)


def thinking_left_open(tokenizer: Tokenizer, prompt: Sequence[int]) -> bool:
    """True when the prompt's last turn leaves a think block open, so that generation starts inside it.

    Only the last turn counts: a user who writes `<think>` in a message opens nothing.
    """
    opened, closed = tokenizer.id_of(THINK_OPEN), tokenizer.id_of(THINK_CLOSE)
    start = tokenizer.id_of(TURN_START)
    for token in reversed(prompt):
        if token == opened:
            return True
        if token in (closed, start):
            return False
    return False
