"""The official anthropic client against a live server."""

from __future__ import annotations

import anthropic
import httpx
import pytest

TOOLS = [
    {
        "name": "get",
        "description": "Get.",
        "input_schema": {"type": "object", "properties": {"city": {"type": "string"}, "n": {"type": "integer"}}},
    }
]
CALL = (
    "<tool_call>\n<function=get>\n<parameter=city>\nBrno 🙂\n</parameter>\n"
    "<parameter=n>\n2\n</parameter>\n</function>\n</tool_call>"
)
ASK = [{"role": "user", "content": "Hi"}]
ON = {"type": "enabled", "budget_tokens": 1024}


def client(live):
    return anthropic.Anthropic(base_url=live.url, api_key="none", max_retries=0)


def create(live, **fields):
    return client(live).messages.create(**{"model": "demo", "max_tokens": 300, "messages": ASK, **fields})


def test_text(say):
    message = create(say("Hello 🙂 there.", block=3))
    assert message.type == "message" and message.role == "assistant" and message.stop_reason == "end_turn"
    assert [b.type for b in message.content] == ["text"] and message.content[0].text == "Hello 🙂 there."
    assert message.usage.input_tokens > 0 and message.usage.cache_read_input_tokens == 0


@pytest.mark.parametrize("block", [1, 4, 16])
def test_thinking_text_and_call(say, block):
    live = say("I think.\n</think>\n\nLook.\n\n" + CALL, block=block)
    message = create(live, tools=TOOLS, thinking=ON)
    assert [b.type for b in message.content] == ["thinking", "text", "tool_use"]
    assert message.content[0].thinking == "I think." and message.content[0].signature
    assert message.content[2].input == {"city": "Brno 🙂", "n": 2} and message.stop_reason == "tool_use"
    with client(live).messages.stream(model="demo", max_tokens=300, messages=ASK, tools=TOOLS, thinking=ON) as stream:
        events = [event.type for event in stream]
        streamed = stream.get_final_message()
    assert [b.type for b in streamed.content] == ["thinking", "text", "tool_use"]
    assert streamed.content[2].input == message.content[2].input and streamed.stop_reason == "tool_use"
    assert streamed.usage.output_tokens == message.usage.output_tokens
    assert events[0] == "message_start" and events[-1] == "message_stop"


def test_event_order_on_the_wire(say):
    live = say("t\n</think>\n\nc" + CALL, block=2)
    body = {"max_tokens": 300, "messages": ASK, "tools": TOOLS, "thinking": {"type": "adaptive"}, "stream": True}
    with httpx.stream("POST", live.url + "/v1/messages?beta=true", json=body) as reply:
        names = [line[7:] for line in reply.iter_lines() if line.startswith("event: ")]
    squeezed = [n for i, n in enumerate(names) if i == 0 or n != names[i - 1] or not n.endswith("delta")]
    block = ["content_block_start", "content_block_delta", "content_block_stop"]
    assert squeezed == ["message_start", *block * 3, "message_delta", "message_stop"]


