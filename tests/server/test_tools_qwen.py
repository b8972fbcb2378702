import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pieces import fold, pieces
from soloist.server.parsers.parts import CallStart
from soloist.server.parsers.tools_qwen import ToolParser

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get",
            "parameters": {
                "type": "object",
                "$defs": {"int": {"type": "integer"}, "loop": {"$ref": "#/$defs/loop"}},
                "properties": {
                    "s": {"type": "string"},
                    "i": {"$ref": "#/$defs/int"},
                    "n": {"anyOf": [{"type": "number"}, {"type": "null"}]},
                    "b": {"type": "boolean"},
                    "a": {"type": "array", "items": {"type": "integer"}},
                    "o": {"type": "object", "properties": {"x": {"type": "integer"}}},
                    "u": {"type": ["string", "integer"]},
                    "loop": {"$ref": "#/$defs/loop"},
                    "e": {"enum": [1, 2]},
                },
            },
        },
    }
]


def parse(text, cuts=None):
    parser = ToolParser(TOOLS)
    parts = [part for piece in pieces(text, cuts) for part in parser.push(piece)] + parser.finish()
    return fold(parts), parts


def call(name, **values):
    body = "".join(f"<parameter={k}>\n{v}\n</parameter>\n" for k, v in values.items())
    return f"<tool_call>\n<function={name}>\n{body}</function>\n</tool_call>"


def arguments(text):
    return [json.loads(c.arguments) for c in parse(text)[0].calls]


def test_all_types():
    values = {"s": "10", "i": "10", "n": "null", "b": "true", "a": '[1, "2"]', "u": "5", "e": "2", "z": "9"}
    values["o"] = '{"x": "7", "y": 1}'
    assert arguments(call("get", **values)) == [
        {"s": "10", "i": 10, "n": None, "b": True, "a": [1, 2], "u": 5, "e": 2, "z": "9", "o": {"x": 7, "y": 1}}
    ]


def test_what_does_not_fit_stays_a_string():
    values = {"i": "007", "n": "abc", "b": "True", "a": "{}", "o": "[1]", "loop": "1", "e": "NaN"}
    assert arguments(call("get", **values)) == [values]


def test_integers_may_be_written_as_floats_and_numbers_overflow():
    assert arguments(call("get", i="10.0", n="1e3")) == [{"i": 10, "n": 1000.0}]
    assert arguments(call("get", i="10.5", n="1e999")) == [{"i": "10.5", "n": "1e999"}]


def test_strings_keep_everything_but_one_line_break():
    text = 'a "quoted" \\ line\n\n  two\t<b>žluť 🙂</b>\n'
    assert arguments(call("get", s=text)) == [{"s": text}]
    assert arguments("<tool_call><function=get><parameter=s>x</parameter></function></tool_call>") == [{"s": "x"}]


def test_spelling_of_arguments():
    assert parse(call("get", s="é", i="1"))[0].calls[0].arguments == '{"s": "é", "i": 1}'
    assert parse(call("get"))[0].calls[0].arguments == "{}"


def test_two_calls_and_no_content_between():
    answer, parts = parse("Let me look.\n\n" + call("get", s="a") + "\n" + call("other", q="b") + "\n")
    assert answer.content == "Let me look."
    assert [(c.name, c.arguments) for c in answer.calls] == [("get", '{"s": "a"}'), ("other", '{"q": "b"}')]
    assert [p.index for p in parts if isinstance(p, CallStart)] == [0, 1]


def test_function_without_wrapper_and_text_after():
    answer, _ = parse("<function=get>\n<parameter=s>\na\n</parameter>\n</function>\nDone. \n")
    assert [c.arguments for c in answer.calls] == ['{"s": "a"}'] and answer.content == "Done. \n"


def test_missing_closing_tags():
    text = "<tool_call>\n<function=get>\n<parameter=s>\na\n<parameter=i>\n3\n</function>\n</tool_call>"
    assert arguments(text) == [{"s": "a", "i": 3}]
    text = "<tool_call>\n<function=get>\n<parameter=s>\na\n</tool_call>\n<tool_call>\n<function=get>\n</tool_call>"
    assert arguments(text) == [{"s": "a"}, {}]


@pytest.mark.parametrize(
    "text",
    [
        "<tool_call>\nnot a call\n</tool_call>",
        "<tool_call>\n<function=>\n</tool_call>",
        "<tool_call>",
        "<tool_call>\n<func",
        "<tool_call>\n<function=get",
        'Hello\n<tool_call>\n{"name": "get"}\n</tool_call> and more',
        "a <function and > b <tool",
        "  \n x ",
        "\n\n",
    ],
)
def test_what_is_no_call_is_content(text):
    answer, _ = parse(text)
    assert answer.content == text and not answer.calls


def test_structural_tags_inside_a_value_are_text():
    assert arguments(call("get", s="say <tool_call> and </think> and <think>")) == [
        {"s": "say <tool_call> and </think> and <think>"}
    ]


def test_string_values_stream_and_others_wait():
    parser = ToolParser(TOOLS)
    sent = [part.text for piece in pieces("<function=get><parameter=s>\nabc") for part in parser.push(piece)[1:]]
    assert "".join(sent) == '{"s": "abc'
    parser = ToolParser(TOOLS)
    assert parser.push(pieces("<function=get><parameter=i>\n12")[0])[1:] == []


EXAMPLES = [
    "Hi\n\n" + call("get", s='q"\\\n\nx', i="5", o='{"x": 1}') + "\n" + call("get", u="z") + "\nbye ",
    "<tool_call>\n<function=get>\n<parameter=s>\na\n<parameter=i>\n3\n</function>\n</tool_call>\n<function=b>",
    "<tool_call>\nno\n</tool_call>" + call("get", s="<parameter <para </functio") + " </tool_call> x",
    "a </think> b\n" + call("ž", s="ü\n") + "\n\n",
]


@pytest.mark.parametrize("text", EXAMPLES)
def test_truncation_anywhere_leaves_valid_json(text):
    for n in range(len(text)):
        answer, _ = parse(text[:n])
        for c in answer.calls:
            assert isinstance(json.loads(c.arguments), dict)


@given(st.sampled_from(EXAMPLES), st.integers(0, 400), st.lists(st.integers(1, 400), max_size=60))
@settings(max_examples=400, deadline=None)
def test_any_cut_gives_the_same(text, end, cuts):
    text = text[: max(len(text) - end, 0)] if end < 200 else text
    assert parse(text, cuts)[0] == parse(text)[0] == parse(text, list(range(len(text))))[0]


SOUP = [*"<>/=a \n", "<tool_call>", "</tool_call>", "<function=", "</function>"]
SOUP += ["<parameter=", "</parameter>", "</think>", "s>"]


@given(st.lists(st.sampled_from(SOUP), max_size=40).map("".join), st.lists(st.integers(1, 300), max_size=40))
@settings(max_examples=600, deadline=None)
def test_any_soup_any_cut(text, cuts):
    whole = parse(text)[0]
    assert parse(text, cuts)[0] == whole == parse(text, list(range(len(text))))[0]
    assert all(isinstance(json.loads(c.arguments), dict) for c in whole.calls)
