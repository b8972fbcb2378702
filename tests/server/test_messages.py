"""The rules of `server/messages.py`, and the templates they make acceptable."""

from __future__ import annotations

import pytest

from soloist import demo
from soloist.errors import RequestError
from soloist.server.messages import normalise, parse_arguments
from soloist.server.template import ChatTemplate

USER = {"role": "user", "content": "u"}

# What the family's newer template insists on, in its own words.
STRICT = """
{%- for m in messages -%}
{%- if m.role == 'system' -%}{%- if not loop.first -%}{{ raise_exception('System message must be at the beginning.') }}
{%- endif -%}{{ '[S:' + m.content + ']' }}
{%- elif m.role == 'user' -%}{{ '[U:' + m.content + ']' }}
{%- elif m.role == 'assistant' -%}{{ '[A:' + (m.reasoning_content or '') + '|' + m.content }}
{%- for c in m.tool_calls or [] -%}{%- for k, v in c.function.arguments | items -%}{{ '{' ~ k ~ '=' ~ v ~ '}' }}
{%- endfor -%}{%- endfor -%}{{ ']' }}
{%- elif m.role == 'tool' -%}{{ '[T:' + m.content + ']' }}
{%- else -%}{{ raise_exception('Unexpected message role.') }}{%- endif -%}
{%- endfor -%}
{%- if not messages | selectattr('role', 'equalto', 'user') | list -%}
{{ raise_exception('No user query.') }}{%- endif -%}
"""


def rendered(messages):
    return ChatTemplate(STRICT).render(normalise(messages), {})


def system(text):
    return {"role": "system", "content": text}


@pytest.mark.parametrize(
    ("messages", "expected"),
    [
        ([system("a"), system("b"), USER], "[S:a\n\nb][U:u]"),
        ([{"role": "developer", "content": "a"}, USER], "[S:a][U:u]"),
        ([system("a"), USER, system("b"), USER], "[S:a][U:u\n\n<system-reminder>\nb\n</system-reminder>][U:u]"),
        ([USER, {"role": "developer", "content": "b"}], "[U:u\n\n<system-reminder>\nb\n</system-reminder>]"),
        ([system("only")], "[S:only][U:]"),
        ([system(""), USER], "[S:][U:u]"),
        ([{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}], "[U:ab]"),
        ([USER, {"role": "assistant", "content": None, "reasoning": "r"}], "[U:u][A:r|]"),
        ([USER, {"role": "assistant", "content": "c", "reasoning_content": "r"}], "[U:u][A:r|c]"),
        ([USER, {"role": "function", "name": "f", "content": "x"}], "[U:u][T:x]"),
        (
            [USER, {"role": "assistant", "function_call": {"name": "f", "arguments": '{"a": 1}'}}],
            "[U:u][A:|{a=1}]",
        ),
        (
            [USER, {"role": "assistant", "content": "x"}, system("late"), USER],
            "[U:u][A:|x][U:<system-reminder>\nlate\n</system-reminder>][U:u]",
        ),
    ],
)
def test_what_clients_send_and_templates_see(messages, expected):
    assert rendered(messages) == expected


def test_a_late_system_message_moves_nothing_before_it():
    history = [system("a"), USER, {"role": "assistant", "content": "x"}, {"role": "tool", "content": "t"}]
    before = rendered(history)
    after = rendered([*history, system("late")])
    assert after.startswith(before[:-1]) and "late" in after[len(before) - 1 :]


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ('{"a": 1}', {"a": 1}),
        ("", {}),
        ("  ", {}),
        (None, {}),
        ({"a": 1}, {"a": 1}),
        ("not json", {"arguments": "not json"}),
        ("[1]", {"arguments": [1]}),
        ("[" * 100_000, {"arguments": "[" * 100_000}),
    ],
    ids=range(8),
)
def test_arguments(given, expected):
    assert parse_arguments(given) == expected


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([], "messages"),
        (["x"], "messages.0"),
        ([{"role": "robot", "content": "x"}], "messages.0.role"),
        ([USER, {"role": "user", "content": 5}], "messages.1.content"),
        ([{"role": "user", "content": [{"type": "input_audio"}]}], "messages.0.content.0"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:"}}]}], "messages.0.content.0"),
        ([{"role": "assistant", "tool_calls": [{"function": {}}]}], "messages.0.tool_calls.0"),
    ],
)
def test_refusals_name_the_place(messages, param):
    with pytest.raises(RequestError) as caught:
        normalise(messages)
    assert caught.value.param == param


def test_a_template_that_raises_is_the_requests_fault():
    with pytest.raises(RequestError, match=r"No user query") as caught:
        ChatTemplate(STRICT).render([system("a")], {})
    assert caught.value.param == "messages" and caught.value.status == 400


def test_the_sandbox_holds():
    for source in ("{{ ''.__class__.__mro__ }}", "{{ messages.append(1) }}", "{{ messages.__init__.__globals__ }}"):
        with pytest.raises(RequestError):
            ChatTemplate(source + "{{ raise_exception('nothing came of it') }}").render([USER], {})


@pytest.mark.parametrize("thinking", [None, True, False])
@pytest.mark.parametrize("with_tools", [False, True])
def test_rendering_equals_transformers(thinking, with_tools):
    transformers = pytest.importorskip("transformers")
    reference = transformers.AutoTokenizer.from_pretrained(str(demo.path()))
    call = {"type": "function", "function": {"name": "f", "arguments": {"a": "é", "n": [1, 2]}}}
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "héllo"},
        {"role": "assistant", "content": "", "reasoning_content": "hm", "tool_calls": [call]},
        {"role": "tool", "content": "r"},
    ]
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}] if with_tools else None
    switch = {} if thinking is None else {"enable_thinking": thinking}
    expected = reference.apply_chat_template(
        messages, tools=tools, add_generation_prompt=True, tokenize=False, **switch
    )
    variables = {**switch, "tools": tools, "add_generation_prompt": True}
    assert ChatTemplate.load(demo.path()).render(normalise(messages), variables) == expected