def test_a_request_as_agents_send_it(say, tokenizer):
    live = say("ok")
    system = [
        {"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1; cch=a1b2c;"},
        {"type": "text", "text": "You are an agent.", "cache_control": {"type": "ephemeral"}},
        {"type": "text", "text": "Be brief."},
    ]
    history = [
        {"role": "user", "content": [{"type": "text", "text": "Go", "cache_control": {"type": "ephemeral"}}]},
        {"role": "system", "content": [{"type": "text", "text": "INLINE RULE"}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "hm", "signature": "s"},
                {"type": "tool_use", "id": "t1", "name": "get", "input": {"city": "Brno"}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "and then"},
                {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "rain"}]},
            ],
        },
    ]
    tools = [{**TOOLS[0], "name": f"tool{i}"} for i in range(29)] + [{"type": "web_search_20250305", "name": "web"}]
    body = {
        "model": "demo",
        "max_tokens": 50,
        "system": system,
        "messages": history,
        "tools": [*tools, *TOOLS],
        "thinking": {"type": "adaptive"},
        "output_config": {"effort": "high"},
        "metadata": {"user_id": "u"},
        "context_management": {"edits": []},
    }
    headers = {"anthropic-version": "2023-06-01", "anthropic-beta": "a,b", "x-api-key": "k"}
    reply = httpx.post(live.url + "/v1/messages?beta=true", json=body, headers=headers)
    assert reply.status_code == 200, reply.text
    assert reply.headers["x-soloist-ignored"] == "context_management, tools.web_search_20250305"
    prompt = tokenizer.decode(live.engine.submitted[-1].prompt)
    assert "billing" not in prompt and "You are an agent.\n\nBe brief." in prompt and "INLINE RULE" in prompt
    assert prompt.index("<tool_response>\nrain") < prompt.index("and then") and "tool28" in prompt
    assert prompt.index("Go") < prompt.index("INLINE RULE") < prompt.index("<function=get>\n<parameter=city>")


def test_stop_sequence_and_length(say):
    message = create(say("one two three"), stop_sequences=["two"])
    assert (message.stop_reason, message.stop_sequence, message.content[0].text) == ("stop_sequence", "two", "one ")
    assert create(say("one two three"), max_tokens=2).stop_reason == "max_tokens"


def test_forced_tool(say):
    message = create(say(CALL, block=16), tools=TOOLS, tool_choice={"type": "tool", "name": "get"})
    assert message.content[0].name == "get"


def test_prefill_continues(say, tokenizer):
    live = say(" world")
    message = create(live, messages=[*ASK, {"role": "assistant", "content": "Hello"}])
    assert message.content[0].text == " world"
    assert tokenizer.decode(live.engine.submitted[-1].prompt).endswith("Hello")


def test_count_tokens(say):
    live = say("x")
    count = client(live).messages.count_tokens(model="demo", messages=ASK, system="Be.", tools=TOOLS)
    message = create(live, system="Be.", tools=TOOLS)
    assert count.input_tokens == message.usage.input_tokens


def test_errors_have_anthropics_shape(say):
    live = say("x", max_body=1 << 20, api_keys=("secret",))
    with pytest.raises(anthropic.AuthenticationError) as caught:
        create(live)
    assert caught.value.body["error"]["type"] == "authentication_error"
    good = anthropic.Anthropic(base_url=live.url, api_key="secret", max_retries=0)
    with pytest.raises(anthropic.NotFoundError) as caught:
        good.messages.create(model="claude", max_tokens=5, messages=ASK)
    assert caught.value.body["error"]["type"] == "not_found_error"
    for stream in (False, True):
        with pytest.raises(anthropic.BadRequestError, match=r"prompt is too long: \d+ tokens > 4096 maximum") as caught:
            good.messages.create(
                model="demo", max_tokens=5, messages=[{"role": "user", "content": "word " * 5000}], stream=stream
            )
        assert caught.value.body["error"]["type"] == "invalid_request_error"
    with pytest.raises(anthropic.BadRequestError):
        good.messages.create(model="demo", max_tokens=0, messages=ASK)
    with pytest.raises(anthropic.BadRequestError, match="vision is off"):
        source = {"type": "base64", "media_type": "image/png", "data": "AAAA"}
        good.messages.create(
            model="demo", max_tokens=5, messages=[{"role": "user", "content": [{"type": "image", "source": source}]}]
        )


def test_error_in_the_middle_of_a_stream(say):
    live = say("one two three four five six seven", engine={"delay_s": 0.02})
    with (
        pytest.raises(anthropic.APIStatusError),
        client(live).messages.stream(model="demo", max_tokens=50, messages=ASK) as stream,
    ):
        for event in stream:
            if event.type == "text":
                live.engine.fail_with = RuntimeError("boom")
