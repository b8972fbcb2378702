"""Keys, sizes, origins, paths, malformed requests: everything that never reaches the engine."""

from __future__ import annotations

import json
import random
import re

import httpx
import pytest

from malformed import CHAT, malformed

POSTS = ("/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/messages/count_tokens", "/v1/responses")
POSTS += ("/tokenize", "/detokenize")


def test_keys(say):
    live = say("hi", api_keys=("secret", "zweitschlüssel"))
    url = live.url + "/v1/chat/completions"
    for headers in (
        {"Authorization": "Bearer secret"},
        {"authorization": "bearer secret"},
        {"x-api-key": "secret"},
        {"Authorization": "Bearer wrong", "x-api-key": "secret"},
    ):
        assert httpx.post(url, json=CHAT, headers=headers).status_code == 200
    for headers in ({}, {"Authorization": "Bearer secre"}, {"Authorization": "Basic secret"}, {"x-api-key": ""}):
        reply = httpx.post(url, json=CHAT, headers=headers)
        assert reply.status_code == 401 and reply.json()["error"]["type"] == "AuthenticationError"
    for path in ("/v1/models", "/v1/responses/x"):
        assert httpx.get(live.url + path).status_code == 401
    for path in ("/health", "/ready", "/version", "/metrics", "/ping"):
        assert httpx.get(live.url + path).status_code == 200
    preflight = {"Origin": "http://a", "Access-Control-Request-Method": "POST"}
    assert httpx.options(url, headers=preflight).status_code == 200


def test_cors(say):
    reply = httpx.post(say("x").url + "/tokenize", json={"prompt": "x"}, headers={"Origin": "http://app"})
    assert reply.headers["access-control-allow-origin"] == "*"


def test_body_limit(say):
    live = say("hi", max_body=1 << 20)
    big = json.dumps({"prompt": "x" * (1 << 20)})
    for path in POSTS:
        assert httpx.post(live.url + path, content=big).status_code == 413

    def chunks():
        for _ in range(32):
            yield b" " * (1 << 16)

    reply = httpx.post(live.url + "/v1/completions", content=chunks())
    assert reply.status_code == 413 and reply.json()["error"]["message"].endswith("MAX_BODY_MB.")


def test_unknown_paths_and_methods(say):
    live = say("x")
    missing = httpx.get(live.url + "/v1/nope")
    assert missing.status_code == missing.json()["error"]["code"] == 404
    assert missing.json()["error"]["type"] == "NotFoundError" and missing.json()["error"]["param"] is None
    wrong = httpx.get(live.url + "/v1/chat/completions")
    assert wrong.status_code == wrong.json()["error"]["code"] == 405 and wrong.headers["allow"] == "POST"
    assert "POST" in wrong.json()["error"]["message"]
    for path, status, kind in (
        ("/v1/messages", 405, "invalid_request_error"),
        ("/v1/messages/x", 404, "not_found_error"),
    ):
        reply = httpx.get(live.url + path)
        assert reply.status_code == status and reply.json()["type"] == "error" and reply.json()["error"]["type"] == kind


WRONG = {
    "/v1/chat/completions": [
        ({"messages": 1}, "messages"),
        ({"messages": []}, "messages"),
        ({**CHAT, "max_tokens": "many"}, "max_tokens"),
        ({**CHAT, "temperature": -1}, "temperature"),
        ({"messages": [*CHAT["messages"], {"role": "x"}]}, "messages.1.role"),
        ({**CHAT, "response_format": {"type": "json_object"}, "guided_regex": "a"}, "guided_regex"),
    ],
    "/v1/completions": [({"prompt": {}}, "prompt"), ({"prompt": "x", "temperature": -1}, "temperature")],
    "/v1/responses": [
        ({"input": []}, "input"),
        ({"input": "x", "temperature": -1}, "temperature"),
        ({"input": "x", "instructions": "i", "max_output_tokens": "many"}, "max_output_tokens"),
        ({"input": [{"role": "user", "content": "x"}, {"role": "x"}], "instructions": "i"}, "input.1.role"),
        ({"input": "x", "text": {"format": {"type": "json_schema", "schema": {"type": "odd"}}}}, "text.format"),
    ],
    "/tokenize": [({}, "prompt"), ({"messages": [{"role": "x"}]}, "messages.0.role")],
    "/detokenize": [({"tokens": ["x"]}, "tokens.0"), ({"tokens": [-1]}, "tokens")],
}


@pytest.mark.parametrize("path", WRONG)
def test_a_400_names_the_field_as_the_client_wrote_it(say_once, path):
    for body, param in [*WRONG[path], ("not an object", "body")]:
        error = httpx.post(say_once.url + path, json=body).json()["error"]
        # A wrong type is found by the schema ("Bad Request", body.FIELD), a wrong value by the rules of the field.
        found, kind = error["param"], "BadRequestError"
        if found.startswith("body"):
            found, kind = found.removeprefix("body."), "Bad Request"
        assert (error["type"], error["code"]) == (kind, 400)
        assert found == param or found.startswith(f"{param}."), (body, error)


