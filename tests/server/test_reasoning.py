import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pieces import pieces
from soloist.server.parsers.reasoning import ReasoningSplitter, Thought


def split(text, opened=True, cuts=None, **rules):
    splitter = ReasoningSplitter(opened, **rules)
    items = [item for piece in pieces(text, cuts) for item in splitter.push(piece)] + splitter.finish()
    thought = "".join(i.text for i in items if isinstance(i, Thought))
    return thought, "".join(i.text for i in items if not isinstance(i, Thought))


@pytest.mark.parametrize(
    ("text", "thought", "content"),
    [
        ("think\n</think>\n\nHi", "think", "Hi"),
        ("\n</think>\n\nHi", "", "Hi"),
        ("</think>Hi", "", "Hi"),
        ("a\n\nb", "a\n\nb", ""),
        ("a\n\n", "a\n\n", ""),
        ("<think>\na</think>b", "a", "b"),
        ("a\n\n<tool_call>\nx", "a", "<tool_call>\nx"),
        ("a</think>\n\n\nb\n\nc\n", "a", "b\n\nc\n"),
    ],
)
def test_opened(text, thought, content):
    assert split(text) == (thought, content)


def test_closed_prompt_is_all_content():
    assert split("\n\nHi", opened=False) == ("", "\n\nHi")
    assert split("<think>\nx\n</think>\n\ny", opened=False) == ("x", "y")
    assert split("<think>\nx\n</think>\n\ny", opened=False, reopen=False)[0] == ""


def test_a_call_inside_the_block_needs_tools():
    assert split("a<tool_call>b", call_ends=False) == ("a<tool_call>b", "")


SOUP = ["a", "b ", "\n", "\n\n", "<think>", "</think>", "<tool_call>", "</tool_call>"]


@given(
    st.lists(st.sampled_from(SOUP), max_size=20).map("".join),
    st.booleans(),
    st.booleans(),
    st.lists(st.integers(1, 100), max_size=30),
)
@settings(max_examples=500, deadline=None)
def test_any_cut_gives_the_same(text, opened, reopen, cuts):
    whole = split(text, opened, reopen=reopen)
    assert split(text, opened, cuts, reopen=reopen) == whole == split(text, opened, list(range(99)), reopen=reopen)
