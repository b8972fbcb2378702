"""`smoke`: one request per API feature, PASS or FAIL. Works on any OpenAI-compatible server."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Awaitable, Callable
from typing import Any

from soloist.bench.client import Client
from soloist.bench.result import Column, Result, Table
from soloist.bench.run import GREEDY, Context

COLUMNS = [Column("feature", "feature"), Column("outcome", "outcome"), Column("detail", "detail")]
HELLO = [{"role": "user", "content": "Hello, who are you?"}]
TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get the current weather for a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "description": "Name of the city"}},
            "required": ["city"],
        },
    },
}
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}

Probe = Callable[[Context], Awaitable[str]]
PROBES: list[tuple[str, Probe]] = []


class Wrong(Exception):
    """A feature did not behave as specified; the text says how."""


def probe(name: str) -> Callable[[Probe], Probe]:
    """Register one feature's request under the name its row gets."""

    def register(function: Probe) -> Probe:
        PROBES.append((name, function))
        return function

    return register


def need(condition: object, text: str) -> None:
    if not condition:
        raise Wrong(text)


async def run(context: Context, only: str | None = None) -> Result:
    """Try every feature (or those whose name contains `only`), one after the other."""
    result = Result("smoke")
    table = Table("API features", COLUMNS)
    for name, function in PROBES:
        if only and only not in name:
            continue
        try:
            detail, outcome = await function(context), "PASS"
        except Wrong as fault:
            detail, outcome = str(fault), "FAIL"
        except (KeyError, IndexError, TypeError, ValueError, AttributeError) as fault:
            detail, outcome = f"the reply has another shape ({type(fault).__name__}: {fault})", "FAIL"
        if outcome == "FAIL":
            result.failures.append(f"{name}: {detail}")
        table.rows.append({"feature": name, "outcome": outcome, "detail": " ".join(detail.split())})
        context.tick(name)
    passed = sum(row["outcome"] == "PASS" for row in table.rows)
    result.notes.append(f"{passed} of {len(table.rows)} passed.")
    result.tables = [table]
    return result


async def ask(context: Context, path: str = "/v1/chat/completions", **fields: Any) -> dict[str, Any]:
    """A plain (not streamed) request that must succeed."""
    body = {"model": context.client.model, **context.fields, **fields}
    if path == "/v1/chat/completions":
        body.setdefault("messages", HELLO)
    status, reply = await context.client.post(path, body)
    need(status == 200, f"status {status}: {str(reply)[:160]}")
    return reply


async def refused(client: Client, path: str, body: dict[str, Any], status: int) -> dict[str, Any]:
    got, reply = await client.post(path, body)
    need(got == status, f"status {got} instead of {status}")
    need(isinstance(reply, dict) and isinstance(reply.get("error"), dict), "no error object in the body")
    return reply["error"]


@probe("models")
async def _models(context: Context) -> str:
    reply = await context.client.get("/v1/models")
    need(reply and reply["object"] == "list" and reply["data"], "no list of models")
    return ", ".join(m["id"] for m in reply["data"])


@probe("health")
async def _health(context: Context) -> str:
    need(await context.client.get("/health") is not None, "/health is not 200")
    return "200"


