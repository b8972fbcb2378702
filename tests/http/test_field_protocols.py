"""What people ran into on other systems, on the real engine over HTTP: switches, roles, protocols, lives.

See `test_field_reports.py` for what happens inside an accepted block.
"""

from __future__ import annotations

import json

import httpx
import pytest

from http_life import leave, post_raw, wait_for
from script_model import Piece, pieces
from script_server import OFF, prompts_of, streamed, whole

CALL_TEXT = "\n<function=get>\n<parameter=s>\nPraha\n</parameter>\n</function>\n"
CALL: list[Piece] = ["<tool_call>", *pieces(CALL_TEXT), "</tool_call>"]
GET = {"name": "get", "parameters": {"type": "object", "properties": {"s": {"type": "string"}}}}
TOOLS = [{"type": "function", "function": GET}]
NAMED = {"type": "function", "function": {"name": "get"}}


def test_a_changing_line_at_the_head_of_the_prompt(script):
    """R10: an attribution block or line with a checksum; the rest of the system text is kept and reused."""
    live = script(pieces("An answer."), max_len="4096")
    prompts = prompts_of(live)
    rules = "Rule: be brief and exact in all that you say. " * 45
    forms = [
        lambda mark: [{"type": "text", "text": mark}, {"type": "text", "text": rules}],
        lambda mark: f"{mark}\n{rules}",
        lambda mark: [{"type": "text", "text": f"{mark}\n\n{rules}"}],
    ]
    for form in forms:
        uses = []
        for checksum in ("00000", "fffff"):
            system = form(f"x-anthropic-billing-header: cc_version=2.1.0; cch={checksum};")
            body = {"system": system, "messages": [{"role": "user", "content": "?"}], "max_tokens": 2}
            uses.append(httpx.post(live.url + "/v1/messages", json=body, timeout=60).json()["usage"])
        assert uses[1]["input_tokens"] > 2000
        assert uses[1]["cache_read_input_tokens"] >= 0.95 * uses[1]["input_tokens"]
        text = live.service.tokenizer.decode(prompts[-1])
        assert rules.strip() in text and "billing" not in text


TYPED = {
    "type": "object",
    "properties": {
        "i": {"$ref": "#/$defs/int"},
        "n": {"anyOf": [{"$ref": "#/$defs/int"}, {"type": "null"}]},
        "l": {"$ref": "#/$defs/list"},
        "o": {"oneOf": [{"type": "object"}, {"type": "string"}]},
        "z": {"$ref": "#/$defs/text"},
    },
    "$defs": {
        "int": {"type": "integer"},
        "list": {"type": "array", "items": {"$ref": "#/$defs/int"}},
        "text": {"type": "string"},
    },
}
TYPED_VALUES = {"i": "10", "n": "null", "l": "[1, 2]", "o": '{"a": 1}', "z": "007"}


@pytest.mark.parametrize("pad", range(8))
def test_arguments_typed_through_references(script, pad):
    """R25: integer, nullable integer, array, object and a string of digits, each by `$ref` or union."""
    body = "".join(f"<parameter={k}>\n{v}\n</parameter>\n" for k, v in TYPED_VALUES.items())
    live = script(["<tool_call>", *pieces(f"\n<function=get>\n{body}</function>"), "</tool_call>"], pad)
    tools = [{"type": "function", "function": {"name": "get", "parameters": TYPED}}]
    reply = whole(live, tools=tools, extra_body=OFF)
    call = reply.choices[0].message.tool_calls[0]
    assert json.loads(call.function.arguments) == {"i": 10, "n": None, "l": [1, 2], "o": {"a": 1}, "z": "007"}
    assert streamed(live, tools=tools, extra_body=OFF)[2] == {0: call.function.arguments}


