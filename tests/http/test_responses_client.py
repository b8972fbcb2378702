"""OpenAI Responses through the official client against a live server."""

from __future__ import annotations

import json

import httpx
import openai
import pytest

TOOL = {
    "type": "function",
    "name": "get",
    "description": "Get.",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}, "n": {"type": "integer"}}},
}
CALL = (
    "<tool_call>\n<function=get>\n<parameter=city>\nBrno 🙂\n</parameter>\n"
    "<parameter=n>\n2\n</parameter>\n</function>\n</tool_call>"
)


def client(live):
    return openai.OpenAI(base_url=live.url + "/v1", api_key="none", max_retries=0)


def create(live, **fields):
    return client(live).responses.create(**{"model": "demo", "input": "Hi", "max_output_tokens": 300, **fields})


@pytest.mark.parametrize("block", [1, 4, 16])
def test_reasoning_text_and_call(say, block):
    live = say("I think.\n</think>\n\nLook.\n\n" + CALL, block=block)
    response = create(live, tools=[TOOL])
    assert [item.type for item in response.output] == ["reasoning", "message", "function_call"]
    assert response.status == "completed" and response.output_text == "Look."
    assert response.output[0].content[0].text == "I think."
    assert json.loads(response.output[2].arguments) == {"city": "Brno 🙂", "n": 2} and response.output[2].call_id
    assert response.usage.total_tokens == response.usage.input_tokens + response.usage.output_tokens

    with client(live).responses.stream(model="demo", input="Hi", tools=[TOOL]) as stream:
        events = list(stream)
        final = stream.get_final_response()
    assert [item.type for item in final.output] == ["reasoning", "message", "function_call"]
    assert final.output_text == "Look." and final.output[2].arguments == response.output[2].arguments
    assert [e.sequence_number for e in events] == list(range(len(events)))
    assert [e.type for e in events[:2]] == ["response.created", "response.in_progress"]
    assert events[-1].type == "response.completed"


def test_event_order_on_the_wire(say):
    live = say("t\n</think>\n\nc" + CALL, block=2)
    with httpx.stream("POST", live.url + "/v1/responses", json={"input": "x", "tools": [TOOL], "stream": True}) as r:
        names = [line[7:] for line in r.iter_lines() if line.startswith("event: ")]
    squeezed = [n for i, n in enumerate(names) if i == 0 or n != names[i - 1]]
    assert squeezed == [
        "response.created",
        "response.in_progress",
        *(
            name
            for kind in ("reasoning_text", "output_text")
            for name in (
                "response.output_item.added",
                "response.content_part.added",
                f"response.{kind}.delta",
                f"response.{kind}.done",
                "response.content_part.done",
                "response.output_item.done",
            )
        ),
        "response.output_item.added",
        "response.function_call_arguments.delta",
        "response.function_call_arguments.done",
        "response.output_item.done",
        "response.completed",
    ]


@pytest.mark.parametrize("block", [1, 3])
def test_thinking_as_a_summary_where_one_was_asked_for(say, block):
    """Clients that ask for a summary show it and not the content (sent back, it is thinking again: see Codex)."""
    live = say("I think.\n</think>\n\nLook.", block=block)
    with client(live).responses.stream(model="demo", input="Hi", reasoning={"summary": "auto"}) as stream:
        events = list(stream)
        item = stream.get_final_response().output[0]
    deltas = [e.delta for e in events if e.type == "response.reasoning_summary_text.delta"]
    assert "".join(deltas) == item.summary[0].text == "I think." and not item.content
    assert not [e for e in events if "reasoning_text" in e.type]


def test_length_is_incomplete(say):
    live = say("one two three four")
    body = {"reasoning": {"effort": "none"}, "max_output_tokens": 2}
    response = create(live, **body)
    assert response.status == "incomplete" and response.incomplete_details.reason == "max_output_tokens"
    assert list(create(live, stream=True, **body))[-1].type == "response.incomplete"


def test_probe_with_one_token_and_no_thinking_switch(say):
    assert create(say("one two"), input="", max_output_tokens=1).usage.output_tokens == 1


