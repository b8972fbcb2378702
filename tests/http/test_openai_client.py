"""The official openai client against a live server: scripted engines of several block sizes, and the demo model.

Every test states an invariant that holds whatever the model says, so the same suite judges the scripts and the
real engine. All greedy, so that two calls may be compared.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator

import openai
import pytest

from fakes import FakeEngine
from live import Live, serving
from soloist.engine.request import Request
from soloist.server.prompting import thinking_left_open
from soloist.server.template import ChatTemplate
from soloist.server.tokenizer import Tokenizer

EOS = 16362
TEXTS = (
    "I greet the user.\n</think>\n\nHello! Grüße aus Ærøskøbing 🙂 and more words to fill the line.",
    "Short.\n</think>\n\nThe answer is 42.\n\nSecond paragraph; STOP here or there.",
    "One two three.\n</think>\n\nžluťoučký kůň 中文 text 🙂🙂 end.",
)
ASK = [{"role": "user", "content": "Say something."}]


@pytest.fixture(scope="module", params=["block1", "block3", "block16", "ragged", "demo"])
def live(request, tokenizer: Tokenizer, template: ChatTemplate) -> Iterator[Live]:
    if request.param == "demo":
        from soloist.engine.build import build_engine
        from soloist.settings import resolve

        engine = build_engine(resolve({"model": "demo"}, {}, {}))
    else:
        scripts = {
            True: [[*tokenizer.encode(text), EOS] for text in TEXTS],
            False: [[*tokenizer.encode(text.split("</think>\n\n")[1]), EOS] for text in TEXTS],
        }

        def script(request: Request) -> list[int]:
            thinking = thinking_left_open(tokenizer, request.prompt)
            ids = scripts[thinking][zlib.crc32(str(request.prompt).encode()) % len(TEXTS)]
            return ids[:-1] * 40 if EOS not in request.params.stop_ids else ids

        sizes = {"block1": 1, "block3": 3, "block16": 16, "ragged": (1, 16)}
        engine = FakeEngine(script, block=sizes[request.param], max_len=8192)
    with serving(engine, tokenizer, template, names=("demo", "alias"), defaults={"temperature": 0.0}) as server:
        yield server
    engine.close()


@pytest.fixture(scope="module")
def client(live: Live) -> openai.OpenAI:
    return openai.OpenAI(base_url=live.url + "/v1", api_key="none", max_retries=0)


def chat(client: openai.OpenAI, **fields):
    fields = {"model": "demo", "messages": ASK, "max_tokens": 48, **fields}
    return client.chat.completions.create(**fields)


def gather(stream) -> dict:
    """The non-streaming view of a stream, per choice index."""
    out: dict = {"choices": {}, "usage": None, "ids": set()}
    for chunk in stream:
        out["ids"].add(chunk.id)
        if chunk.usage:
            out["usage"] = chunk.usage
        for choice in chunk.choices:
            c = out["choices"].setdefault(
                choice.index, {"content": "", "reasoning": "", "logprobs": [], "finish": None, "role": None}
            )
            assert c["finish"] is None, "nothing may follow the finish reason"
            c["role"] = c["role"] or choice.delta.role
            c["content"] += choice.delta.content or ""
            c["reasoning"] += getattr(choice.delta, "reasoning", None) or ""
            c["finish"] = choice.finish_reason
            if choice.logprobs:
                c["logprobs"] += [(e.token, e.logprob) for e in choice.logprobs.content]
    return out


def test_chat(client):
    reply = chat(client)
    message = reply.choices[0].message
    assert reply.object == "chat.completion" and reply.id.startswith("chatcmpl-") and reply.model == "demo"
    assert message.role == "assistant" and (message.content or message.reasoning)
    assert reply.choices[0].finish_reason in ("stop", "length")
    assert reply.usage.total_tokens == reply.usage.prompt_tokens + reply.usage.completion_tokens
    assert reply.usage.prompt_tokens_details.cached_tokens >= 0


def test_reasoning_under_both_names(client):
    message = chat(client).choices[0].message
    assert message.reasoning and message.reasoning == message.reasoning_content
    assert "</think>" not in message.reasoning + (message.content or "")


def test_stream_equals_whole(client):
    whole, streamed = chat(client), gather(chat(client, stream=True))
    message, choice = whole.choices[0].message, streamed["choices"][0]
    assert choice["content"] == (message.content or "")
    assert choice["reasoning"] == (message.reasoning or "")
    assert choice["finish"] == whole.choices[0].finish_reason
    assert choice["role"] == "assistant" and len(streamed["ids"]) == 1 and streamed["usage"] is None
    assert "\ufffd" not in choice["content"] or whole.choices[0].finish_reason == "length"


def test_stream_usage(client):
    streamed = gather(chat(client, stream=True, stream_options={"include_usage": True}))
    assert streamed["usage"] == chat(client).usage or (
        streamed["usage"].completion_tokens == chat(client).usage.completion_tokens
    )


def test_continuous_usage(client):
    chunks = list(chat(client, stream=True, stream_options={"include_usage": True, "continuous_usage_stats": True}))
    counts = [chunk.usage.completion_tokens for chunk in chunks]
    assert all(chunk.usage for chunk in chunks) and counts == sorted(counts)


def test_thinking_off(client):
    reply = chat(client, extra_body={"chat_template_kwargs": {"enable_thinking": False}})
    assert reply.choices[0].message.content and not reply.choices[0].message.reasoning
    assert reply.usage.completion_tokens_details.reasoning_tokens == 0


@pytest.mark.parametrize("n", [1, 2, 5, 7, 11])
def test_max_tokens_is_exact(client, n):
    reply = chat(client, max_tokens=n, extra_body={"ignore_eos": True})
    streamed = gather(
        chat(client, max_tokens=n, stream=True, stream_options={"include_usage": True}, extra_body={"ignore_eos": True})
    )
    assert reply.usage.completion_tokens == n == streamed["usage"].completion_tokens
    assert reply.choices[0].finish_reason == "length" == streamed["choices"][0]["finish"]


def test_max_completion_tokens_wins(client):
    reply = chat(client, max_tokens=40, max_completion_tokens=3, extra_body={"ignore_eos": True})
    assert reply.usage.completion_tokens == 3


def test_stop_string_cuts(client):
    text = chat(client, extra_body={"chat_template_kwargs": {"enable_thinking": False}}).choices[0].message.content
    stop = text[5:9]
    off = {"chat_template_kwargs": {"enable_thinking": False}}
    cut = chat(client, stop=stop, extra_body=off)
    assert cut.choices[0].message.content == text[: text.index(stop)]
    assert cut.choices[0].finish_reason == "stop" and cut.choices[0].stop_reason == stop
    kept = chat(client, stop=[stop], extra_body={**off, "include_stop_str_in_output": True})
    assert kept.choices[0].message.content == text[: text.index(stop)] + stop
    streamed = gather(chat(client, stop=stop, stream=True, extra_body=off))["choices"][0]
    assert streamed["content"] == cut.choices[0].message.content


def test_stop_string_counts_nothing_after(client):
    off = {"chat_template_kwargs": {"enable_thinking": False}}
    text = chat(client, extra_body=off).choices[0].message.content
    cut = chat(client, stop=text[4:7], logprobs=True, extra_body=off)
    assert len(cut.choices[0].logprobs.content) == cut.usage.completion_tokens
    spelled = b"".join(bytes(e.bytes) for e in cut.choices[0].logprobs.content).decode("utf-8", "replace")
    assert spelled.startswith(text[:7]) and text[4:7] in spelled
    shorter = b"".join(bytes(e.bytes) for e in cut.choices[0].logprobs.content[:-1]).decode("utf-8", "replace")
    assert text[4:7] not in shorter, "the last counted token is the one that completed the stop string"


def test_logprobs(client):
    reply = chat(client, logprobs=True, top_logprobs=3)
    entries = reply.choices[0].logprobs.content
    assert len(entries) == reply.usage.completion_tokens
    assert all(e.logprob <= 0 and len(e.top_logprobs) == 3 for e in entries)
    assert all(max(t.logprob for t in e.top_logprobs) == pytest.approx(e.logprob) for e in entries), (
        "greedy is the best"
    )


def test_logprobs_stream_equals_whole(client):
    whole = [(e.token, e.logprob) for e in chat(client, logprobs=True).choices[0].logprobs.content]
    assert gather(chat(client, logprobs=True, stream=True))["choices"][0]["logprobs"] == whole


def test_prompt_logprobs(client):
    reply = chat(client, max_tokens=1, extra_body={"prompt_logprobs": 2})
    listing = reply.prompt_logprobs
    assert listing[0] is None and len(listing) == reply.usage.prompt_tokens
    assert all(len(row) in (2, 3) and all(v["logprob"] <= 0 for v in row.values()) for row in listing[1:])


def test_n_choices(client):
    reply = chat(client, n=3, temperature=1.0, seed=5)
    assert [c.index for c in reply.choices] == [0, 1, 2]
    single = chat(client, temperature=1.0, seed=5)
    assert reply.choices[0].message.content == single.choices[0].message.content
    assert reply.usage.prompt_tokens == single.usage.prompt_tokens, "the prompt counts once"


def test_n_choices_stream(client):
    whole = chat(client, n=3, temperature=1.0, seed=5)
    streamed = gather(chat(client, n=3, temperature=1.0, seed=5, stream=True))["choices"]
    assert [streamed[i]["content"] for i in range(3)] == [c.message.content or "" for c in whole.choices]


def test_seed_repeats(client):
    first, second = (chat(client, temperature=1.0, seed=9).choices[0].message for _ in range(2))
    assert (first.content, first.reasoning) == (second.content, second.reasoning)


ACCEPTED = {
    "temperature": {"temperature": 0.7, "seed": 1},
    "top_p": {"top_p": 0.5, "temperature": 1.0, "seed": 1},
    "presence_penalty": {"presence_penalty": 1.0},
    "frequency_penalty": {"frequency_penalty": 1.0},
    "logit_bias": {"logit_bias": {"100": 5}},
    "truncation": {"extra_body": {"top_k": 5, "min_p": 0.1, "repetition_penalty": 1.2}},
    "words": {"extra_body": {"bad_words": ["Hello"], "allowed_token_ids": list(range(300, 9000))}},
    "stops": {"extra_body": {"min_tokens": 4, "stop_token_ids": [13]}},
    "inert": {"user": "me", "metadata": {"a": "b"}},
    "labels": {"extra_body": {"cache_salt": "x", "priority": 1, "request_id": "abc"}},
    "no max_tokens": {"max_tokens": openai.NOT_GIVEN, "stop": ["e"]},
}


@pytest.mark.parametrize("field", ACCEPTED)
def test_sampling_fields_are_accepted(client, field):
    assert chat(client, **ACCEPTED[field]).choices


def test_stop_token_id_is_reported(client, live):
    off = {"chat_template_kwargs": {"enable_thinking": False}}
    first = chat(client, logprobs=True, extra_body={**off, "return_token_ids": True})
    ids = first.choices[0].token_ids
    stop_id = ids[2]
    reply = chat(client, extra_body={**off, "stop_token_ids": [stop_id], "return_token_ids": True})
    assert reply.choices[0].stop_reason == stop_id and reply.choices[0].finish_reason == "stop"
    assert reply.choices[0].token_ids == ids[: ids.index(stop_id) + 1]
    assert first.prompt_token_ids and live.service.tokenizer.decode(ids, skip_special=True)


def test_conversation(client):
    first = chat(client).choices[0].message
    history = [*ASK, {"role": "assistant", "content": first.content or "", "reasoning": first.reasoning}]
    reply = chat(client, messages=[*history, {"role": "user", "content": [{"type": "text", "text": "And now?"}]}])
    assert reply.usage.prompt_tokens > chat(client).usage.prompt_tokens


def test_system_and_developer(client):
    for messages in (
        [{"role": "system", "content": "A."}, {"role": "system", "content": "B."}, *ASK],
        [{"role": "system", "content": "A."}, *ASK, {"role": "system", "content": "B."}, *ASK],
        [{"role": "developer", "content": "A."}, *ASK],
        [*ASK, {"role": "developer", "content": [{"type": "text", "text": "A."}]}],
    ):
        assert chat(client, messages=messages, max_tokens=2).choices


def test_continue_final_message(client):
    history = [*ASK, {"role": "assistant", "content": "Once upon a"}]
    body = {"continue_final_message": True, "add_generation_prompt": False}
    reply = chat(client, messages=history, extra_body=body)
    assert reply.choices[0].message.content is not None and not reply.choices[0].message.reasoning
    echoed = chat(client, messages=history, extra_body={**body, "echo": True})
    assert echoed.choices[0].message.content == "Once upon a" + reply.choices[0].message.content


def test_completions(client):
    reply = client.completions.create(model="demo", prompt="The capital of", max_tokens=8)
    assert reply.object == "text_completion" and reply.id.startswith("cmpl-") and reply.choices[0].text
    assert reply.usage.completion_tokens <= 8


def test_completions_default_is_16_tokens(client):
    reply = client.completions.create(model="demo", prompt="The", extra_body={"ignore_eos": True})
    assert reply.usage.completion_tokens == 16 and reply.choices[0].finish_reason == "length"


def test_completions_stream(client):
    whole = client.completions.create(model="demo", prompt="The capital of", max_tokens=24)
    chunks = list(client.completions.create(model="demo", prompt="The capital of", max_tokens=24, stream=True))
    assert "".join(c.choices[0].text for c in chunks) == whole.choices[0].text
    assert chunks[-1].choices[0].finish_reason == whole.choices[0].finish_reason


def test_completions_many_prompts(client):
    reply = client.completions.create(
        model="demo", prompt=["One", "Two two"], n=2, max_tokens=5, temperature=1.0, seed=3
    )
    assert [c.index for c in reply.choices] == [0, 1, 2, 3]
    alone = client.completions.create(model="demo", prompt="Two two", max_tokens=5, temperature=1.0, seed=3)
    assert reply.choices[2].text == alone.choices[0].text


def test_completions_token_ids(client, live):
    ids = live.service.tokenizer.encode("The capital of")
    by_ids = client.completions.create(model="demo", prompt=ids, max_tokens=8)
    lists = client.completions.create(model="demo", prompt=[ids, ids], max_tokens=8)
    by_text = client.completions.create(model="demo", prompt="The capital of", max_tokens=8)
    assert by_ids.choices[0].text == by_text.choices[0].text == lists.choices[1].text


def test_completions_echo_and_logprobs(client):
    reply = client.completions.create(model="demo", prompt="The capital of", max_tokens=4, echo=True, logprobs=2)
    lists = reply.choices[0].logprobs
    assert reply.choices[0].text.startswith("The capital of")
    assert lists.token_logprobs[0] is None and all(x <= 0 for x in lists.token_logprobs[1:])
    assert len(lists.tokens) == len(lists.text_offset) == reply.usage.total_tokens
    assert "".join(lists.tokens).startswith("The capital of") and lists.text_offset[0] == 0


def test_completions_score_only(client):
    reply = client.completions.create(model="demo", prompt="The capital of", max_tokens=0, echo=True, logprobs=1)
    assert reply.choices[0].text == "The capital of"
    assert len(reply.choices[0].logprobs.tokens) == reply.usage.prompt_tokens and reply.usage.completion_tokens == 0


def test_models(client):
    names = [m.id for m in client.models.list()]
    assert names == ["demo", "alias"] and client.models.retrieve("alias").max_model_len == 8192
    assert chat(client, model="alias", max_tokens=1).model == "alias"


def test_unknown_model(client):
    with pytest.raises(openai.NotFoundError) as caught:
        chat(client, model="gpt-4")
    assert caught.value.body["param"] == "model" and caught.value.body["type"] == "NotFoundError"


def test_context_overflow(client):
    with pytest.raises(openai.BadRequestError, match="maximum context length is 8192") as caught:
        chat(client, messages=[{"role": "user", "content": "word " * 9000}])
    assert caught.value.body["code"] == "context_length_exceeded" and caught.value.body["param"] == "input_tokens"
    with pytest.raises(openai.BadRequestError) as caught:
        chat(client, max_tokens=8193)
    assert caught.value.body["param"] == "max_tokens"
    with pytest.raises(openai.BadRequestError, match="maximum context length"):
        chat(client, messages=[{"role": "user", "content": "word " * 9000}], stream=True)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"temperature": -1}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"messages": []}, "messages"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"n": 2}, "n"),
        ({"tools": []}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"stream": True, "extra_body": {"prompt_logprobs": 1}}, "prompt_logprobs"),
        ({"extra_body": {"suffix": "x"}}, "suffix"),
        ({"extra_body": {"use_beam_search": True}}, "use_beam_search"),
        ({"logit_bias": {"99999999": 1}}, "logit_bias"),
        ({"extra_body": {"max_tokens": "many"}}, "body.max_tokens"),
        ({"extra_body": {"allowed_token_ids": []}}, "allowed_token_ids"),
        ({"max_tokens": 0}, "max_tokens"),
    ],
    ids=str,
)
def test_refusals_name_the_field(client, fields, param):
    with pytest.raises(openai.BadRequestError) as caught:
        chat(client, **fields)
    assert caught.value.body["param"] == param and caught.value.body["code"] == 400
