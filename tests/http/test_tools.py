"""Tool calls through the openai client, for every number of tokens a step and every transport."""

from __future__ import annotations

import json

import openai
import pytest

BLOCKS = [1, 2, 3, 5, 8, 16, (1, 16)]
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "Weather of a place.",
            "parameters": {
                "type": "object",
                "$defs": {"count": {"type": "integer"}},
                "properties": {
                    "city": {"type": "string"},
                    "days": {"$ref": "#/$defs/count"},
                    "limit": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
                    "list": {"type": "array", "items": {"type": "integer"}},
                    "where": {"type": "object", "properties": {"a": {"type": "integer"}}},
                    "code": {"type": "string"},
                },
                "required": ["city"],
            },
        },
    },
    {"type": "function", "function": {"name": "noop"}},
]
CALL = (
    '<tool_call>\n<function=get_weather>\n<parameter=city>\nPlzeň "🙂"\n</parameter>\n<parameter=days>\n10\n'
    "</parameter>\n<parameter=limit>\nnull\n</parameter>\n<parameter=list>\n[1,2]\n</parameter>\n"
    '<parameter=where>\n{"a": 1}\n</parameter>\n<parameter=code>\n007\n</parameter>\n</function>\n</tool_call>'
)
NOOP = "<tool_call>\n<function=noop>\n</function>\n</tool_call>"
ARGUMENTS = {"city": 'Plzeň "🙂"', "days": 10, "limit": None, "list": [1, 2], "where": {"a": 1}, "code": "007"}
ASK = [{"role": "user", "content": "Weather?"}]


def ask(live, *, stream=False, **fields):
    client = openai.OpenAI(base_url=live.url + "/v1", api_key="none", max_retries=0)
    fields = {"model": "demo", "messages": ASK, "tools": TOOLS, "max_tokens": 400, **fields}
    if not stream:
        choice = client.chat.completions.create(**fields).choices[0]
        message = choice.message
        calls = [(c.id, c.function.name, c.function.arguments) for c in message.tool_calls or []]
        return message.content, message.reasoning, calls, choice.finish_reason
    content, reasoning, calls, finish = "", "", {}, None
    for chunk in client.chat.completions.create(stream=True, **fields):
        for choice in chunk.choices:
            content += choice.delta.content or ""
            reasoning += getattr(choice.delta, "reasoning", None) or ""
            finish = choice.finish_reason or finish
            for call in choice.delta.tool_calls or []:
                entry = calls.setdefault(call.index, ["", "", ""])
                if call.id:
                    assert not entry[0], "the id comes once"
                    entry[0] = call.id
                if call.function.name:
                    assert not entry[1], "the name comes once"
                    entry[1] = call.function.name
                entry[2] += call.function.arguments or ""
    assert sorted(calls) == list(range(len(calls)))
    return content or None, reasoning or None, [tuple(calls[i]) for i in sorted(calls)], finish


@pytest.mark.parametrize("block", BLOCKS, ids=str)
@pytest.mark.parametrize("stream", [False, True])
def test_two_calls_after_thinking(say, block, stream):
    live = say("I need a tool.\n</think>\n\nLet me look.\n\n" + CALL + "\n" + NOOP, block=block)
    content, reasoning, calls, finish = ask(live, stream=stream)
    assert (content, reasoning, finish) == ("Let me look.", "I need a tool.", "tool_calls")
    assert [name for _, name, _ in calls] == ["get_weather", "noop"]
    assert json.loads(calls[0][2]) == ARGUMENTS and calls[1][2] == "{}"
    assert len({i for i, _, _ in calls}) == 2


@pytest.mark.parametrize("block", BLOCKS, ids=str)
@pytest.mark.parametrize("stream", [False, True])
def test_call_inside_an_open_think_block(say, block, stream):
    content, reasoning, calls, finish = ask(say("I call now.\n" + CALL, block=block), stream=stream)
    assert (content, reasoning, finish) == (None, "I call now.", "tool_calls")
    assert json.loads(calls[0][2]) == ARGUMENTS


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("thinking", [False, True])
@pytest.mark.parametrize(
    ("choice", "calls_tool"),
    [("auto", False), ("auto", True), ("none", False), ("none", True), ("required", True), ("named", True)],
)
def test_finish_reason_and_calls_agree(say, choice, calls_tool, thinking, stream):
    """A forced choice without a call cannot be scripted: the grammar does not let the model do that."""
    lead = "hm\n</think>\n\n" if thinking else ""
    call = CALL.replace("\n<parameter=limit>\nnull\n</parameter>", "")
    live = say(lead + (call if calls_tool else "No."), block=5)
    named = {"type": "function", "function": {"name": "get_weather"}}
    content, _, calls, finish = ask(
        live,
        stream=stream,
        tool_choice=named if choice == "named" else choice,
        extra_body={"chat_template_kwargs": {"enable_thinking": thinking}},
    )
    assert (finish == "tool_calls") == bool(calls) == (calls_tool and choice != "none")
    assert bool(content) == (not calls)


