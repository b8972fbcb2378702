"""The chat's HTTP client against a scripted server."""

from __future__ import annotations

import http.server
import json
import threading
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from soloist.chat.client import Answer, Client, Piece
from soloist.chat.sse import payloads
from soloist.errors import SoloistError, UserError

HELLO = [{"role": "user", "content": "hello"}]


def ask(url: str, **options: Any) -> tuple[list[Piece], Answer]:
    client, answer = Client(url), Answer()
    try:
        return list(client.stream("fake", HELLO, options, answer)), answer
    finally:
        client.close()


def event(**choice: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, "finish_reason": None, **choice}]}


def test_an_answer_streams_with_usage_and_metrics(server) -> None:
    pieces, answer = ask(server.url, temperature=0.5)
    assert [p.text for p in pieces] == ["You said hello", "."]
    assert answer.content == "You said hello." and answer.finish_reason == "stop"
    assert answer.usage["completion_tokens"] == 12 and answer.metrics["mean_itl_ms"] == 5.0
    assert answer.asked < answer.first <= answer.ended
    (body,) = server.requests
    assert body["stream"] is True and body["stream_options"] == {"include_usage": True}
    assert body["temperature"] == 0.5 and body["messages"] == HELLO and body["model"] == "fake"


def test_reasoning_under_both_names_counts_once(server) -> None:
    def script(body, emit) -> None:
        emit(event(delta={"reasoning": "hm", "reasoning_content": "hm"}))
        emit(event(delta={"reasoning_content": "!"}))
        emit(event(delta={"content": "yes"}, finish_reason="stop"))
        emit("data: [DONE]\n\n")

    server.script = script
    pieces, answer = ask(server.url)
    assert pieces == [Piece("reasoning", "hm"), Piece("reasoning", "!"), Piece("content", "yes")]
    assert (answer.reasoning, answer.content) == ("hm!", "yes")


def test_the_key_is_sent(server) -> None:
    client = Client(server.url + "/v1/", "hush")
    assert client.served().name == "fake" and client.served().max_len == 4096
    client.close()
    assert server.headers[0]["Authorization"] == "Bearer hush"


@pytest.mark.parametrize(
    ("status", "body", "kind", "words"),
    [
        (400, {"error": {"message": "temperature must be at least 0."}}, UserError, "temperature must be"),
        (401, {"error": "Unauthorized"}, UserError, "API_KEY"),
        (500, {"error": {"message": "engine stopped"}}, SoloistError, "engine stopped"),
        (502, b"<html>bad gateway</html>", SoloistError, "bad gateway"),
    ],
)
def test_refusals_carry_the_servers_words(server, status: int, body: Any, kind: type, words: str) -> None:
    server.refusal = (status, body if isinstance(body, bytes) else json.dumps(body).encode())
    with pytest.raises(kind, match=words):
        ask(server.url)


def test_an_error_event_ends_the_answer(server) -> None:
    def script(body, emit) -> None:
        emit(event(delta={"content": "half"}))
        emit({"error": {"message": "a NaN in layer 3", "code": 500}})
        emit("data: [DONE]\n\n")

    server.script = script
    client, answer = Client(server.url), Answer()
    with pytest.raises(SoloistError, match="a NaN in layer 3"):
        list(client.stream("fake", HELLO, {}, answer))
    client.close()
    assert answer.content == "half"


def test_a_stream_that_just_ends_is_an_error(server) -> None:
    server.script = lambda body, emit: emit(event(delta={"content": "half"}))
    with pytest.raises(SoloistError, match="before the answer was complete"):
        ask(server.url)


def test_closing_the_iterator_disconnects(server, endless) -> None:
    server.script = endless
    client, answer = Client(server.url), Answer()
    pieces = client.stream("fake", HELLO, {}, answer)
    assert next(pieces).text == "It begins"
    pieces.close()
    assert server.disconnected.wait(5)
    assert answer.finish_reason is None and answer.ended > answer.asked
    client.close()


def test_nobody_there_and_somebody_else_there(server) -> None:
    client = Client("http://127.0.0.1:1")
    with pytest.raises(UserError, match="No server answers"):
        client.served()
    client.close()
    server.models = b"<html>a web page</html>"
    client = Client(server.url)
    with pytest.raises(UserError, match="not as an OpenAI-compatible server"):
        client.served()
    client.close()
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), http.server.BaseHTTPRequestHandler) as page:
        threading.Thread(target=page.serve_forever, daemon=True).start()
        client = Client(f"http://127.0.0.1:{page.server_port}")
        with pytest.raises(UserError, match="not as an OpenAI-compatible server") as refused:
            client.served()  # 501 and a page of HTML
        client.close()
        page.shutdown()
    assert "<" not in str(refused.value)


def test_events_are_framed_by_blank_lines() -> None:
    stream = b": ping\n\nevent: x\r\ndata: a\r\n\r\ndata:b\ndata: c\nid: 3\n\ndata: cut off"
    assert list(payloads([stream])) == ["a", "b\nc"]


@given(
    st.lists(st.text(st.characters(exclude_characters="\r\n", exclude_categories=["Cs"]), min_size=1)),
    st.integers(1, 9),
)
def test_payloads_come_back_however_the_stream_is_cut(texts: list[str], size: int) -> None:
    stream = "".join(f"data: {t}\n\n" for t in texts).encode()
    assert list(payloads(stream[i : i + size] for i in range(0, len(stream), size))) == texts


def test_line_separators_in_the_text_are_text(server) -> None:
    text = "a\u2028b\x85c\x0bd"

    def script(body, emit) -> None:
        chunk = json.dumps(event(delta={"content": text}, finish_reason="stop"), ensure_ascii=False)
        emit(f"data: {chunk}\n\n")
        emit("data: [DONE]\n\n")

    server.script = script
    assert ask(server.url)[1].content == text
