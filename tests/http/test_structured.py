"""Structured output over HTTP: every constraint, every endpoint, random schemas, thinking on and off."""

from __future__ import annotations

import json
import random
import re

import httpx
import openai
import pytest
from pydantic import BaseModel

from fakes import FakeEngine
from live import serving
from random_schemas import random_schema, violation

ASK = [{"role": "user", "content": "x"}]
OFF = {"enable_thinking": False}


def chat(live, **fields):
    return httpx.post(
        live.url + "/v1/chat/completions", json={"messages": ASK, "max_tokens": 400, **OFF, **fields}, timeout=60
    )


def text(reply) -> str:
    assert reply.status_code == 200, reply.text
    return reply.json()["choices"][0]["message"]["content"]


CONSTRAINTS = {
    "json_object": ({"response_format": {"type": "json_object"}}, lambda t: isinstance(json.loads(t), dict)),
    "regex": ({"structured_outputs": {"regex": "[0-9]{3}-[a-z]{2}"}}, re.compile("[0-9]{3}-[a-z]{2}").fullmatch),
    "choice": ({"structured_outputs": {"choice": ["yes", "no way"]}}, lambda t: t in ("yes", "no way")),
    "lark": ({"structured_outputs": {"grammar": 'start: "a" "b"+ "c"'}}, re.compile("ab+c").fullmatch),
    "gbnf": ({"structured_outputs": {"grammar": 'root ::= "a" [0-9] "c"'}}, re.compile("a[0-9]c").fullmatch),
    "guided_regex": ({"guided_regex": "x{2,3}y"}, re.compile("x{2,3}y").fullmatch),
    "guided_choice": ({"guided_choice": ["up", "down"]}, lambda t: t in ("up", "down")),
    "guided_json": ({"guided_json": {"type": "array", "maxItems": 2}}, lambda t: len(json.loads(t)) <= 2),
    "json string": ({"structured_outputs": {"json": '{"type": "boolean"}'}}, lambda t: json.loads(t) in (True, False)),
}


@pytest.mark.parametrize("name", CONSTRAINTS)
def test_the_answer_obeys(say, name):
    """The scripted model writes prose; the grammar does not let it."""
    fields, holds = CONSTRAINTS[name]
    live = say("I would rather write prose, thank you.", block=(1, 8))
    reply = chat(live, **fields)
    if reply.json()["choices"][0]["finish_reason"] == "stop":
        assert holds(text(reply))
    raw = httpx.post(live.url + "/v1/completions", json={"prompt": "x", "max_tokens": 400, **fields}).json()
    if raw["choices"][0]["finish_reason"] == "stop":
        assert holds(raw["choices"][0]["text"]), "completions are bound from the first token"


@pytest.mark.parametrize("block", [1, 3, 16])
def test_thinking_is_free_and_the_answer_bound(say, block):
    live = say('Free { thought.\n</think>\n\n{"x": 5}', block=block)
    schema = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}
    fmt = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}
    message = chat(live, response_format=fmt, enable_thinking=True).json()["choices"][0]["message"]
    assert (message["reasoning"], json.loads(message["content"])) == ("Free { thought.", {"x": 5})


def test_thinking_may_not_end_without_an_answer(say):
    live = say("I stop here.")
    reply = chat(live, response_format={"type": "json_object"}, enable_thinking=True).json()
    eos = live.engine.eos_ids[0]
    assert reply["choices"][0]["finish_reason"] == "length" and eos not in live.engine.submitted[0].output


def test_parse_of_the_openai_client(say):
    class Step(BaseModel):
        name: str
        count: int

    live = say('{"name":"aé","count":3}', block=8)
    client = openai.OpenAI(base_url=live.url + "/v1", api_key="x", max_retries=0)
    reply = client.chat.completions.parse(model="demo", messages=ASK, response_format=Step, extra_body=OFF)
    assert reply.choices[0].message.parsed == Step(name="aé", count=3)


def test_tools_and_a_schema_answer_with_either(say):
    tool = {"type": "function", "function": {"name": "get", "parameters": {"type": "object", "properties": {}}}}
    fmt = {"type": "json_object"}
    call = "<tool_call>\n<function=get>\n</function>\n</tool_call>"
    assert text(chat(say('{"a": 1}'), tools=[tool], response_format=fmt)) == '{"a": 1}'
    choice = chat(say(call), tools=[tool], response_format=fmt).json()["choices"][0]
    assert choice["finish_reason"] == "tool_calls" and choice["message"]["tool_calls"][0]["function"]["name"] == "get"


@pytest.mark.parametrize(
    "fields",
    [
        {"response_format": {"type": "json_schema"}},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "nonsense"}}}},
        {"response_format": {"type": "xml"}},
        {"response_format": {"type": "json_object"}, "guided_regex": "a"},
        {"structured_outputs": {}},
        {"structured_outputs": {"regex": "a", "choice": ["b"]}},
        {"structured_outputs": {"regex": "("}},
        {"structured_outputs": {"choice": []}},
        {"structured_outputs": {"grammar": "start: undefined_rule"}},
        {"structured_outputs": {"json": {"type": "object"}, "unheard_of": True}},
        {"guided_json": "not json"},
    ],
    ids=str,
)
def test_what_cannot_be_enforced_is_refused_by_name(say_once, fields):
    for path, body in (("/v1/chat/completions", {"messages": ASK}), ("/v1/completions", {"prompt": "x"})):
        reply = httpx.post(say_once.url + path, json={**body, **fields})
        assert reply.status_code == 400 and reply.json()["error"]["param"] in fields


def check_schemas(live, count: int, seed: int) -> int:
    """Every answer fits its schema or was cut by the limit; returns how many came to their end."""
    rng = random.Random(seed)
    ended = 0
    for _ in range(count):
        schema = random_schema(rng)
        fmt = {"type": "json_schema", "json_schema": {"name": "s", "schema": schema}}
        reply = chat(live, response_format=fmt, max_tokens=150, temperature=1.0, seed=rng.randrange(1000))
        assert reply.status_code == 200, (schema, reply.text)
        choice = reply.json()["choices"][0]
        assert choice["finish_reason"] in ("stop", "length")
        if choice["finish_reason"] == "stop":
            ended += 1
            assert violation(json.loads(text(reply)), schema) is None, (schema, text(reply))
    return ended


def test_random_schemas(tokenizer, template):
    rng = random.Random(1)
    alphabet = tokenizer.encode(' {}[]":,0123456789.-truefalsenull abc name ünï x y q k')
    fake = FakeEngine(lambda request: (rng.choice(alphabet) for _ in iter(int, 1)), block=(1, 16))
    with serving(fake, tokenizer, template) as live:
        assert check_schemas(live, 60, seed=2) > 20
    fake.close()


@pytest.mark.slow
def test_random_schemas_on_the_demo_with_drafts(tokenizer, template):
    """A sample; `python -m tools.robustness schemas` asks 500 and says what the masks cost."""
    from soloist.engine.build import build_engine
    from soloist.settings import resolve

    engine = build_engine(resolve({"model": "demo", "max_len": "4096"}, {}, {}))
    with serving(engine, tokenizer, template) as live:
        assert check_schemas(live, 60, seed=3) > 30
    engine.close()