@pytest.mark.parametrize("calls_tool", [True, False])
@pytest.mark.parametrize("thinking", [True, False])
def test_finish_reason_and_calls_agree(script, thinking, calls_tool):
    """R27: `tool_calls` exactly when there are calls; none never calls; both transports say the same."""
    live = script(CALL if calls_tool else [*pieces("Well then"), "</think>", *pieces("\n\nno call, just some prose.")])
    for choice in ("auto", "required", NAMED, "none"):
        fields = {"tools": TOOLS, "tool_choice": choice, "max_tokens": 120, "extra_body": {"enable_thinking": thinking}}
        found = whole(live, **fields).choices[0]
        arguments = [call.function.arguments for call in found.message.tool_calls or []]
        assert (found.finish_reason == "tool_calls") == bool(arguments) or found.finish_reason == "length"
        if choice == "none":
            assert not arguments
        elif choice != "auto" or calls_tool:
            assert arguments or found.finish_reason == "length"
        if arguments:
            assert not found.message.content
        content, _, calls, finish, _ = streamed(live, **fields)
        assert (list(calls.values()), finish, content) == (arguments, found.finish_reason, found.message.content or "")


@pytest.mark.parametrize("schema", [False, True])
def test_thinking_switched_off_in_four_places(script, schema):
    """R29: the answer is content, wherever the switch stood; the prompts are the same; a contradiction is a 400."""
    live = script(pieces('{"key": 12}'))
    prompts = prompts_of(live)
    shape = {"type": "object", "properties": {"key": {"type": "integer"}}, "required": ["key"]}
    extra = (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": shape}}} if schema else {}
    )
    for switch in (
        {"chat_template_kwargs": {"enable_thinking": False}},
        {"enable_thinking": False},
        {"reasoning_effort": "none"},
        {"thinking": {"type": "disabled"}},
    ):
        message = whole(live, extra_body=switch, **extra).choices[0].message
        assert (message.content, message.reasoning) == ('{"key": 12}', None)
        assert streamed(live, extra_body=switch, **extra)[:2] == ('{"key": 12}', "")
    body = {"messages": [{"role": "user", "content": "?"}], "max_tokens": 99, "thinking": {"type": "disabled"}}
    if schema:
        body["output_config"] = {"format": {"type": "json_schema", "schema": shape}}
    blocks = httpx.post(live.url + "/v1/messages", json=body).json()["content"]
    assert blocks == [{"type": "text", "text": '{"key": 12}'}]
    assert len(prompts) == 9 and all(prompt == prompts[0] for prompt in prompts)
    both = {"chat_template_kwargs": {"enable_thinking": True}, "reasoning_effort": "none"}
    reply = httpx.post(live.url + "/v1/chat/completions", json={"messages": body["messages"], **both})
    assert reply.status_code == 400 and reply.json()["error"]["param"] == "reasoning_effort"


S, D, U = ({"role": role, "content": f"{role} text"} for role in ("system", "developer", "user"))
PARTS = {"role": "system", "content": [{"type": "text", "text": "part one, "}, {"type": "text", "text": "part two"}]}


@pytest.mark.parametrize("roles", [[S, PARTS, U], [S, U, PARTS, U], [D, U], [U, D], [PARTS, D, U]], ids=range(5))
def test_system_text_wherever_it_stands(script, roles):
    """R31: 200 and every text reaches the model in order; a late one moves nothing before it."""
    live = script(pieces("An answer."))
    prompts = prompts_of(live)
    for messages in (roles[:-1], roles):
        assert whole(live, messages=messages, extra_body=OFF).choices[0].message.content == "An answer."
    text = live.service.tokenizer.decode(prompts[-1])
    wanted = ["part one, part two" if m is PARTS else m["content"] for m in roles]
    at = -1
    for words in wanted:
        at = text.index(words, at + 1)
    if roles[-1] is D:
        kept = live.service.tokenizer.decode(prompts[0]).split("<|im_end|>")[0]
        assert text.startswith(kept), "the turn before a late message is where it was"