def test_anthropics_messages_name_the_message_as_the_client_wrote_it(say_once):
    picture = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "eA=="}}
    body = {"system": "s", "max_tokens": 5, "messages": [{"role": "user", "content": [picture]}]}
    assert (
        httpx.post(say_once.url + "/v1/messages", json=body).json()["error"]["message"].startswith("messages.0.content")
    )


def test_the_openapi_document_is_whole(say):
    document = httpx.get(say("x").url + "/openapi.json").json()
    text = json.dumps(document)
    for ref in set(re.findall(r'"#/([^"]+)"', text)):
        node = document
        for step in ref.split("/"):
            node = node[step]
    assert set(POSTS) <= set(document["paths"])
    body = document["paths"]["/v1/messages"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert body == {"$ref": "#/components/schemas/MessagesRequest"}


def test_unknown_fields_are_listed_and_inert_ones_are_not(say):
    body = {**CHAT, "zzz": 1, "hello\nworld": 2, "metadata": {}, "best_of": 1, "žluť": 3, "": 4}
    reply = httpx.post(say("x").url + "/v1/chat/completions", json=body)
    assert reply.headers["x-soloist-ignored"] == "zzz, hello?world, ?lu?, ?"


def test_tokenize_and_back(say, tokenizer):
    live = say("x")
    reply = httpx.post(live.url + "/tokenize", json={"prompt": "Hello 🙂", "return_token_strs": True}).json()
    assert reply["tokens"] == tokenizer.encode("Hello 🙂") and reply["count"] == len(reply["tokens"])
    assert len(reply["token_strs"]) == reply["count"] and reply["max_model_len"] == live.engine.max_len
    assert httpx.post(live.url + "/detokenize", json={"tokens": reply["tokens"]}).json() == {"prompt": "Hello 🙂"}
    chat = httpx.post(live.url + "/tokenize", json=CHAT).json()
    httpx.post(live.url + "/v1/chat/completions", json=CHAT)
    assert chat["tokens"] == live.engine.submitted[-1].prompt
    off = {**CHAT, "chat_template_kwargs": {"enable_thinking": False}}
    assert httpx.post(live.url + "/tokenize", json=off).json()["count"] > chat["count"]
    assert httpx.post(live.url + "/detokenize", json={"tokens": [10**9]}).status_code == 400


def test_thinking_switches_agree(say):
    live = say("x")
    switches = [
        ("/v1/chat/completions", {**CHAT, "chat_template_kwargs": {"enable_thinking": False}}),
        ("/v1/chat/completions", {**CHAT, "enable_thinking": False}),
        ("/v1/chat/completions", {**CHAT, "reasoning_effort": "none"}),
        ("/v1/chat/completions", {**CHAT, "thinking": {"type": "disabled"}}),
        ("/v1/messages", {**CHAT, "max_tokens": 9, "thinking": {"type": "disabled"}}),
        ("/v1/messages", {**CHAT, "max_tokens": 9}),
        ("/v1/responses", {"input": "x", "reasoning": {"effort": "none"}}),
    ]
    prompts = []
    for path, body in switches:
        assert httpx.post(live.url + path, json=body).status_code == 200
        prompts.append(live.engine.submitted[-1].prompt)
    assert all(p == prompts[0] for p in prompts)
    httpx.post(live.url + "/v1/chat/completions", json=CHAT)
    assert live.engine.submitted[-1].prompt != prompts[0]
    contradiction = {**CHAT, "enable_thinking": False, "reasoning_effort": "high"}
    reply = httpx.post(live.url + "/v1/chat/completions", json=contradiction)
    assert reply.status_code == 400 and reply.json()["error"]["param"] == "reasoning_effort"


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b'"x"',
        b"{" * 5000,
        b'{"a":' * 3000 + b"1" + b"}" * 3000,
        b'{"messages": [' * 400,
        b'{"prompt": NaN}',
        b'{"prompt": "x", "temperature": 1e999}',
        b'{"prompt": "x", "max_tokens": ' + b"9" * 5000 + b"}",
        b"\xff\xfe",
        b'{"prompt": "\\ud800", "messages": [{"role": "user", "content": "\\udfff"}], "input": "\\ud800"}',
    ],
    ids=range(13),
)
@pytest.mark.parametrize("path", POSTS)
def test_bad_json(say_once, path, raw):
    reply = httpx.post(say_once.url + path, content=raw)
    assert reply.status_code in (200, 400), reply.text
    if reply.status_code == 400:
        assert reply.json()["error"]["message"]


def test_malformed_requests(say_once):
    """A sample of `python -m tools.robustness malformed`: 200 or 4xx that says why, nothing left running."""
    rng = random.Random(7)
    with httpx.Client(base_url=say_once.url, timeout=30) as client:
        for _ in range(500):
            method, path, headers, raw = malformed(rng)
            reply = client.request(method, path, content=raw, headers=headers)
            assert reply.status_code < 500, (method, path, raw, reply.text)
            if method == "POST" and reply.status_code >= 400:
                error = reply.json()["error"]
                assert error["message"] and (path.startswith("/v1/messages") or set(error) >= {"type", "param", "code"})
    assert say_once.engine.status().running == 0