@probe("chat")
async def _chat(context: Context) -> str:
    reply = await ask(context, max_tokens=16, **GREEDY)
    choice, usage = reply["choices"][0], reply["usage"]
    need(choice["finish_reason"] in ("stop", "length"), f"finish_reason {choice['finish_reason']!r}")
    need(0 < usage["completion_tokens"] <= 16, f"completion_tokens {usage['completion_tokens']}")
    need(usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"], "usage does not add up")
    return f"{usage['completion_tokens']} tokens, {choice['finish_reason']}"


@probe("chat streamed equals whole")
async def _stream(context: Context) -> str:
    whole = (await ask(context, max_tokens=40, **GREEDY))["choices"][0]["message"]
    streamed = await context.chat(HELLO, max_tokens=40, **GREEDY)
    need(not streamed.error, streamed.error or "")
    expected = (whole.get("reasoning") or whole.get("reasoning_content") or "") + (whole["content"] or "")
    need((streamed.reasoning + streamed.text).strip() == expected.strip(), "the streamed text differs")
    need(streamed.completion_tokens, "no usage in the stream")
    return f"{len(streamed.gaps_ms) + 1} chunks, {streamed.completion_tokens} tokens"


@probe("completions")
async def _completions(context: Context) -> str:
    reply = await ask(context, "/v1/completions", prompt="Once upon a time there was", max_tokens=12, **GREEDY)
    need(reply["choices"][0]["text"], "no text")
    return repr(reply["choices"][0]["text"][:40])


@probe("completions of token ids")
async def _ids(context: Context) -> str:
    text = "The quick brown fox jumps over"
    status, body = await context.client.post("/tokenize", {"model": context.client.model, "prompt": text})
    need(status == 200, f"/tokenize answered {status}")
    a = await ask(context, "/v1/completions", prompt=body["tokens"], max_tokens=8, **GREEDY)
    b = await ask(context, "/v1/completions", prompt=text, max_tokens=8, **GREEDY)
    need(a["choices"][0]["text"] == b["choices"][0]["text"], "ids and text give different answers")
    return f"{body['count']} ids"


@probe("echo with log-probabilities")
async def _echo(context: Context) -> str:
    reply = await ask(context, "/v1/completions", prompt="One two three four five", max_tokens=1, echo=True, logprobs=1)
    values = reply["choices"][0]["logprobs"]["token_logprobs"]
    need(values[0] is None and all(v <= 0 for v in values[1:]), "token_logprobs is not null, then numbers")
    return f"{len(values)} values"


@probe("seed repeats")
async def _seed(context: Context) -> str:
    texts = [await context.chat("Write a short story.", max_tokens=40, temperature=1.0, seed=11) for _ in range(2)]
    need(not any(t.error for t in texts), texts[0].error or texts[1].error or "")
    need(texts[0].text == texts[1].text and texts[0].reasoning == texts[1].reasoning, "one seed gave two texts")
    return "same text"


@probe("n choices")
async def _n(context: Context) -> str:
    choices = (await ask(context, max_tokens=12, temperature=1.0, seed=3, n=3))["choices"]
    need([c["index"] for c in choices] == [0, 1, 2], "indices are not 0, 1, 2")
    return "3 choices"


@probe("stop string")
async def _stop(context: Context) -> str:
    full = await context.chat(HELLO, max_tokens=40, **GREEDY)
    need(not full.error, full.error or "")
    words = (full.text or full.reasoning).split()
    need(len(words) > 4, "the answer is too short to stop inside")
    stop = words[3]
    reply = (await ask(context, max_tokens=40, stop=stop, **GREEDY))["choices"][0]
    said = (reply["message"]["content"] or "") + (reply["message"].get("reasoning") or "")
    need(stop not in said, "the stop string is in the answer")
    need(reply["finish_reason"] == "stop", f"finish_reason {reply['finish_reason']!r}")
    return repr(stop)


@probe("log-probabilities")
async def _logprobs(context: Context) -> str:
    reply = await ask(context, max_tokens=6, logprobs=True, top_logprobs=3, **GREEDY)
    content = reply["choices"][0]["logprobs"]["content"]
    need(len(content) == reply["usage"]["completion_tokens"], "not one entry per token")
    need(all(len(c["top_logprobs"]) >= 3 and c["logprob"] <= 0 for c in content), "top_logprobs is short")
    return f"{len(content)} entries"


@probe("penalties and bias accepted")
async def _penalties(context: Context) -> str:
    await ask(context, max_tokens=8, presence_penalty=0.5, frequency_penalty=0.5, logit_bias={"10": -5}, top_p=0.9)
    return "200"


@probe("JSON schema")
async def _schema(context: Context) -> str:
    wanted = {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA, "strict": True}}
    answer = await context.chat(
        "Invent a person. Answer in JSON.", response_format=wanted, max_tokens=120,
        **{**GREEDY, "chat_template_kwargs": {"enable_thinking": False}},
    )  # fmt: skip
    need(not answer.error, answer.error or "")
    value = json.loads(answer.text)
    need(set(value) == {"name", "age"} and isinstance(value["age"], int), f"not of the schema: {answer.text[:80]}")
    return answer.text.replace("\n", " ")[:60]


@probe("regular expression")
async def _regex(context: Context) -> str:
    answer = await context.chat(
        "Give a date.", structured_outputs={"regex": r"\d{4}-\d{2}-\d{2}"}, max_tokens=24,
        **{**GREEDY, "chat_template_kwargs": {"enable_thinking": False}},
    )  # fmt: skip
    need(not answer.error, answer.error or "")
    need(re.fullmatch(r"\d{4}-\d{2}-\d{2}", answer.text), f"answered {answer.text[:40]!r}")
    return answer.text


@probe("tool call")
async def _tool(context: Context) -> str:
    answer = await context.chat(
        "What is the weather in Paris?", tools=[TOOL], tool_choice="required", max_tokens=120,
        **{**GREEDY, "chat_template_kwargs": {"enable_thinking": False}},
    )  # fmt: skip
    need(not answer.error, answer.error or "")
    need(answer.tool_calls, "no tool call")
    call = answer.tool_calls[0]
    need(call["name"] == "get_weather" and "city" in json.loads(call["arguments"]), f"called {call}")
    return call["arguments"]


