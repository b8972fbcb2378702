"""What reaches the terminal, and how lines become messages."""

from __future__ import annotations

import io
from collections.abc import Callable

import pytest

from soloist.chat.terminal import Screen, printable, read_message


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def typed(*lines: str) -> Callable[[str], str]:
    rest = iter(lines)

    def ask(prompt: str) -> str:
        try:
            return next(rest)
        except StopIteration:
            raise EOFError from None

    return ask


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (["hello"], "hello"),
        (["one \\", "two"], "one \ntwo"),
        (['"""', "a", "", "b", '"""'], "a\n\nb"),
        (['"""a', 'b"""'], "a\nb"),
        (['"""short"""'], "short"),
        ([""], ""),
    ],
)
def test_messages_of_one_and_several_lines(lines: list[str], message: str) -> None:
    assert read_message(typed(*lines), "> ", ". ") == message


def test_the_end_of_input_inside_a_block_is_the_end_of_input() -> None:
    with pytest.raises(EOFError):
        read_message(typed('"""', "a"), "> ", ". ")


def test_escape_sequences_of_a_model_do_not_reach_the_terminal() -> None:
    assert printable("\x1b]0;title\x07a\tb\n\x9b2Jc\r\x00é✓") == "]0;titlea\tb\n2Jcé✓"


def test_styles_only_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    terminal, file = Terminal(), io.StringIO()
    for stream in (terminal, file):
        Screen(stream).write("dim", "2")
    assert terminal.getvalue() == "\x1b[2mdim\x1b[0m" and file.getvalue() == "dim"
    monkeypatch.setenv("NO_COLOR", "1")
    plain = Terminal()
    Screen(plain).write("dim", "2")
    assert plain.getvalue() == "dim"


def test_a_line_starts_on_a_fresh_line() -> None:
    stream = io.StringIO()
    screen = Screen(stream)
    screen.line("a")
    screen.write("b")
    screen.line("c")
    screen.end_line()
    assert stream.getvalue() == "a\nb\nc\n"
