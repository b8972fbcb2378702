"""The conversation, its commands, and the status line."""

from __future__ import annotations

import pytest

from soloist.chat import slash
from soloist.chat.client import Answer
from soloist.chat.session import OPTIONS, Session
from soloist.chat.status import status_line
from soloist.errors import UserError


def test_turns_alternate_whatever_happens() -> None:
    session = Session(system="Be brief.")
    session.ask("one")
    session.answered("")
    session.ask("two")
    session.answered("half an ans", "thought")
    session.ask("three")
    assert session.messages() == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "two"},
        {"role": "assistant", "content": "half an ans", "reasoning": "thought"},
        {"role": "user", "content": "three"},
    ]


def test_retry_drops_the_answer_and_keeps_the_question() -> None:
    session = Session()
    with pytest.raises(UserError):
        session.retry()
    session.ask("one")
    session.retry()
    assert session.unanswered and len(session.turns) == 1
    session.answered("first try")
    assert slash.apply("/retry", session).action == "answer"
    assert session.messages() == [{"role": "user", "content": "one"}]


def test_reset_keeps_system_and_options() -> None:
    session = Session(system="x")
    session.set("temperature", "0.5")
    session.ask("one")
    slash.apply("/reset", session)
    assert session.messages() == [{"role": "system", "content": "x"}]
    assert session.request_options() == {"temperature": 0.5}


def test_options_become_request_fields() -> None:
    session = Session()
    for line in ("/set temperature 0.25", "/set top_k 20", "/set seed 7", "/set thinking off"):
        slash.apply(line, session)
    assert session.request_options() == {
        "temperature": 0.25,
        "top_k": 20,
        "seed": 7,
        "chat_template_kwargs": {"enable_thinking": False},
    }
    slash.apply("/set seed", session)
    slash.apply("/set top_k default", session)
    assert session.request_options() == {"temperature": 0.25, "chat_template_kwargs": {"enable_thinking": False}}


@pytest.mark.parametrize(
    "line", ["/set heat 1", "/set top_k 1.5", "/set temperature warm", "/set thinking maybe", "/x"]
)
def test_nonsense_is_refused_and_changes_nothing(line: str) -> None:
    session = Session()
    with pytest.raises(UserError):
        slash.apply(line, session)
    assert session == Session()


def test_help_names_every_option_and_show_the_current_ones() -> None:
    assert all(name in slash.HELP for name in OPTIONS)
    session = Session()
    slash.apply("/system You are a bird.", session)
    slash.apply("/set thinking on", session)
    said = slash.apply("/show", session).say
    assert "You are a bird." in said and "thinking on" in said and "turns: 0" in said
    slash.apply("/system", session)
    assert session.system == ""


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("/help", True),
        ("/set a b", True),
        ("/etc/hosts is a file", False),
        ("/", False),
        ("a /help", False),
        ("", False),
    ],
)
def test_what_counts_as_a_command(text: str, expected: bool) -> None:
    assert slash.is_command(text) is expected


def test_quit() -> None:
    assert slash.apply("/quit", Session()).action == "quit"


def test_status_of_a_complete_answer() -> None:
    answer = Answer(
        finish_reason="stop",
        usage={"prompt_tokens": 40, "completion_tokens": 12, "prompt_tokens_details": {"cached_tokens": 32}},
        metrics={
            "mean_itl_ms": 5.0,
            "speculative_decoding": {"mean_acceptance_length": 3.25, "draft_acceptance_rate": 0.5},
        },
        asked=10.0,
        first=10.042,
        ended=11.0,
    )
    expected = "12 tokens · 200 tok/s · TTFT 42 ms · 3.25 tokens/step · 50% accepted · 32/40 cached"
    assert status_line(answer) == expected


def test_status_without_metrics_measures_the_rate_itself() -> None:
    answer = Answer(finish_reason="length", usage={"completion_tokens": 12}, asked=10.0, first=11.5, ended=13.5)
    assert status_line(answer) == "12 tokens · 5.5 tok/s · TTFT 1.5 s · cut at the length limit"


def test_status_of_a_stopped_answer() -> None:
    assert status_line(Answer(asked=10.0, first=10.1, ended=12.0)) == "TTFT 100 ms · stopped after 2.0 s"
