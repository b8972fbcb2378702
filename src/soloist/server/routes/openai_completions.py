"""POST /v1/completions: raw text in, raw text out; no template, no parsers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from soloist.engine.request import Event, TokenLogprobs
from soloist.errors import RequestError
from soloist.server.body import read_json
from soloist.server.errors import failure_of
from soloist.server.fields import sort_extras
from soloist.server.generation import Generation, Plan
from soloist.server.ids import new_id
from soloist.server.logprobs import CompletionLogprobs, TokenNames, prompt_listing
from soloist.server.metrics import reply_metrics
from soloist.server.observe import Observer
from soloist.server.protocol.completions import CompletionRequest
from soloist.server.reply import JsonReply
from soloist.server.sampling import choice_seed, resolve_max_tokens, sampling_params
from soloist.server.schema import body_of
from soloist.server.service import Service
from soloist.server.stream import DONE, EventStream, data_event, unless_gone, with_pings
from soloist.server.structured import Constraint, constraint_of
from soloist.server.text import TextStream
from soloist.server.usage import usage

router = APIRouter()

MAX_SEQUENCES = 256


@router.post("/v1/completions", openapi_extra=body_of(CompletionRequest))
async def completions(request: Request) -> Response:
    """Text completion of one or several prompts."""
    service: Service = request.app.state.service
    body = CompletionRequest.model_validate(await read_json(request))
    headers = service.ignored.headers(sort_extras(body.model_extra))
    model, prompts, constraint = service.check_model(body.model), prompts_of(service, body), constraint_of(body)
    if constraint is not None:
        await asyncio.to_thread(constraint.build, service.grammars)  # compiled once; errors come before the first byte
    reply = CompletionReply(service, body, model, prompts, constraint)
    if body.stream:
        return EventStream(with_pings(reply.stream(), service.options.keepalive_s), reply.close, headers)
    try:
        return JsonReply(await unless_gone(request, reply.whole()), headers=headers)
    finally:
        reply.close()


def prompts_of(service: Service, body: CompletionRequest) -> list[list[int]]:
    """Token ids of every prompt. Raises RequestError for empty prompts and ids outside the vocabulary."""
    encode = service.tokenizer.encode_with_specials if body.add_special_tokens else service.tokenizer.encode
    given = body.prompt
    if isinstance(given, str):
        prompts = [encode(given)]
    elif given and all(isinstance(item, int) for item in given):
        prompts = [list(given)]  # type: ignore[arg-type]
    else:
        prompts = [encode(item) if isinstance(item, str) else list(item) for item in given]  # type: ignore[arg-type]
    if not prompts or not all(prompts):
        raise RequestError("prompt must hold at least one token.", param="prompt")
    if len(prompts) * body.choices > MAX_SEQUENCES:
        raise RequestError(f"prompts times n must be at most {MAX_SEQUENCES}.", param="prompt")
    limit = service.engine.vocab_size
    if any(not 0 <= token < limit for prompt in prompts for token in prompt):
        raise RequestError(f"prompt ids must be below {limit}.", param="prompt")
    return prompts


class _Choice:
    """One completion: its text so far, and the pieces of its logprobs listing."""

    def __init__(self, reply: CompletionReply, index: int, prompt: list[int]) -> None:
        self.index = index
        self.prompt = prompt
        self.reply = reply
        self.stream = reply.text()
        self.lists = CompletionLogprobs(TokenNames(reply.service.tokenizer, reply.body.return_tokens_as_token_ids))
        self.text = ""
        self.tokens: list[int] = []
        self.logprobs: dict[str, list[Any]] = {}
        self.prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None
        self.final: Event | None = None
        self._begun = False

    def take(self, event: Event) -> tuple[str, dict[str, Any] | None, list[int]]:
        """(text, logprobs, tokens) that this event adds; with `echo` the prompt comes first."""
        body = self.reply.body
        text, items, tokens = "", [], []
        if event.prompt_logprobs is not None:
            self.prompt_logprobs = event.prompt_logprobs
        if not self._begun:
            self._begun = True
            if body.echo:
                text = self.reply.service.tokenizer.decode(self.prompt)
                tokens = list(self.prompt)
                items = list(self.prompt_logprobs or [None] * len(tokens))
        if not self.reply.prompt_only:
            text += self._generated(event)
            self.tokens.extend(event.tokens)
            tokens.extend(event.tokens)
            items.extend(event.logprobs or [None] * len(event.tokens))
        listing = self.lists.listing(items, tokens) if body.logprobs is not None else None
        for name, values in (listing or {}).items():
            self.logprobs.setdefault(name, []).extend(values)
        self.text += text
        if event.finish_reason is not None:
            self.final = event
        return text, listing, list(event.tokens)

    def _generated(self, event: Event) -> str:
        shown: Sequence[int] = event.tokens
        stopped_by_id = event.finish_reason == "stop" and not isinstance(event.stop_reason, str)
        if stopped_by_id and not self.reply.body.include_stop_str_in_output:
            shown = shown[:-1]
        pieces = [piece for token in shown for piece in self.stream.push(token)]
        if event.finish_reason is not None:
            pieces += self.stream.finish()
        return "".join(piece.text for piece in pieces)

    @property
    def finish_reason(self) -> str | None:
        if self.final is None:
            return None
        return "length" if self.reply.prompt_only else self.final.finish_reason

    @property
    def stop_reason(self) -> str | int | None:
        return None if self.final is None or self.reply.prompt_only else self.final.stop_reason


class CompletionReply:
    """Submits on construction (so that errors precede the first byte) and builds the reply objects."""

    def __init__(
        self,
        service: Service,
        body: CompletionRequest,
        model: str,
        prompts: list[list[int]],
        constraint: Constraint | None = None,
    ) -> None:
        self.service = service
        self.body = body
        self.prompts = prompts
        self._constraint = constraint
        self.prompt_only = body.max_tokens == 0 and body.echo
        reply_id = f"cmpl-{body.request_id}" if body.request_id else new_id("cmpl-")
        self._base = {"id": reply_id, "object": "text_completion", "created": int(time.time()), "model": model}
        plans = [plan for prompt in prompts for plan in self._plans(prompt)]
        self._choices = [_Choice(self, i, plan.prompt) for i, plan in enumerate(plans)]
        self.generation = Generation(
            service.engine, plans, Observer(service.meters, service.live, "completions", reply_id)
        )

    def _plans(self, prompt: list[int]) -> list[Plan]:
        body, service = self.body, self.service
        wanted = 1 if self.prompt_only else body.max_tokens
        params = sampling_params(
            body,
            max_tokens=resolve_max_tokens(wanted, len(prompt), service.engine.max_len),
            logprobs=body.logprobs,
            defaults=service.options.defaults,
            tokenizer=service.tokenizer,
            eos_ids=service.engine.eos_ids,
            vocab_size=service.engine.vocab_size,
        )
        if body.echo and body.logprobs is not None and params.prompt_logprobs is None:
            params = replace(params, prompt_logprobs=body.logprobs)
        return [
            Plan(
                prompt,
                replace(params, seed=choice_seed(params.seed, j)),
                self.text,
                bool(body.stop),
                grammar=self._constraint.build(service.grammars) if self._constraint else None,
                cache_salt=body.cache_salt or "",
            )
            for j in range(body.choices)
        ]

    def text(self) -> TextStream:
        body = self.body
        return TextStream(
            self.service.tokenizer,
            body.stop or (),
            body.include_stop_str_in_output,
            body.skip_special_tokens,
            min_tokens=body.min_tokens,
        )

    async def whole(self) -> dict[str, Any]:
        async for index, event in self.generation.events():
            self._choices[index].take(event)
        metrics = None
        if self.service.options.request_metrics and len(self._choices) == 1:
            metrics = reply_metrics(self.generation.stats(0))
        return {
            **self._base,
            "choices": [self._whole_choice(choice) for choice in self._choices],
            "usage": self._usage(),
            "system_fingerprint": self.service.options.fingerprint,
            "metrics": metrics,
        }

    def _whole_choice(self, choice: _Choice) -> dict[str, Any]:
        listing = None
        if self.body.prompt_logprobs is not None and choice.prompt_logprobs is not None:
            listing = prompt_listing(choice.prompt_logprobs, self.service.tokenizer)
        ids = {"token_ids": choice.tokens, "prompt_token_ids": choice.prompt} if self.body.return_token_ids else {}
        return {
            "index": choice.index,
            "text": choice.text,
            "logprobs": choice.logprobs if self.body.logprobs is not None else None,
            "finish_reason": choice.finish_reason,
            "stop_reason": choice.stop_reason,
            "prompt_logprobs": listing,
            **ids,
        }

    async def stream(self) -> AsyncIterator[bytes]:
        """Encoded events: text deltas, then usage when asked for, then `[DONE]`."""
        try:
            async for event in self._events():
                yield event
        except Exception as error:
            yield data_event(failure_of(error).openai())
        finally:
            self.close()
        yield DONE

    async def _events(self) -> AsyncIterator[bytes]:
        options = self.body.stream_options
        continuous = bool(options and options.continuous_usage_stats)
        async for index, event in self.generation.events():
            choice = self._choices[index]
            text, listing, tokens = choice.take(event)
            if not (text or listing or event.finish_reason or self.body.return_token_ids):
                continue
            ids = {"token_ids": tokens} if self.body.return_token_ids else {}
            entry = {
                "index": index,
                "text": text,
                "logprobs": listing,
                "finish_reason": choice.finish_reason,
                "stop_reason": choice.stop_reason,
                **ids,
            }
            chunk = {**self._base, "choices": [entry]}
            yield data_event({**chunk, "usage": self._usage()} if continuous else chunk)
        if self.service.options.force_usage or (options and options.include_usage):
            metrics = None
            if self.service.options.request_metrics and len(self._choices) == 1:
                metrics = reply_metrics(self.generation.stats(0))
            yield data_event({**self._base, "choices": [], "usage": self._usage(), "metrics": metrics})

    def _usage(self) -> dict[str, Any]:
        cached = sum(self.generation.stats(i * self.body.choices).cached_tokens for i in range(len(self.prompts)))
        prompt = sum(map(len, self.prompts))
        return usage(prompt, sum(len(choice.tokens) for choice in self._choices), cached)

    def close(self) -> None:
        self.generation.close()
