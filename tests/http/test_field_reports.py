"""What people ran into on other systems, on the real engine over HTTP: a script checkpoint, drafts on.

Here: where a text ends or changes its meaning inside an accepted block (stops, limits, grammars, calls, budgets,
characters). `test_field_protocols.py` has what clients send; docs/field-reports.md lists both.
"""

from __future__ import annotations

import json
import time

import httpx
import pytest

from script_model import Piece, pieces
from script_server import PADS, drafts_were_accepted, streamed, whole


@pytest.mark.parametrize("pad", range(8))
def test_stop_string_over_several_accepted_tokens(script, pad):
    """R14a: nothing after the stop, in text, ids, log-probabilities or counts."""
    live = script([b"ab ", b"cde", b"xEN", b"Dyz", *pieces("and much more text to come after it.")], pad)
    off = {"enable_thinking": False, "return_token_ids": True}
    reply = whole(live, stop=["END"], logprobs=True, extra_body=off)
    choice = reply.choices[0]
    tokens = live.service.tokenizer
    assert choice.message.content == "".join(p.decode() for p in PADS[:pad]) + "ab cdex"
    assert (choice.finish_reason, choice.stop_reason) == ("stop", "END")
    assert reply.usage.completion_tokens == len(choice.logprobs.content) == len(choice.token_ids) == pad + 4
    assert tokens.decode(choice.token_ids).endswith("xENDyz")
    content, _, _, finish, entries = streamed(live, stop=["END"], logprobs=True, extra_body=off)
    assert (content, finish, len(entries)) == (choice.message.content, "stop", pad + 4)
    assert drafts_were_accepted(reply)


def test_max_tokens_is_exact_for_every_number(script):
    """R14b."""
    live = script(pieces("The quick brown fox jumps over the lazy dog again and again."))
    text = whole(live, extra_body={"enable_thinking": False}).choices[0].message.content
    for n in range(1, 21):
        reply = whole(live, max_tokens=n, extra_body={"enable_thinking": False})
        assert (reply.usage.completion_tokens, reply.choices[0].finish_reason) == (n, "length")
        assert text.startswith(reply.choices[0].message.content) and n * 3 - 1 <= len(reply.choices[0].message.content)
        assert streamed(live, max_tokens=n, extra_body={"enable_thinking": False})[0] == (
            reply.choices[0].message.content
        )


@pytest.mark.parametrize("pad", range(8))
def test_grammar_ends_inside_a_block(script, pad, caplog):
    """R20: the model goes on after the closing brace; the answer does not."""
    schema = {"type": "object", "properties": {"k" * (1 + pad): {"type": "integer"}}, "required": ["k" * (1 + pad)]}
    schema["additionalProperties"] = False
    live = script([b'{"', b"k" * (1 + pad), b'": ', b"12", b"3}", *pieces("\n trail")])
    fmt = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    reply = whole(live, response_format=fmt, extra_body={"enable_thinking": False})
    value = json.loads(reply.choices[0].message.content)
    assert list(value) == ["k" * (1 + pad)] and reply.choices[0].finish_reason == "stop"
    assert reply.choices[0].message.content.endswith("}")
    assert streamed(live, response_format=fmt, extra_body={"enable_thinking": False})[0] == (
        reply.choices[0].message.content
    )
    assert not [r for r in caplog.records if r.levelname in ("ERROR", "CRITICAL")]


def test_no_unbounded_whitespace(script):
    """R22: the successor of a blank is a blank, the grammar allows blanks: the answer ends all the same."""
    live = script([b"{", b" "], end=None)
    schema = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}}
    schema |= {"required": ["a", "b"], "additionalProperties": False}
    fmt = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    reply = whole(live, response_format=fmt, max_tokens=400, extra_body={"enable_thinking": False})
    text = reply.choices[0].message.content
    assert " " * 33 not in text
    if reply.choices[0].finish_reason == "stop":
        assert set(json.loads(text)) == {"a", "b"}


TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get",
            "parameters": {
                "type": "object",
                "properties": {"s": {"type": "string"}, "n": {"type": "number"}, "o": {"type": "object"}},
            },
        },
    }
]
CALL: list[Piece] = [
    "<tool_call>",
    *(
        b"\n<fun",
        b"ctio",
        b"n=ge",
        b"t>\n<",
        b"param",
        b"eter=",
        b"s>\nP",
        b'l"z',
        b"\\e\xc5",
        b"\x88 \xf0",
        b"\x9f\x99",
    ),
    *(b"\x82\n</p", b"arame", b"ter>", b"\n<par", b"ameter", b"=n>\n4", b"2.5\n", b"</para", b"meter>\n", b"<parame"),
    *(b"ter=o", b'>\n{"a"', b': {"b"', b": 1}}", b"\n</pa", b"rameter>", b"\n</f", b"unction", b">\n"),
    "</tool_call>",
]
VALUES = {"s": 'Pl"z\\eň 🙂', "n": 42.5, "o": {"a": {"b": 1}}}


