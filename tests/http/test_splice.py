"""Generated ids survive the way through a client: the next prompt begins with them, to the last id."""

from __future__ import annotations

import anthropic
import httpx
import openai
import pytest

EOS = 16362
ASK = [{"role": "user", "content": "Hello"}]
TOOL = {
    "type": "function",
    "function": {
        "name": "get",
        "parameters": {"type": "object", "properties": {"o": {"type": "object"}, "s": {"type": "string"}}},
    },
}
CALL = (
    '<tool_call>\n<function=get>\n<parameter=o>\n{"a":1,"b":[1,2]}\n</parameter>\n'
    "<parameter=s>\nabc def\n</parameter>\n</function>\n</tool_call>"
)


def spelled(tokenizer, text):
    """Ids of the text as sampling at T=1 might give them: one per character where that is possible."""
    ids = []
    for token in tokenizer.encode(text):
        plain = tokenizer.token_text(token)
        ids += [token] if token in tokenizer.added.values() else [i for c in plain for i in tokenizer.encode(c)]
    assert ids != tokenizer.encode(text) and tokenizer.decode(ids) == text
    return ids


@pytest.fixture
def odd(say, tokenizer):
    """`odd(a, b)`: a server that answers its first request with a, all later ones with b, oddly tokenised."""

    def start(*texts):
        answers = [[*spelled(tokenizer, text), EOS] for text in texts]
        live = say(lambda request: answers[min(len(live.engine.submitted), len(answers)) - 1], block=3)
        return live

    return start


def chat(live, messages, **fields):
    client = openai.OpenAI(base_url=live.url + "/v1", api_key="x", max_retries=0)
    return client.chat.completions.create(model="demo", messages=messages, **fields).choices[0].message


def prompts(live):
    return [request.prompt for request in live.engine.submitted]


def outputs(live):
    return [request.output for request in live.engine.submitted]


def begins(live, n=1):
    return prompts(live)[n][: len(prompts(live)[n - 1]) + len(outputs(live)[n - 1])] == (
        prompts(live)[n - 1] + outputs(live)[n - 1]
    )


def test_what_the_template_drops_is_a_miss(odd):
    live = odd("First answer here.", "Second answer there.", "Third.")
    off = {"extra_body": {"enable_thinking": False}}
    history = list(ASK)
    for _ in range(3):
        message = chat(live, history, **off)
        history += [{"role": "assistant", "content": message.content}, {"role": "user", "content": "More."}]
    # The template shows an empty think block only in the last turn, so the user's next message moves the cut there.
    assert live.service.meters.registry.get_sample_value("soloist:splice_misses_total", {"model_name": "demo"}) == 2


@pytest.mark.parametrize("stream", [False, True])
def test_thinking_and_calls_in_a_tool_loop(odd, tokenizer, stream):
    live = odd("I need data.\n</think>\n\nLet me look.\n\n" + CALL, "Now I know.\n</think>\n\nDone.")
    client = openai.OpenAI(base_url=live.url + "/v1", api_key="x", max_retries=0)
    if stream:
        reasoning, content, arguments = "", "", ""
        for chunk in client.chat.completions.create(model="demo", messages=ASK, tools=[TOOL], stream=True):
            for choice in chunk.choices:
                reasoning += getattr(choice.delta, "reasoning", None) or ""
                content += choice.delta.content or ""
                arguments += "".join(c.function.arguments or "" for c in choice.delta.tool_calls or [])
    else:
        message = chat(live, ASK, tools=[TOOL])
        reasoning, content = message.reasoning, message.content
        arguments = message.tool_calls[0].function.arguments
    call = {"id": "c", "type": "function", "function": {"name": "get", "arguments": arguments}}
    assistant = {"role": "assistant", "content": content, "reasoning": reasoning, "tool_calls": [call]}
    chat(live, [*ASK, assistant, {"role": "tool", "tool_call_id": "c", "content": "42"}], tools=[TOOL])
    assert begins(live)
    assert tokenizer.decode(prompts(live)[1]).endswith(
        "<tool_response>\n42\n</tool_response><|im_end|>\n<|im_start|>assistant\n<think>\n"
    )
    chat(live, [*ASK, {**assistant, "content": "Changed."}, {"role": "tool", "content": "42"}], tools=[TOOL])
    assert not begins(live, 2) and prompts(live)[2] == tokenizer.encode(tokenizer.decode(prompts(live)[2]))


def test_over_anthropic(odd):
    live = odd("Data.\n</think>\n\nLook.\n\n" + CALL, "Ok.\n</think>\n\nDone.")
    client = anthropic.Anthropic(base_url=live.url, api_key="x", max_retries=0)
    tool = {"name": "get", "input_schema": TOOL["function"]["parameters"]}
    fields = {"model": "demo", "max_tokens": 500, "tools": [tool], "thinking": {"type": "adaptive"}}
    message = client.messages.create(messages=ASK, **fields)
    result = {"type": "tool_result", "tool_use_id": message.content[-1].id, "content": "42"}
    client.messages.create(messages=[*ASK, message.to_param(), {"role": "user", "content": [result]}], **fields)
    assert begins(live)


def test_over_responses(odd):
    live = odd("Data.\n</think>\n\nLook.\n\n" + CALL, "Ok.\n</think>\n\nDone.")
    tool = {"type": "function", **TOOL["function"]}
    first = httpx.post(live.url + "/v1/responses", json={"input": "Hello", "tools": [tool]}).json()
    output = {"type": "function_call_output", "call_id": first["output"][-1]["call_id"], "output": "42"}
    by_id = {"input": [output], "tools": [tool], "previous_response_id": first["id"]}
    assert httpx.post(live.url + "/v1/responses", json=by_id).is_success
    assert begins(live)
    by_items = {"input": [{"role": "user", "content": "Hello"}, *first["output"], output], "tools": [tool]}
    assert httpx.post(live.url + "/v1/responses", json=by_items).is_success
    assert prompts(live)[2] == prompts(live)[1]


def test_a_cut_answer_is_not_remembered(odd):
    live = odd("Data.\n</think>\n\nOne two three.", "Other.")
    chat(live, ASK, stop=["three"])
    chat(live, ASK, max_tokens=3)
    assert not live.service.transcripts.splice("<|im_start|>user\nHello<|im_end|>\n")[0]
    assert not live.service.transcripts._ids