def test_anthropic_messages_as_agents_send_them_now(script):
    """R33: inline system text, adaptive thinking, output_config, cache_control, a beta query and thirty tools."""
    live = script([*pieces("A thought"), "</think>", *pieces("\n\nAn answer.")], max_len="8192")
    prompts = prompts_of(live)
    tools = [{"name": f"tool_{i}", "description": "d", "input_schema": {"type": "object"}} for i in range(30)]
    body = {
        "max_tokens": 60,
        "stream": True,
        "tools": tools,
        "thinking": {"type": "adaptive"},
        "output_config": {"effort": "high"},
        "context_management": {"edits": []},
        "system": [{"type": "text", "text": "Head.", "cache_control": {"type": "ephemeral"}}],
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "Hi", "cache_control": {"type": "ephemeral"}}]},
            {"role": "system", "content": "Inline text."},
        ],
    }
    with httpx.stream("POST", live.url + "/v1/messages?beta=true", json=body, timeout=60) as reply:
        assert reply.status_code == 200 and reply.headers["x-soloist-ignored"] == "context_management"
        events = [json.loads(line[6:]) for line in reply.iter_lines() if line.startswith("data: ")]
    kinds = [e["type"] for e in events if e["type"] != "ping"]
    assert [k for i, k in enumerate(kinds) if k != kinds[i - 1]] == [
        "message_start",
        *("content_block_start", "content_block_delta", "content_block_stop") * 2,
        "message_delta",
        "message_stop",
    ]
    starts = [(e["index"], e["content_block"]) for e in events if e["type"] == "content_block_start"]
    assert [(i, b["type"]) for i, b in starts] == [(0, "thinking"), (1, "text")] and "signature" in starts[0][1]
    assert any(e.get("delta", {}).get("type") == "signature_delta" for e in events)
    assert "Inline text." in live.service.tokenizer.decode(prompts[0])


def test_responses_with_tools_of_other_kinds(script):
    """R35: the function stays usable, an empty probe is answered, an unknown previous id is said."""
    live = script(CALL)
    url = live.url + "/v1/responses"
    others = [{"type": t} for t in ("namespace", "web_search", "custom", "image_generation")]
    body = {"input": "?", "tools": [{"type": "function", **GET}, *others], "reasoning": {"effort": "none"}}
    reply = httpx.post(url, json=body)
    assert [item["type"] for item in reply.json()["output"]] == ["function_call"]
    assert "tools.web_search" in reply.headers["x-soloist-ignored"]
    probe = httpx.post(url, json={"input": "x", "max_output_tokens": 1})
    assert probe.status_code == 200 and probe.json()["status"] == "incomplete"
    for stream in (False, True):
        lost = httpx.post(url, json={"input": "x", "previous_response_id": "resp_none", "stream": stream})
        assert lost.status_code == 400 and lost.json()["error"]["param"] == "previous_response_id"


@pytest.mark.parametrize("stream", [False, True])
def test_three_choices(script, stream):
    """R38: indices 0 to 2, the prompt counted once, everything each choice said counted."""
    live = script(pieces("An answer of some length."))
    fields = {"n": 3, "seed": 5, "temperature": 0.1, "extra_body": OFF}
    single = whole(live, **{**fields, "n": 1}).usage
    if stream:
        texts: dict[int, str] = {}
        body = {
            "messages": [{"role": "user", "content": "?"}],
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        with httpx.stream("POST", live.url + "/v1/chat/completions", json={**body, **OFF, **fields}) as reply:
            chunks = [json.loads(x[6:]) for x in reply.iter_lines() if x.startswith("data: {")]
        for chunk in chunks:
            for choice in chunk["choices"]:
                texts[choice["index"]] = texts.get(choice["index"], "") + (choice["delta"].get("content") or "")
        usage = chunks[-1]["usage"]
        prompt, completion = usage["prompt_tokens"], usage["completion_tokens"]
    else:
        reply = whole(live, **fields)
        texts = {c.index: c.message.content for c in reply.choices}
        prompt, completion = reply.usage.prompt_tokens, reply.usage.completion_tokens
    assert texts == dict.fromkeys(range(3), "An answer of some length.")
    assert (prompt, completion) == (single.prompt_tokens, 3 * single.completion_tokens)


@pytest.mark.parametrize("how", ["close", "half", "reset"])
@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_in_prefill(script, how, stream):
    """R39: slot and pages come back, and what was computed of the prompt is reused by the retry."""
    live = script([b"go ", b"on"], end=None, max_len="4096", prefill_slice_ms="1")
    body = {"prompt": "word " * 700, "max_tokens": 400, "stream": stream}
    sock = post_raw(live, "/v1/completions", body)
    assert wait_for(lambda: live.engine.status().counters.get("prompt_tokens", 0) > 0, 20)
    leave(sock, how)
    assert wait_for(lambda: live.engine.status().running + live.engine.status().slots_used == 0, 20)
    sock.close()
    retry = httpx.post(live.url + "/v1/completions", json={**body, "max_tokens": 1, "stream": False}, timeout=60)
    assert retry.json()["usage"]["prompt_tokens_details"]["cached_tokens"] >= 64
