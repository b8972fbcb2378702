"""POST /v1/responses, GET /v1/responses/{id}, POST /v1/responses/{id}/cancel."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from soloist.errors import RequestError
from soloist.server.body import read_json
from soloist.server.chat_run import ChatRun, start
from soloist.server.errors import Failure, failure_of
from soloist.server.fields import sort_extras
from soloist.server.ids import new_id
from soloist.server.observe import Observer
from soloist.server.protocol.responses import ResponsesRequest
from soloist.server.reply import JsonReply
from soloist.server.response_items import Items
from soloist.server.response_store import Stored
from soloist.server.responses import turn_of
from soloist.server.schema import body_of
from soloist.server.service import Service
from soloist.server.stream import EventStream, named_event, unless_gone, with_pings

router = APIRouter()


@router.post("/v1/responses", openapi_extra=body_of(ResponsesRequest))
async def create_response(request: Request) -> Response:
    """One response, as one JSON reply or a stream of typed events."""
    service: Service = request.app.state.service
    body = ResponsesRequest.model_validate(await read_json(request))
    turn, conversation, ignored = turn_of(body, service.responses)
    headers = service.ignored.headers(sort_extras(body.model_extra) + ignored)
    reply = ResponseReply(service, body, service.check_model(body.model), conversation)
    run = await unless_gone(request, start(service, turn, reply.observer))
    reply.begin(run)
    if body.stream:
        chunks = with_pings(reply.stream(run), service.options.keepalive_s)
        return EventStream(chunks, reply.close, headers)
    try:
        return JsonReply(await unless_gone(request, reply.whole(run)), headers=headers)
    finally:
        reply.close()


@router.get("/v1/responses/{response_id}")
async def get_response(request: Request, response_id: str) -> Response:
    """A stored response."""
    service: Service = request.app.state.service
    stored = service.responses.get(response_id)
    if stored is None:
        raise _unknown(response_id)
    return JsonReply(stored.response)


@router.post("/v1/responses/{response_id}/cancel")
async def cancel_response(request: Request, response_id: str) -> Response:
    """Stop a running response; its stream ends with `response.incomplete`. A finished one cannot be cancelled."""
    service: Service = request.app.state.service
    run = service.responses.running.get(response_id)
    if run is not None:
        run.cancel()
        return JsonReply({"id": response_id, "object": "response", "status": "cancelled"})
    if service.responses.get(response_id) is None:
        raise _unknown(response_id)
    raise RequestError(f"The response {response_id!r} has ended; only a running one can be cancelled.")


def _unknown(response_id: str) -> RequestError:
    return RequestError(
        f"Response with id {response_id!r} not found.", param="response_id", status=404, kind="NotFoundError"
    )


class ResponseReply:
    """Builds the response object of one request, whole or as events with increasing sequence numbers."""

    def __init__(
        self, service: Service, body: ResponsesRequest, model: str, conversation: list[dict[str, Any]]
    ) -> None:
        self._service = service
        self._body = body
        self._model = model
        self._conversation = conversation
        self._id = new_id("resp_")
        self._created = int(time.time())
        self._sequence = -1
        self._run: ChatRun | None = None
        self._summarised = (body.reasoning or {}).get("summary") is not None
        self.observer = Observer(service.meters, service.live, "responses", self._id)

    def begin(self, run: ChatRun) -> None:
        """Make the running response known, so that it can be cancelled by id."""
        self._run = run
        self._service.responses.running[self._id] = run

    def close(self) -> None:
        self._service.responses.running.pop(self._id, None)
        if self._run is not None:
            self._run.close()

    async def whole(self, run: ChatRun) -> dict[str, Any]:
        items = Items(run, self._summarised)
        async for update in run.updates():
            items.add(update)
        items.close()
        return self._finish(run, items)

    async def stream(self, run: ChatRun) -> AsyncIterator[bytes]:
        """Events in OpenAI's order; an error becomes `response.failed`."""
        items = Items(run, self._summarised)
        try:
            opening = self._object(run, "in_progress", [])
            yield self._event("response.created", {"response": opening})
            yield self._event("response.in_progress", {"response": opening})
            async for update in run.updates():
                for name, fields in items.add(update):
                    yield self._event(name, fields)
            for name, fields in items.close():
                yield self._event(name, fields)
            final = self._finish(run, items)
            yield self._event(f"response.{final['status']}", {"response": final})
        except Exception as error:
            failure: Failure = failure_of(error)
            failed = self._object(run, "failed", items.done)
            failed["error"] = {"code": "server_error", "message": failure.message}
            yield self._event("response.failed", {"response": failed})
        finally:
            self.close()

    def _event(self, name: str, fields: dict[str, Any]) -> bytes:
        self._sequence += 1
        return named_event(name, {"type": name, "sequence_number": self._sequence, **fields})

    def _finish(self, run: ChatRun, items: Items) -> dict[str, Any]:
        choice = run.choices[0]
        reason = "cancelled" if run.cancelled else run.finish_reason(choice)
        cut = {"length": "max_output_tokens", "cancelled": "cancelled"}.get(reason)
        response = self._object(run, "incomplete" if cut else "completed", items.done)
        response["incomplete_details"] = {"reason": cut} if cut else None
        if self._body.store is not False:
            self._service.responses.put(Stored(response, [*self._conversation, items.message()]))
        return response

    def _object(self, run: ChatRun, status: str, output: list[dict[str, Any]]) -> dict[str, Any]:
        body = self._body
        ended = status != "in_progress"
        return {
            "id": self._id,
            "object": "response",
            "created_at": self._created,
            "completed_at": int(time.time()) if ended else None,
            "status": status,
            "background": False,
            "error": None,
            "incomplete_details": None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": body.metadata or {},
            "model": self._model,
            "output": output,
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": body.previous_response_id,
            "reasoning": body.reasoning or {"effort": None, "summary": None},
            "store": body.store is not False,
            "temperature": body.temperature,
            "text": body.text or {"format": {"type": "text"}},
            "tool_choice": body.tool_choice or "auto",
            "tools": body.tools or [],
            "top_logprobs": body.top_logprobs or 0,
            "top_p": body.top_p,
            "truncation": body.truncation or "disabled",
            "usage": self._usage(run) if ended else None,
        }

    @staticmethod
    def _usage(run: ChatRun) -> dict[str, Any]:
        return {
            "input_tokens": len(run.prompt),
            "input_tokens_details": {"cached_tokens": run.cached_tokens},
            "output_tokens": run.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": run.reasoning_tokens},
            "total_tokens": len(run.prompt) + run.completion_tokens,
        }
