"""POST /v1/chat/completions."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from soloist.errors import RequestError
from soloist.server.body import read_json
from soloist.server.chat_run import ChatRun, start
from soloist.server.choice import Choice, Update
from soloist.server.errors import failure_of
from soloist.server.fields import sort_extras
from soloist.server.ids import new_id
from soloist.server.logprobs import prompt_listing
from soloist.server.metrics import reply_metrics
from soloist.server.observe import Observer
from soloist.server.parsers.parts import CallArguments, CallEnd, CallStart, Content, Part, Reasoning
from soloist.server.protocol.chat import ChatRequest
from soloist.server.reply import JsonReply
from soloist.server.schema import body_of
from soloist.server.service import Service
from soloist.server.stream import DONE, EventStream, data_event, unless_gone, with_pings
from soloist.server.thinking import resolve_thinking
from soloist.server.tool_choice import parse_tool_choice
from soloist.server.turn import ToolChoice, Turn
from soloist.server.usage import usage

router = APIRouter()


@router.post("/v1/chat/completions", openapi_extra=body_of(ChatRequest))
async def chat_completions(request: Request) -> Response:
    """Chat completion, as one JSON reply or a stream of server-sent events."""
    service: Service = request.app.state.service
    body = ChatRequest.model_validate(await read_json(request))
    headers = service.ignored.headers(sort_extras(body.model_extra))
    name = service.check_model(body.model)
    reply = ChatReply(service, body, name)
    run = await unless_gone(request, start(service, turn_of(service, body), reply.observer))
    if body.stream:
        chunks = with_pings(reply.stream(run), service.options.keepalive_s)
        return EventStream(chunks, run.close, headers)
    try:
        return JsonReply(await unless_gone(request, reply.whole(run)), headers=headers)
    finally:
        run.close()


def turn_of(service: Service, body: ChatRequest) -> Turn:
    """The protocol-neutral turn. Raises RequestError for values and combinations that cannot be honoured."""
    if body.top_logprobs is not None and not body.logprobs:
        raise RequestError("top_logprobs needs logprobs: true.", param="top_logprobs")
    if body.continue_final_message and body.add_generation_prompt and "add_generation_prompt" in body.model_fields_set:
        raise RequestError(
            "continue_final_message and add_generation_prompt exclude each other.", param="continue_final_message"
        )
    tools, choice = tools_of(body)
    kwargs = dict(body.chat_template_kwargs or {})
    thinking = resolve_thinking(
        kwargs, body.enable_thinking, body.reasoning_effort, body.thinking, body.thinking_token_budget
    )
    kwargs.pop("enable_thinking", None)
    preferred = "max_completion_tokens" if body.max_completion_tokens is not None else "max_tokens"
    return Turn(
        fields=body,
        messages=body.messages,
        tools=tools,
        tool_choice=choice,
        parallel=body.parallel_tool_calls is not False,
        template_kwargs=kwargs,
        thinking=thinking,
        include_reasoning=body.include_reasoning,
        max_tokens=getattr(body, preferred),
        max_tokens_param=preferred,
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        add_generation_prompt=body.add_generation_prompt,
        continue_final=body.continue_final_message,
    )


def tools_of(body: ChatRequest) -> tuple[list[dict[str, Any]], ToolChoice]:
    """Tools and choice; the older `functions` / `function_call` mean the same."""
    tools = [tool.model_dump(exclude_unset=True) for tool in body.tools or []]
    choice: str | dict[str, Any] | None = body.tool_choice
    if body.functions is not None and body.tools is None:
        tools = [{"type": "function", "function": f.model_dump(exclude_unset=True)} for f in body.functions]
        choice = body.function_call if body.function_call is not None else choice
    elif body.tools is not None and not body.tools:
        raise RequestError("tools must hold at least one tool.", "Leave it out to offer none.", param="tools")
    for tool in tools:
        tool.setdefault("type", "function")
        if tool["type"] != "function":
            raise RequestError(f"Tools of type {tool['type']!r} are not supported.", param="tools")
    return tools, parse_tool_choice(choice, [tool["function"]["name"] for tool in tools])


class ChatReply:
    """Builds the reply objects of one request. All objects share id, time and model name."""

    def __init__(self, service: Service, body: ChatRequest, model: str) -> None:
        self._service = service
        self._body = body
        self._id = f"chatcmpl-{body.request_id}" if body.request_id else new_id("chatcmpl-")
        self._base = {"id": self._id, "created": int(time.time()), "model": model}
        self._call_ids: dict[tuple[int, int], str] = {}
        self.observer = Observer(service.meters, service.live, "chat", self._id)

    async def whole(self, run: ChatRun) -> dict[str, Any]:
        """The `chat.completion` object."""
        async for _ in run.updates():
            pass
        listing = None
        if run.prompt_logprobs is not None and run.prompt_logprobs.prompt_logprobs is not None:
            listing = prompt_listing(run.prompt_logprobs.prompt_logprobs, self._service.tokenizer)
        return {
            **self._base,
            "object": "chat.completion",
            "choices": [self._choice(run, choice) for choice in run.choices],
            "usage": self._usage(run),
            "system_fingerprint": self._service.options.fingerprint,
            "prompt_logprobs": listing,
            **({"prompt_token_ids": run.prompt} if self._body.return_token_ids else {}),
            "metrics": self._metrics(run),
        }

    def _choice(self, run: ChatRun, choice: Choice) -> dict[str, Any]:
        answer = choice.answer
        assert choice.finish is not None
        content: str | None = self._echo() + answer.content
        if not content and (answer.calls or answer.reasoning):
            content = None
        message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
        for name in self._service.options.reasoning_fields:
            message[name] = answer.reasoning or None
        if answer.calls:
            message["tool_calls"] = [
                {
                    "id": self._call_id(choice.index, i),
                    "type": "function",
                    "function": {"name": call.name, "arguments": call.arguments},
                }
                for i, call in enumerate(answer.calls)
            ]
        return {
            "index": choice.index,
            "message": message,
            "logprobs": {"content": choice.logprobs} if self._body.logprobs else None,
            "finish_reason": run.finish_reason(choice),
            "stop_reason": choice.finish.stop,
            **({"token_ids": choice.tokens} if self._body.return_token_ids else {}),
        }

    async def stream(self, run: ChatRun) -> AsyncIterator[bytes]:
        """Encoded events: role, deltas, finish per choice, then usage and `[DONE]`; an error becomes one event."""
        try:
            async for event in self._events(run):
                yield event
        except Exception as error:
            yield data_event(failure_of(error).openai())
        finally:
            run.close()
        yield DONE

    async def _events(self, run: ChatRun) -> AsyncIterator[bytes]:
        options = self._body.stream_options
        include = self._service.options.force_usage or bool(options and options.include_usage)
        continuous = bool(options and options.continuous_usage_stats)
        begun: set[int] = set()
        async for update in run.updates():
            if update.index not in begun:
                begun.add(update.index)
                first: dict[str, Any] = {"role": "assistant", "content": self._echo()}
                extra = {"prompt_token_ids": run.prompt} if self._body.return_token_ids else {}
                yield self._chunk(run, continuous, self._delta_choice(update.index, first), **extra)
            for choice in self._deltas(run, update):
                yield self._chunk(run, continuous, choice)
        if include:
            yield data_event(
                {
                    **self._base,
                    "object": "chat.completion.chunk",
                    "choices": [],
                    "usage": self._usage(run),
                    "metrics": self._metrics(run),
                    "system_fingerprint": self._service.options.fingerprint,
                }
            )

    def _deltas(self, run: ChatRun, update: Update) -> list[dict[str, Any]]:
        """The step's deltas, neighbours of one kind merged; log-probabilities ride on the first."""
        choices = [self._delta_choice(update.index, delta) for delta in self._merge(update.index, update.parts)]
        if update.finish is not None:
            last = self._delta_choice(update.index, {})
            last["finish_reason"] = run.finish_reason(run.choices[update.index])
            last["stop_reason"] = update.finish.stop
            choices.append(last)
        elif not choices and (update.logprobs or self._body.return_token_ids):
            choices.append(self._delta_choice(update.index, {"content": ""}))
        if choices and update.logprobs:
            choices[0]["logprobs"] = {"content": update.logprobs}
        if choices and self._body.return_token_ids:
            choices[0]["token_ids"] = list(update.tokens)
        return choices

    def _merge(self, index: int, parts: list[Part]) -> list[dict[str, Any]]:
        out: list[dict[str, Any]] = []
        previous: Part | None = None
        for part in parts:
            if isinstance(part, CallEnd):
                continue
            joins = type(part) is type(previous) and getattr(part, "index", 0) == getattr(previous, "index", 0)
            match part:
                case Reasoning(text):
                    before = out[-1] if joins else {}
                    delta = {n: before.get(n, "") + text for n in self._service.options.reasoning_fields}
                case Content(text):
                    delta = {"content": (out[-1]["content"] if joins else "") + text}
                case CallStart(i, name):
                    joins = False
                    function = {"name": name, "arguments": ""}
                    call = {"index": i, "id": self._call_id(index, i), "type": "function", "function": function}
                    delta = {"tool_calls": [call]}
                case CallArguments(i, text):
                    before_text = out[-1]["tool_calls"][0]["function"]["arguments"] if joins else ""
                    delta = {"tool_calls": [{"index": i, "function": {"arguments": before_text + text}}]}
            if joins:
                out[-1] = delta
            else:
                out.append(delta)
            previous = part
        return out

    @staticmethod
    def _delta_choice(index: int, delta: dict[str, Any]) -> dict[str, Any]:
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}

    def _chunk(self, run: ChatRun, with_usage: bool, choice: dict[str, Any], **extra: Any) -> bytes:
        chunk = {**self._base, "object": "chat.completion.chunk", "choices": [choice], **extra}
        if with_usage:
            chunk["usage"] = self._usage(run)
        return data_event(chunk)

    def _usage(self, run: ChatRun) -> dict[str, Any]:
        return usage(len(run.prompt), run.completion_tokens, run.cached_tokens, run.reasoning_tokens)

    def _metrics(self, run: ChatRun) -> dict[str, Any] | None:
        if not self._service.options.request_metrics or len(run.choices) > 1:
            return None
        return reply_metrics(run.generation.stats(0))

    def _echo(self) -> str:
        last = self._body.messages[-1]
        echoes = self._body.echo and last.get("role") == "assistant" and isinstance(last.get("content"), str)
        return last["content"] if echoes else ""

    def _call_id(self, choice: int, call: int) -> str:
        return self._call_ids.setdefault((choice, call), new_id("chatcmpl-tool-"))