def test_parallel_false_keeps_the_first(say):
    live = say("x</think>" + CALL + "\n" + NOOP, block=16)
    for stream in (False, True):
        assert [name for _, name, _ in ask(live, stream=stream, parallel_tool_calls=False)[2]] == ["get_weather"]


@pytest.mark.parametrize("stream", [False, True])
def test_cut_by_length_is_valid_json_and_says_length(say, stream, tokenizer):
    text = "x</think>" + CALL
    for cut in range(8, len(tokenizer.encode(text)), 7):
        _, _, calls, finish = ask(say(text, block=4), stream=stream, max_tokens=cut)
        assert finish == "length" and all(isinstance(json.loads(c[2]), dict) for c in calls)


def test_malformed_call_is_content(say):
    for stream in (False, True):
        content, _, calls, finish = ask(
            say("x</think><tool_call>\nget_weather()\n</tool_call>", block=3), stream=stream
        )
        assert (content, calls, finish) == ("<tool_call>\nget_weather()\n</tool_call>", [], "stop")


def test_without_tools_nothing_is_parsed(say):
    content, _, calls, _ = ask(say("x\n</think>\n\n" + NOOP), tools=openai.NOT_GIVEN)
    assert content == NOOP and not calls


def test_history_with_calls_and_results_is_rendered(say, tokenizer):
    live = say("ok</think>fine")
    function = {"name": "get_weather", "arguments": '{"city": "Brno", "days": 2}'}
    history = [
        *ASK,
        {"role": "assistant", "content": None, "tool_calls": [{"id": "1", "type": "function", "function": function}]},
        {"role": "tool", "tool_call_id": "1", "content": [{"type": "text", "text": "Sunny"}]},
    ]
    ask(live, messages=history)
    prompt = tokenizer.decode(live.engine.submitted[-1].prompt)
    assert "<parameter=city>\nBrno\n</parameter>\n<parameter=days>\n2\n</parameter>" in prompt
    assert "<tool_response>\nSunny\n</tool_response>" in prompt


def test_example_call_in_the_prompt_is_not_an_answer(say):
    live = say("x</think>plain")
    content, _, calls, _ = ask(live, messages=[{"role": "user", "content": "Explain " + CALL}])
    assert content == "plain" and not calls


def test_legacy_functions(say):
    live = say("x</think>" + NOOP)
    calls = ask(live, tools=openai.NOT_GIVEN, extra_body={"functions": [TOOLS[1]["function"]]})[2]
    assert [name for _, name, _ in calls] == ["noop"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tool_choice": {"type": "function", "function": {"name": "nope"}}}, "tool_choice"),
        ({"tool_choice": "sometimes"}, "tool_choice"),
        ({"tools": [{"type": "web_search", "function": {"name": "x"}}]}, "tools"),
        ({"tools": [{"type": "function"}]}, "body.tools.0.function"),
        ({"tool_choice": "required", "response_format": {"type": "json_object"}}, "response_format"),
        ({"extra_body": {"structured_outputs": {"regex": "a"}}}, "structured_outputs"),
    ],
    ids=str,
)
def test_refusals(say, fields, param):
    with pytest.raises(openai.BadRequestError) as caught:
        ask(say("x"), **fields)
    assert caught.value.body["param"] == param


def test_recursive_schema_ends(say):
    tool = {
        "type": "function",
        "function": {
            "name": "noop",
            "parameters": {
                "type": "object",
                "$defs": {"node": {"type": "object", "properties": {"next": {"$ref": "#/$defs/node"}}}},
                "properties": {"n": {"$ref": "#/$defs/node"}, "loop": {"$ref": "#/properties/loop"}},
            },
        },
    }
    text = 'x</think><tool_call>\n<function=noop>\n<parameter=n>\n{"next": {"next": {}}}\n</parameter>\n</function>'
    assert json.loads(ask(say(text), tools=[tool])[2][0][2]) == {"n": {"next": {"next": {}}}}