def test_tool_loop_by_items(say, tokenizer):
    live = say("x</think>done")
    items = [
        {"role": "user", "content": [{"type": "input_text", "text": "Weather?"}]},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "hmm"}]},
        {"type": "function_call", "call_id": "c1", "name": "get", "arguments": '{"city": "Brno"}'},
        {"type": "function_call", "call_id": "c2", "name": "get", "arguments": '{"city": "Plzeň"}'},
        {"type": "function_call_output", "call_id": "c1", "output": "rain"},
        {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "sun"}]},
    ]
    create(live, input=items, tools=[TOOL], instructions="Be brief.")
    prompt = tokenizer.decode(live.engine.submitted[-1].prompt)
    assert "Be brief." in prompt and "hmm" in prompt
    assert prompt.index("Brno") < prompt.index("Plzeň") < prompt.index("rain") < prompt.index("sun")


def test_tools_of_other_kinds_are_ignored(say):
    live = say("x</think>" + CALL)
    kinds = [{"type": "namespace", "name": "n", "tools": []}, {"type": "web_search"}]
    kinds += [{"type": "custom", "name": "apply_patch"}, {"type": "image_generation"}]
    reply = httpx.post(live.url + "/v1/responses", json={"input": "x", "tools": [*kinds, TOOL], "tool_choice": "auto"})
    assert reply.status_code == 200
    assert reply.json()["output"][-1]["name"] == "get"
    assert reply.headers["x-soloist-ignored"] == (
        "tools.namespace, tools.web_search, tools.custom, tools.image_generation"
    )
    assert httpx.post(live.url + "/v1/responses", json={"input": "x", "tools": kinds, "tool_choice": "auto"}).is_success


def test_previous_response(say, tokenizer):
    live = say("think\n</think>\n\nfirst answer")
    first = create(live, instructions="Only once.")
    second = create(live, input="and now?", previous_response_id=first.id)
    prompt = tokenizer.decode(live.engine.submitted[-1].prompt)
    assert "first answer" in prompt and "and now?" in prompt and "Only once." not in prompt
    third = create(live, input="third", previous_response_id=second.id)
    assert "and now?" in tokenizer.decode(live.engine.submitted[-1].prompt) and third.previous_response_id == second.id
    assert client(live).responses.retrieve(first.id).output_text == "first answer"
    unstored = create(live, store=False)
    for unknown in (unstored.id, "resp_nope"):
        with pytest.raises(openai.BadRequestError, match="not found") as caught:
            create(live, previous_response_id=unknown)
        assert caught.value.body["param"] == "previous_response_id"
    with pytest.raises(openai.NotFoundError):
        client(live).responses.retrieve("resp_nope")


def test_cancel_while_running(say):
    live = say(" word" * 400, engine={"delay_s": 0.02})
    stream = create(live, stream=True, reasoning={"effort": "none"})
    first = next(stream)
    client(live).responses.cancel(first.response.id)
    events = list(stream)
    assert events[-1].type == "response.incomplete" and live.engine.status().running == 0
    with pytest.raises(openai.BadRequestError):
        client(live).responses.cancel(first.response.id)


def test_structured_text(say):
    live = say('{"x": 5}', block=16)
    schema = {
        "type": "object",
        "properties": {"x": {"type": "integer"}},
        "required": ["x"],
        "additionalProperties": False,
    }
    fmt = {"format": {"type": "json_schema", "name": "answer", "schema": schema, "strict": True}}
    response = create(live, text=fmt, reasoning={"effort": "none"})
    assert json.loads(response.output_text) == {"x": 5}


def test_logprobs(say):
    response = create(say("one two"), include=["message.output_text.logprobs"], reasoning={"effort": "none"})
    assert len(response.output[0].content[0].logprobs) == response.usage.output_tokens


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"background": True}, "background"),
        ({"input": []}, "input"),
        ({"input": [{"type": "function_call", "call_id": "1"}]}, "input.0"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"reasoning": {"effort": "huge"}}, "reasoning_effort"),
        ({"text": {"format": {"type": "yaml"}}}, "text.format"),
        ({"extra_body": {"max_output_tokens": 0}}, "body.max_output_tokens"),
        ({"input": [{"role": "user", "content": [{"type": "input_file"}]}]}, "input.0.content.0"),
    ],
    ids=str,
)
def test_refusals(say, fields, param):
    with pytest.raises(openai.BadRequestError) as caught:
        create(say("x"), **fields)
    assert caught.value.body["param"] == param
