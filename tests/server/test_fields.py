"""The list of known fields is data: nothing is in two classes, and each class does what it says."""

from __future__ import annotations

import pytest

from soloist.errors import RequestError
from soloist.server.fields import INERT, REFUSED, IgnoredFields, sort_extras
from soloist.server.protocol.anthropic import CountRequest, MessagesRequest
from soloist.server.protocol.chat import ChatRequest
from soloist.server.protocol.completions import CompletionRequest
from soloist.server.protocol.responses import ResponsesRequest
from soloist.server.protocol.tokenize import DetokenizeRequest, TokenizeRequest

MODELS = [ChatRequest, CompletionRequest, MessagesRequest, CountRequest, ResponsesRequest, TokenizeRequest]
MODELS += [DetokenizeRequest]

# The request fields of OpenAI's chat and completions endpoints, and of the samplers other servers add.
OPENAI_CHAT = """messages model audio frequency_penalty function_call functions logit_bias logprobs
 max_completion_tokens max_tokens metadata modalities n parallel_tool_calls prediction presence_penalty
 prompt_cache_key reasoning_effort response_format safety_identifier seed service_tier stop store stream stream_options
 temperature tool_choice tools top_logprobs top_p user verbosity web_search_options"""


def test_no_field_is_in_two_classes():
    assert not INERT & set(REFUSED)


@pytest.mark.parametrize("name", OPENAI_CHAT.split())
def test_every_openai_chat_field_is_known(name):
    assert name in ChatRequest.model_fields or name in INERT or name in REFUSED


@pytest.mark.parametrize("name", REFUSED)
def test_refused_unless_neutral(name):
    for neutral in REFUSED[name]:
        assert sort_extras({name: neutral}) == []
    with pytest.raises(RequestError) as caught:
        sort_extras({name: {"something": "else"}})
    assert caught.value.param == name and caught.value.status == 400


def test_a_neutral_number_is_not_true():
    with pytest.raises(RequestError):
        sort_extras({"best_of": True})


def test_inert_and_unknown():
    assert sort_extras(dict.fromkeys(INERT, 1)) == []
    assert sort_extras({"brand_new": 1}) == ["brand_new"] and sort_extras(None) == []


@pytest.mark.parametrize("model", MODELS)
def test_models_keep_what_they_do_not_know(model):
    assert model.model_config.get("extra") == "allow"


def test_unknown_fields_are_logged_once(caplog):
    ignored = IgnoredFields()
    with caplog.at_level("INFO", "soloist.server"):
        for _ in range(3):
            assert ignored.headers(["new", "new2"]) == {"x-soloist-ignored": "new, new2"}
    assert len(caplog.records) == 2 and ignored.headers([]) == {}
