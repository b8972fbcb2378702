"""LangChain's OpenAI chat model and litellm: a tool loop, a structured answer, a streamed thinking answer.

Skipped where they are not installed: `pip install 'soloist[clients]'`.
"""

from __future__ import annotations

import json

import pytest
from pydantic import BaseModel

from soloist.server.prompting import thinking_left_open

EOS = 16362
CALL = "<tool_call>\n<function=get_weather>\n<parameter=city>\nBrno 🙂\n</parameter>\n</function>\n</tool_call>"

CALL_PLACE = (
    "<tool_call>\n<function=Place>\n<parameter=city>\nBrno\n</parameter>\n"
    "<parameter=days>\n3\n</parameter>\n</function>\n</tool_call>"
)


class Place(BaseModel):
    """A place."""

    city: str
    days: int


@pytest.fixture
def model(say, tokenizer):
    """Calls the tool when one is offered and no result is there yet; answers JSON when asked for; else prose."""

    def script(request):
        prompt = tokenizer.decode(request.prompt)
        if '"name": "Place"' in prompt:
            text = CALL_PLACE
        elif "JSON please" in prompt:
            text = '{"city":"Brno","days":3}'
        elif "<tool_response>" in prompt:
            text = "It is sunny in Brno."
        elif "get_weather" in prompt:
            text = CALL
        else:
            text = "A plain answer."
        lead = "Let me think.\n</think>\n\n" if thinking_left_open(tokenizer, request.prompt) else ""
        return [*tokenizer.encode(lead + text), EOS]

    return say(script, block=(1, 8))


class TestLangChain:
    @pytest.fixture
    def llm(self, model):
        lib = pytest.importorskip("langchain_openai")
        return lib.ChatOpenAI(base_url=model.url + "/v1", api_key="x", model="demo", max_retries=0)

    def test_tool_loop(self, llm):
        from langchain_core.messages import HumanMessage, ToolMessage
        from langchain_core.tools import tool

        @tool
        def get_weather(city: str) -> str:
            """Weather of a city."""
            return "sunny in " + city

        bound = llm.bind_tools([get_weather])
        history = [HumanMessage("Weather?")]
        answer = bound.invoke(history)
        assert [(c["name"], c["args"]) for c in answer.tool_calls] == [("get_weather", {"city": "Brno 🙂"})]
        result = get_weather.invoke(answer.tool_calls[0]["args"])
        history += [answer, ToolMessage(result, tool_call_id=answer.tool_calls[0]["id"])]
        assert bound.invoke(history).content == "It is sunny in Brno."

    @pytest.mark.parametrize("method", ["json_schema", "function_calling"])
    def test_structured_answer(self, llm, method):
        bound = llm.with_structured_output(Place, method=method)
        assert bound.invoke("JSON please") == Place(city="Brno", days=3)

    def test_streamed_thinking_answer(self, llm):
        """The class drops fields that OpenAI's Chat API lacks; the answer must be clean of thinking."""
        chunks = list(llm.stream("Hello", stream_usage=True))
        assert "".join(c.content for c in chunks) == "A plain answer."
        usage = next(c.usage_metadata for c in chunks if c.usage_metadata)
        assert usage["output_token_details"]["reasoning"] > 0

    def test_streamed_thinking_answer_over_responses(self, llm):
        reasoning = {"effort": "medium", "summary": "auto"}
        over = llm.model_copy(update={"reasoning": reasoning, "output_version": "responses/v1"})
        text, thought = "", ""
        for chunk in over.stream("Hello"):
            for block in chunk.content_blocks:
                text += block.get("text", "")
                thought += block.get("reasoning", "")
        assert (thought, text) == ("Let me think.", "A plain answer.")


class TestLitellm:
    @pytest.fixture
    def complete(self, model):
        lib = pytest.importorskip("litellm")
        lib.suppress_debug_info = True

        def call(**fields):
            fields = {"messages": [{"role": "user", "content": "Hello"}], **fields}
            return lib.completion(model="openai/demo", api_base=model.url + "/v1", api_key="x", **fields)

        return call

    def test_tool_loop(self, complete):
        parameters = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
        tools = [{"type": "function", "function": {"name": "get_weather", "parameters": parameters}}]
        history = [{"role": "user", "content": "Weather?"}]
        message = complete(messages=history, tools=tools).choices[0].message
        call = message.tool_calls[0]
        assert json.loads(call.function.arguments) == {"city": "Brno 🙂"}
        history += [message.model_dump(), {"role": "tool", "tool_call_id": call.id, "content": "sunny"}]
        assert complete(messages=history, tools=tools).choices[0].message.content == "It is sunny in Brno."

    def test_structured_answer(self, complete):
        messages = [{"role": "user", "content": "JSON please"}]
        content = complete(messages=messages, response_format=Place).choices[0].message.content
        assert Place.model_validate_json(content) == Place(city="Brno", days=3)

    def test_streamed_thinking_answer(self, complete):
        reasoning, content = "", ""
        for chunk in complete(stream=True):
            delta = chunk.choices[0].delta
            reasoning += getattr(delta, "reasoning_content", None) or ""
            content += delta.content or ""
        assert (reasoning, content) == ("Let me think.", "A plain answer.")
