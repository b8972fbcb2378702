"""POST /v1/messages and /v1/messages/count_tokens."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

from fastapi import APIRouter, Request
from pydantic_core import from_json
from starlette.responses import Response

from soloist.server.anthropic import turn_of
from soloist.server.body import read_json
from soloist.server.chat_run import ChatRun, start
from soloist.server.choice import Choice
from soloist.server.errors import failure_of
from soloist.server.fields import sort_extras
from soloist.server.ids import new_id
from soloist.server.observe import Observer
from soloist.server.parsers.parts import CallArguments, CallEnd, CallStart, Content, Part, Reasoning
from soloist.server.prompting import prepare
from soloist.server.protocol.anthropic import CountRequest, MessagesRequest
from soloist.server.reply import JsonReply
from soloist.server.schema import body_of
from soloist.server.service import Service
from soloist.server.stream import EventStream, named_event, unless_gone, with_pings

router = APIRouter()

_PING = named_event("ping", {"type": "ping"})


@router.post("/v1/messages", openapi_extra=body_of(MessagesRequest))
async def messages(request: Request) -> Response:
    """One assistant turn, as one JSON reply or a stream of named events."""
    service: Service = request.app.state.service
    body = MessagesRequest.model_validate(await read_json(request))
    turn, ignored = turn_of(body)
    headers = service.ignored.headers(sort_extras(body.model_extra) + ignored)
    reply = MessageReply(service, service.check_model(body.model))
    run = await unless_gone(request, start(service, turn, reply.observer))
    if body.stream:
        chunks = with_pings(reply.stream(run), service.options.keepalive_s, _PING)
        return EventStream(chunks, run.close, headers)
    try:
        return JsonReply(await unless_gone(request, reply.whole(run)), headers=headers)
    finally:
        run.close()


@router.post("/v1/messages/count_tokens", openapi_extra=body_of(CountRequest))
async def count_tokens(request: Request) -> Response:
    """How many tokens the prompt of such a request has."""
    service: Service = request.app.state.service
    body = CountRequest.model_validate(await read_json(request))
    turn, ignored = turn_of(body)
    headers = service.ignored.headers(sort_extras(body.model_extra) + ignored)
    service.check_model(body.model)
    ids = (await prepare(service, turn)).ids
    return JsonReply({"input_tokens": len(ids)}, headers=headers)


class MessageReply:
    """Builds the message of one request, whole or as events."""

    def __init__(self, service: Service, model: str) -> None:
        self._service = service
        self._id = new_id("msg_")
        self._model = model
        self.observer = Observer(service.meters, service.live, "messages", self._id)

    def _message(self, content: list[dict[str, Any]], usage: dict[str, Any], **ending: Any) -> dict[str, Any]:
        return {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": content,
            "stop_reason": None,
            "stop_sequence": None,
            **ending,
            "usage": usage,
        }

    async def whole(self, run: ChatRun) -> dict[str, Any]:
        async for _ in run.updates():
            pass
        answer = run.choices[0].answer
        content: list[dict[str, Any]] = []
        if answer.reasoning:
            content.append({"type": "thinking", "thinking": answer.reasoning, "signature": new_id("sig_")})
        if answer.content:
            content.append({"type": "text", "text": answer.content})
        for call in answer.calls:
            use = {"type": "tool_use", "id": new_id("toolu_"), "name": call.name, "input": from_json(call.arguments)}
            content.append(use)
        return self._message(content, self._usage(run), **self._ending(run))

    async def stream(self, run: ChatRun) -> AsyncIterator[bytes]:
        """Named events in Anthropic's order; an error becomes an `error` event."""
        blocks = _Blocks()
        try:
            first = {"input_tokens": len(run.prompt), "output_tokens": 0}
            first |= {"cache_creation_input_tokens": 0, "cache_read_input_tokens": 0}
            yield named_event("message_start", {"type": "message_start", "message": self._message([], first)})
            async for update in run.updates():
                for part in update.parts:
                    for event in blocks.add(part):
                        yield event
            for event in blocks.close():
                yield event
            delta = {"type": "message_delta", "delta": self._ending(run), "usage": self._usage(run)}
            yield named_event("message_delta", delta)
            yield named_event("message_stop", {"type": "message_stop"})
        except Exception as error:
            yield named_event("error", failure_of(error).anthropic())
        finally:
            run.close()

    def _ending(self, run: ChatRun) -> dict[str, Any]:
        choice: Choice = run.choices[0]
        assert choice.finish is not None
        reason, stop = run.finish_reason(choice), choice.finish.stop
        if reason == "length":
            return {"stop_reason": "max_tokens", "stop_sequence": None}
        if reason == "tool_calls":
            return {"stop_reason": "tool_use", "stop_sequence": None}
        if isinstance(stop, str):
            return {"stop_reason": "stop_sequence", "stop_sequence": stop}
        return {"stop_reason": "end_turn", "stop_sequence": None}

    def _usage(self, run: ChatRun) -> dict[str, Any]:
        """`input_tokens` is the whole prompt, the cached part included."""
        return {
            "input_tokens": len(run.prompt),
            "output_tokens": run.completion_tokens,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": run.cached_tokens,
        }


class _Blocks:
    """Content blocks of a stream: at most one is open, indices count up."""

    def __init__(self) -> None:
        self._index = -1
        self._kind: str | None = None

    def add(self, part: Part) -> list[bytes]:
        match part:
            case Reasoning(text):
                opening = self._switch("thinking", {"type": "thinking", "thinking": "", "signature": ""})
                return [*opening, self._delta({"type": "thinking_delta", "thinking": text})]
            case Content(text):
                opening = self._switch("text", {"type": "text", "text": ""})
                return [*opening, self._delta({"type": "text_delta", "text": text})]
            case CallStart(_, name):
                use = {"type": "tool_use", "id": new_id("toolu_"), "name": name, "input": {}}
                return [*self.close(), *self._switch("tool_use", use)]
            case CallArguments(_, text):
                return [self._delta({"type": "input_json_delta", "partial_json": text})]
            case CallEnd():
                return self.close()

    def close(self) -> list[bytes]:
        """End the open block, if there is one."""
        if self._kind is None:
            return []
        events = []
        if self._kind == "thinking":
            events.append(self._delta({"type": "signature_delta", "signature": new_id("sig_")}))
        self._kind = None
        stop = {"type": "content_block_stop", "index": self._index}
        return [*events, named_event("content_block_stop", stop)]

    def _switch(self, kind: str, block: dict[str, Any]) -> list[bytes]:
        if self._kind == kind:
            return []
        events = self.close()
        self._kind = kind
        self._index += 1
        start = {"type": "content_block_start", "index": self._index, "content_block": block}
        return [*events, named_event("content_block_start", start)]

    def _delta(self, delta: dict[str, Any]) -> bytes:
        event = {"type": "content_block_delta", "index": self._index, "delta": delta}
        return named_event("content_block_delta", event)