@pytest.mark.parametrize("pad", range(8))
def test_tool_arguments_with_several_tokens_a_step(script, pad):
    """R23, R28, R55: streamed equals whole, valid JSON, whole characters; the call ends the thinking."""
    live = script([b"I ne", b"ed it", *CALL], pad)
    reply = whole(live, tools=TOOLS)
    message = reply.choices[0].message
    assert json.loads(message.tool_calls[0].function.arguments) == VALUES
    assert message.reasoning == "".join(p.decode() for p in PADS[:pad]) + "I need it" and message.content is None
    content, reasoning, calls, finish, _ = streamed(live, tools=TOOLS)
    assert calls == {0: message.tool_calls[0].function.arguments} and finish == "tool_calls"
    assert (content, reasoning) == ("", message.reasoning) and drafts_were_accepted(reply)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("kind", ["required", "named"])
def test_forced_call_by_a_model_that_would_not(script, kind, stream):
    """R27: required yields a call or an error, also from a model that wants to write prose."""
    live = script(pieces("I would rather talk about the weather in general terms, at length."))
    choice = "required" if kind == "required" else {"type": "function", "function": {"name": "get"}}
    fields = {"tools": TOOLS, "tool_choice": choice, "max_tokens": 300, "extra_body": {"enable_thinking": False}}
    if stream:
        _, _, calls, finish, _ = streamed(live, **fields)
        arguments = list(calls.values())
    else:
        reply = whole(live, **fields).choices[0]
        arguments, finish = [c.function.arguments for c in reply.message.tool_calls or []], reply.finish_reason
    assert arguments and all(isinstance(json.loads(a), dict) for a in arguments)
    assert finish in ("tool_calls", "length")


@pytest.mark.parametrize("n", [0, 1, 5, 7, 12, 40])
@pytest.mark.parametrize("spec", ["none", "mtp"])
def test_thinking_budget(script, n, spec):
    """Exactly N thinking tokens and the closing ones, drafts on and off; then an answer."""
    live = script(pieces("so it goes round", 2), end=None, spec=spec)
    fields = {"max_tokens": 60, "extra_body": {"thinking_token_budget": n, "return_token_ids": True}}
    reply = whole(live, **fields)
    ids, tokens = reply.choices[0].token_ids, live.service.tokenizer
    close = tokens.encode("\n</think>\n\n")
    assert ids[n : n + len(close)] == close and tokens.id_of("</think>") not in ids[:n]
    assert reply.usage.completion_tokens_details.reasoning_tokens == n
    assert reply.choices[0].message.content and not (reply.choices[0].message.content or "").startswith("\n")


def test_a_budget_spares_a_call_that_ended_the_thinking(script):
    live = script([b"I ne", b"ed it", *CALL])
    message = whole(live, tools=TOOLS, extra_body={"thinking_token_budget": 12}).choices[0].message
    assert message.reasoning == "I need it"
    assert json.loads(message.tool_calls[0].function.arguments) == VALUES


@pytest.mark.parametrize("cut", range(1, 9))
def test_a_character_cut_by_the_limit(script, cut):
    """R55: no replacement character but for a truly cut last character."""
    emoji = "🙂".encode()
    live = script([b"a", emoji[:1], emoji[1:3], emoji[3:], b"b", emoji[:2], emoji[2:], b"c"])
    reply = whole(live, max_tokens=cut, extra_body={"enable_thinking": False})
    text = reply.choices[0].message.content
    assert text == b"".join([b"a", emoji[:1], emoji[1:3], emoji[3:], b"b", emoji[:2], emoji[2:], b"c"][:cut]).decode(
        "utf-8", "replace"
    )
    assert streamed(live, max_tokens=cut, extra_body={"enable_thinking": False})[0] == text


def test_disconnect_during_generation_frees_everything(script):
    """R39 on the real engine: slot and pages are back within a second."""
    live = script([b"go ", b"on"], end=None)
    before = live.engine.status()
    with httpx.stream(
        "POST", live.url + "/v1/completions", json={"prompt": "x", "stream": True, "max_tokens": 2000}
    ) as r:
        next(r.iter_lines())
    for _ in range(200):
        now = live.engine.status()
        if now.running == 0 and now.slots_used == before.slots_used:
            break
        time.sleep(0.005)
    assert now.running == 0 and now.slots_used == before.slots_used


def test_overflow_in_every_protocol(script):
    """R59: before any work, in a form each client knows, with both numbers."""
    live = script([b"ok"])
    text = "w" * 3000
    for stream in (False, True):
        chat = httpx.post(
            live.url + "/v1/chat/completions", json={"messages": [{"role": "user", "content": text}], "stream": stream}
        )
        body = {"messages": [{"role": "user", "content": text}], "max_tokens": 5, "stream": stream}
        claude = httpx.post(live.url + "/v1/messages", json=body)
        responses = httpx.post(live.url + "/v1/responses", json={"input": text, "stream": stream})
        assert chat.status_code == claude.status_code == responses.status_code == 400
        assert chat.json()["error"]["code"] == responses.json()["error"]["code"] == "context_length_exceeded"
        assert "maximum context length is 2048" in chat.json()["error"]["message"] and "30" in chat.text
        assert claude.json()["error"]["type"] == "invalid_request_error"
        assert "tokens > 2048 maximum" in claude.json()["error"]["message"]
    assert httpx.get(live.url + "/v1/models").json()["data"][0]["max_model_len"] == 2048
    assert httpx.post(live.url + "/v1/completions", json={"prompt": "x", "max_tokens": 1}).status_code == 200