@probe("tool result")
async def _tool_result(context: Context) -> str:
    call = {"id": "call_1", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Paris"}'}}
    turns = [
        {"role": "user", "content": "What is the weather in Paris?"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": '{"temperature": 18, "sky": "clear"}'},
    ]
    reply = await ask(context, messages=turns, tools=[TOOL], max_tokens=24, **GREEDY)
    return repr((reply["choices"][0]["message"]["content"] or "")[:40])


@probe("thinking off")
async def _no_thinking(context: Context) -> str:
    message = (await ask(context, max_tokens=24, chat_template_kwargs={"enable_thinking": False}, **GREEDY))["choices"][
        0
    ]
    need(not message["message"].get("reasoning"), "reasoning came although thinking is off")
    need(message["message"]["content"], "no content")
    return repr(message["message"]["content"][:40])


@probe("prefix cache")
async def _cache(context: Context) -> str:
    text = "Remember this list of words. " + " ".join(f"word{n}" for n in range(150))
    for _ in range(2):
        answer = await context.chat(text, max_tokens=4, **GREEDY)
        need(not answer.error, answer.error or "")
        await asyncio.sleep(0.3)
    need(answer.cached_tokens is not None, "cached_tokens is not reported")
    need(answer.cached_tokens, "the second request reused nothing")
    return f"{answer.cached_tokens} of {answer.prompt_tokens} tokens reused"


@probe("token counting")
async def _tokenize(context: Context) -> str:
    status, body = await context.client.post(
        "/tokenize", {"model": context.client.model, "prompt": "Smørrebrød, 42 €!"}
    )
    need(status == 200, f"/tokenize answered {status}")
    status, back = await context.client.post("/detokenize", {"model": context.client.model, "tokens": body["tokens"]})
    need(status == 200 and back["prompt"] == "Smørrebrød, 42 €!", f"came back as {back!r}")
    return f"{body['count']} tokens and back"


@probe("metrics")
async def _metrics(context: Context) -> str:
    samples = await context.client.metrics()
    need(samples is not None, "/metrics is absent")
    total = samples.total("vllm:generation_tokens_total") if samples else None
    need(total, "vllm:generation_tokens_total is absent or 0")
    return f"{total:.0f} tokens generated"


@probe("error: unknown model")
async def _unknown_model(context: Context) -> str:
    body = {"model": "no-such-model", "messages": HELLO, "max_tokens": 1}
    return (await refused(context.client, "/v1/chat/completions", body, 404))["message"][:60]


@probe("error: bad value names its field")
async def _bad_value(context: Context) -> str:
    body = {"model": context.client.model, "messages": HELLO, "temperature": -1, "max_tokens": 1}
    error = await refused(context.client, "/v1/chat/completions", body, 400)
    need(error.get("param") == "temperature" or "temperature" in error["message"], f"param {error.get('param')!r}")
    return error["message"][:60]


@probe("error: prompt too long")
async def _too_long(context: Context) -> str:
    models = await context.client.get("/v1/models")
    limit = next(m["max_model_len"] for m in models["data"] if m["id"] == context.client.model)
    need(limit, "max_model_len is not reported")
    body = {"model": context.client.model, "prompt": [100] * (limit + 1), "max_tokens": 1}
    error = await refused(context.client, "/v1/completions", body, 400)
    need("maximum context length" in error["message"], f"message {error['message'][:60]!r}")
    return error["message"][:60]


@probe("Anthropic messages")
async def _anthropic(context: Context) -> str:
    body = {"model": context.client.model, "messages": HELLO, "max_tokens": 24, "temperature": 0}
    status, reply = await context.client.post("/v1/messages", body)
    need(status == 200, f"status {status}")
    need(reply["type"] == "message" and reply["content"] and reply["usage"]["output_tokens"], "not a message object")
    return f"{reply['content'][0]['type']}, {reply['stop_reason']}"


@probe("Anthropic token count")
async def _count(context: Context) -> str:
    status, reply = await context.client.post(
        "/v1/messages/count_tokens", {"model": context.client.model, "messages": HELLO}
    )
    need(status == 200 and reply["input_tokens"] > 0, f"status {status}")
    return f"{reply['input_tokens']} tokens"


@probe("Responses")
async def _responses(context: Context) -> str:
    body = {"model": context.client.model, "input": "Hello, who are you?", "max_output_tokens": 24, "temperature": 0}
    status, reply = await context.client.post("/v1/responses", body)
    need(status == 200, f"status {status}")
    need(reply["object"] == "response" and reply["output"], "not a response object")
    return f"{reply['status']}, {len(reply['output'])} items"
