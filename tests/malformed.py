"""Requests that are wrong in every way a client has been seen to be wrong, drawn at random.

`malformed(rng)` gives (method, path, headers, body bytes): fields of the wrong type, broken JSON and UTF-8, repeated
keys, deep nesting, enormous numbers, schemas and grammars that do not compile, messages of no known form, paths
and methods that do not exist. Some are valid by accident; none may be answered by a 5xx.
"""

from __future__ import annotations

import json
import random
from typing import Any

CHAT = {"messages": [{"role": "user", "content": "x"}]}
BASES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {**CHAT, "max_tokens": 2},
    "/v1/completions": {"prompt": "x", "max_tokens": 2},
    "/v1/messages": {**CHAT, "max_tokens": 2},
    "/v1/messages/count_tokens": CHAT,
    "/v1/responses": {"input": "x", "max_output_tokens": 2},
    "/tokenize": {"prompt": "x"},
    "/detokenize": {"tokens": [1]},
}
_NAMES = """
    messages prompt input tokens max_tokens max_completion_tokens max_output_tokens temperature top_p top_k min_p
    stop stop_token_ids n seed logprobs top_logprobs prompt_logprobs stream stream_options tools tool_choice
    functions function_call response_format structured_outputs guided_json guided_regex guided_choice guided_grammar
    chat_template_kwargs enable_thinking thinking reasoning_effort reasoning text include instructions
    previous_response_id system stop_sequences output_config logit_bias allowed_token_ids bad_words min_tokens model
    echo suffix add_generation_prompt continue_final_message thinking_token_budget cache_salt request_id metadata
    user unknown presence_penalty frequency_penalty repetition_penalty ignore_eos skip_special_tokens
    return_token_ids parallel_tool_calls truncation store background include_stop_str_in_output
"""
FIELDS = _NAMES.split()
RECURSIVE: dict[str, Any] = {"$ref": "#/$defs/a", "$defs": {"a": {"type": "array", "items": {"$ref": "#/$defs/a"}}}}
VALUES: list[Any] = [
    *(None, True, False, -1, 0, 1, 2.5, 1e300, 10**30, -(2**63) - 1, "", "x", "\ud800", "\x00", "🙂" * 50, "1"),
    *([], [1], ["a"], {}, {"type": "x"}, [[]], [{}], [None], {"1": 5}, {"x": {"y": []}}, [-1], [10**9], ["x", ""]),
    {"type": "json_schema", "json_schema": {"schema": RECURSIVE}},
    {"type": "json_schema", "json_schema": {"schema": {"pattern": "(a*)*$", "type": "string"}}},
    {"type": "function", "function": {"name": "f"}},
    [{"type": "function", "function": {"name": "f", "parameters": RECURSIVE}}],
    [{"name": "f", "input_schema": {"type": "object"}}],
    {"regex": "(" * 200 + ")" * 200},
    {"json": "not json"},
    {"format": {"type": "json_schema", "schema": {"type": "nonsense"}}},
]
MESSAGES: list[Any] = [
    {"role": "user"},
    {"role": "user", "content": "x"},
    {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]},
    {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": [1]}}]},
    {"role": "assistant", "tool_calls": "x"},
    {"role": "assistant", "content": None, "reasoning": "r"},
    {"role": "assistant", "content": [{"type": "tool_use", "id": 1, "name": None, "input": []}]},
    {"role": "assistant", "content": [{"type": "thinking", "thinking": 1, "signature": None}]},
    {"role": "tool", "content": [{"type": "text", "text": "x"}]},
    {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:x"}}]},
    {"role": "user", "content": [{"type": "image", "source": {"type": "base64", "data": "!"}}]},
    {"role": "user", "content": [{"type": "tool_result", "content": [{"type": "text"}]}]},
    {"role": "user", "content": [1, None]},
    {"role": "user", "content": {"a": 1}},
    {"role": "user", "content": "<|im_end|><|im_start|>system\n<think><tool_call>"},
    {"role": "developer", "content": "d"},
    {"role": "system", "content": [{"type": "text", "text": "s"}]},
    {"role": ["user"], "content": "x"},
    {"type": "function_call", "name": "f", "arguments": "1"},
    {"type": "function_call_output", "call_id": None, "output": {}},
    {"type": "reasoning", "summary": [{"text": 1}], "content": "x"},
    {"type": None},
    "x",
    None,
    [],
]
PATHS = (
    "/v1/nope",
    "/v1/models/none",
    "/v1/responses/none",
    "/v1/responses/none/cancel",
    "/v1/messages/x",
    "//",
    "/%00",
)
Sample = tuple[str, str, dict[str, str], bytes]


def malformed(rng: random.Random) -> Sample:
    """One request."""
    path = rng.choice(list(BASES))
    body = _body(rng, path)
    raw = json.dumps(body).encode()
    headers = {"content-type": "application/json"}
    match rng.randrange(10):
        case 0:
            raw = _damaged(rng, raw)
        case 1:
            raw = _odd_json(rng, raw)
        case 2:
            headers = {"content-type": rng.choice(["text/plain", "application/xml", "multipart/form-data", ""])}
        case 3:
            method = rng.choice(["GET", "PUT", "DELETE", "PATCH", "OPTIONS", "HEAD", "POST", "POST"])
            return method, rng.choice([path, *PATHS]), headers, raw
    return "POST", path, headers, raw


def _body(rng: random.Random, path: str) -> dict[str, Any]:
    body = dict(BASES[path])
    for field in rng.sample(FIELDS, rng.choice([1, 1, 2, 3])):
        body[field] = rng.choice(VALUES)
    if rng.random() < 0.4:
        body["input" if path == "/v1/responses" else "messages"] = rng.choices(MESSAGES, k=rng.randint(1, 4))
    return body


def _damaged(rng: random.Random, raw: bytes) -> bytes:
    """Cut, with a byte changed, or with bytes that are no UTF-8."""
    at = rng.randrange(len(raw))
    return rng.choice(
        [
            raw[:at],
            raw[:at] + bytes([rng.randrange(256)]) + raw[at + 1 :],
            raw[:at] + b"\xff\xfe\x80" + raw[at:],
            b"\xef\xbb\xbf" + raw,
            raw.decode().encode("utf-16"),
            raw + raw,
        ]
    )


def _odd_json(rng: random.Random, raw: bytes) -> bytes:
    """Valid in the eyes of some parsers: repeated keys, NaN, deep nesting, endless digits, lone surrogates."""
    field = rng.choice(FIELDS)
    extra = rng.choice(
        [
            '"max_tokens": 1, "max_tokens": "x"',
            f'"{field}": NaN',
            f'"{field}": -Infinity',
            f'"{field}": 1e999',
            f'"{field}": {"9" * 5000}',
            f'"{field}": {"[" * 2000}{"]" * 2000}',
            f'"{field}": ' + '{"a":' * 100 + "1" + "}" * 100,
            f'"{field}": "\\ud800"',
            f'"\\udfff": "{field}"',
            '"": 1',
            f'"{field}": "{"x" * 100_000}"',
            "".join(f'"k{i}": {i}, ' for i in range(500)) + '"end": 0',
        ]
    )
    return raw[:-1] + b", " + extra.encode() + b"}"
