"""POST /tokenize and /detokenize."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from soloist.errors import RequestError
from soloist.server.body import read_json
from soloist.server.fields import sort_extras
from soloist.server.prompting import prepare
from soloist.server.protocol.common import SamplingFields
from soloist.server.protocol.tokenize import DetokenizeRequest, TokenizeRequest
from soloist.server.reply import JsonReply
from soloist.server.schema import body_of
from soloist.server.service import Service
from soloist.server.thinking import resolve_thinking
from soloist.server.turn import Turn

router = APIRouter()


@router.post("/tokenize", openapi_extra=body_of(TokenizeRequest))
async def tokenize(request: Request) -> Response:
    """Ids of a text, or of the prompt that messages render to."""
    service: Service = request.app.state.service
    body = TokenizeRequest.model_validate(await read_json(request))
    headers = service.ignored.headers(sort_extras(body.model_extra))
    service.check_model(body.model)
    if (body.prompt is None) == (body.messages is None):
        raise RequestError("Send either prompt or messages.", param="prompt")
    if body.messages is not None:
        kwargs = dict(body.chat_template_kwargs or {})
        turn = Turn(
            fields=SamplingFields(),
            messages=body.messages,
            tools=[tool.model_dump(exclude_unset=True) for tool in body.tools or []],
            thinking=resolve_thinking(kwargs),
            template_kwargs={k: v for k, v in kwargs.items() if k != "enable_thinking"},
            add_generation_prompt=body.add_generation_prompt,
            continue_final=body.continue_final_message,
        )
        ids = (await prepare(service, turn)).ids
    else:
        assert body.prompt is not None
        specials = body.add_special_tokens is not False
        ids = (service.tokenizer.encode_with_specials if specials else service.tokenizer.encode)(body.prompt)
    reply: dict[str, Any] = {
        "count": len(ids),
        "max_model_len": service.engine.max_len,
        "tokens": ids,
        "token_strs": [service.tokenizer.token_name(i) for i in ids] if body.return_token_strs else None,
    }
    return JsonReply(reply, headers=headers)


@router.post("/detokenize", openapi_extra=body_of(DetokenizeRequest))
async def detokenize(request: Request) -> Response:
    """Text of a list of ids, special tokens included."""
    service: Service = request.app.state.service
    body = DetokenizeRequest.model_validate(await read_json(request))
    headers = service.ignored.headers(sort_extras(body.model_extra))
    service.check_model(body.model)
    if any(not 0 <= token < service.engine.vocab_size for token in body.tokens):
        raise RequestError(f"tokens must be ids below {service.engine.vocab_size}.", param="tokens")
    return JsonReply({"prompt": service.tokenizer.decode(body.tokens)}, headers=headers)
