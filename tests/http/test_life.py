"""What happens when clients leave, engines die, queues fill and nothing comes for a while."""

from __future__ import annotations

import socket
import time

import anthropic
import httpx
import openai
import pytest

from http_life import leave, post_raw, wait_for

BODIES = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "x"}]},
    "/v1/completions": {"prompt": "x", "max_tokens": 4000},
    "/v1/messages": {"messages": [{"role": "user", "content": "x"}], "max_tokens": 4000},
    "/v1/responses": {"input": "x"},
}
LONG = " word" * 3000


@pytest.mark.parametrize("how", ["close", "half", "reset"])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_a_client_that_leaves_frees_its_slot(say, how, stream, phase):
    slow = {"prefill_s": 60.0} if phase == "prefill" else {"delay_s": 0.01}
    live = say(LONG, engine={**slow, "max_running": 8})
    for path, body in BODIES.items():
        sock = post_raw(live, path, {**body, "stream": stream})
        assert wait_for(lambda: live.engine.status().running == 1), path
        if phase == "decode" and stream:
            sock.recv(100)
        leave(sock, how)
        assert wait_for(lambda: live.engine.status().running == 0, 1.0), f"{path} kept its slot"
        sock.close()


def test_a_waiting_client_that_leaves_is_dropped(say):
    live = say(LONG, engine={"delay_s": 0.01, "max_running": 1})
    first = post_raw(live, "/v1/chat/completions", BODIES["/v1/chat/completions"])
    assert wait_for(lambda: live.engine.status().running == 1)
    second = post_raw(live, "/v1/chat/completions", BODIES["/v1/chat/completions"])
    assert wait_for(lambda: live.engine.status().waiting == 1)
    second.close()
    assert wait_for(lambda: live.engine.status().waiting == 0, 1.0)
    first.close()


@pytest.mark.parametrize("rest", [b"{", b""], ids=["in the body", "before the body"])
def test_a_client_that_leaves_while_it_sends_is_no_fault(say, caplog, rest):
    """Half a body and gone: nothing to answer, nothing for the log to shout about."""
    live = say("x")
    host, port = live.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as sock:
        head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Length: 500\r\n\r\n"
        sock.sendall(head.encode() + rest)
        time.sleep(0.2)
    assert httpx.post(live.url + "/v1/completions", json={"prompt": "x", "max_tokens": 1}).status_code == 200
    time.sleep(0.2)
    assert not [record for record in caplog.records if record.levelname in ("ERROR", "CRITICAL")]


def test_many_abrupt_disconnects_leak_nothing(say):
    live = say(LONG, block=(1, 16), engine={"delay_s": 0.001, "max_waiting": 10_000, "max_running": 16})
    for i in range(250):
        path = list(BODIES)[i % 4]
        sock = post_raw(live, path, {**BODIES[path], "stream": i % 3 != 0})
        if i % 2:
            sock.recv(10) if i % 3 else time.sleep(0.001)
        leave(sock, ("close", "half", "reset")[i % 3])
        sock.close()
    assert wait_for(lambda: live.engine.status().running + live.engine.status().waiting == 0, 5.0)
    assert not live.service.responses.running
    assert httpx.post(live.url + "/v1/completions", json={"prompt": "x", "max_tokens": 1}).status_code == 200


@pytest.mark.parametrize("path", BODIES)
def test_headers_at_once_and_pings_by_the_clock(say, path):
    """The prompt is held until five pings have come, so the headers cannot have waited for it."""
    live = say("hello", engine={"prefill_s": 600.0}, keepalive_s=0.1)
    ping = "event: ping" if path == "/v1/messages" else ": ping"
    began, pings, text = time.monotonic(), 0, ""
    with httpx.stream("POST", live.url + path, json={**BODIES[path], "stream": True}) as reply:
        assert reply.headers["content-type"].startswith("text/event-stream")
        for line in reply.iter_lines():
            text += line
            pings += line == ping
            if pings == 5 and live.engine.prefill_s:
                assert "hello" not in text and time.monotonic() - began > 0.4
                live.engine.prefill_s = 0.0
    assert pings >= 5 and "hello" in text


def test_sdks_read_past_the_pings(say):
    live = say("hello", engine={"prefill_s": 0.4}, keepalive_s=0.05)
    client = openai.OpenAI(base_url=live.url + "/v1", api_key="x", max_retries=0)
    chunks = client.chat.completions.create(
        model="demo",
        messages=BODIES["/v1/messages"]["messages"],
        stream=True,
        extra_body={"enable_thinking": False},
    )
    assert "".join(c.choices[0].delta.content or "" for c in chunks) == "hello"
    events = client.responses.create(model="demo", input="x", stream=True, reasoning={"effort": "none"})
    assert list(events)[-1].response.output_text == "hello"
    claude = anthropic.Anthropic(base_url=live.url, api_key="x", max_retries=0)
    with claude.messages.stream(model="demo", max_tokens=9, messages=BODIES["/v1/messages"]["messages"]) as stream:
        assert stream.get_final_text() == "hello"


def test_hidden_thinking_is_not_silence(say):
    live = say(" hm" * 40 + "</think>done", engine={"delay_s": 0.02}, keepalive_s=0.1)
    body = {**BODIES["/v1/chat/completions"], "stream": True, "include_reasoning": False}
    with httpx.stream("POST", live.url + "/v1/chat/completions", json=body) as reply:
        text = reply.read().decode()
    assert text.count(": ping") >= 3 and "hm" not in text and '"content":"done"' in text


@pytest.mark.parametrize("path", BODIES)
def test_an_engine_that_dies_ends_every_stream_with_an_error(say, path):
    live = say(LONG, engine={"delay_s": 0.005})
    with httpx.stream("POST", live.url + path, json={**BODIES[path], "stream": True}) as reply:
        lines = reply.iter_lines()
        next(lines)
        live.engine.kill()
        rest = list(lines)
    text = "\n".join(rest)
    assert "engine has stopped" in text
    if path in ("/v1/chat/completions", "/v1/completions"):
        assert [line for line in rest if line][-1] == "data: [DONE]"
    assert httpx.get(live.url + "/health").status_code == 503
    ready = httpx.get(live.url + "/ready")
    assert ready.status_code == 503 and ready.json()["reason"] == "the engine has stopped"
    assert httpx.post(live.url + path, json=BODIES[path]).status_code == 500


def test_a_stuck_engine_is_not_healthy(say, monkeypatch):
    live = say("x", stuck_s=5.0)
    assert httpx.get(live.url + "/health").status_code == 200
    status = live.engine.status()
    monkeypatch.setattr(live.engine, "status", lambda: status.__class__(idle_s=6.0))
    assert httpx.get(live.url + "/health").status_code == 503
    assert "in one step" in httpx.get(live.url + "/ready").json()["reason"]


def test_a_fault_of_one_request_ends_that_request(say):
    live = say("one two three", engine={"delay_s": 0.01})
    live.engine.fail_with = ValueError("bad row")
    reply = httpx.post(live.url + "/v1/completions", json={"prompt": "x"})
    assert reply.status_code == 500 and reply.json()["error"]["type"] == "InternalServerError"
    assert httpx.post(live.url + "/v1/completions", json={"prompt": "x"}).status_code == 200


@pytest.mark.parametrize("path", BODIES)
def test_a_full_queue_is_503_with_retry_after(say, path):
    live = say(LONG, engine={"delay_s": 0.01, "max_running": 1, "max_waiting": 1})
    socks = [post_raw(live, "/v1/completions", BODIES["/v1/completions"])]
    assert wait_for(lambda: live.engine.status().running == 1)
    socks.append(post_raw(live, "/v1/completions", BODIES["/v1/completions"]))
    assert wait_for(lambda: live.engine.status().waiting == 1)
    for stream in (False, True):
        reply = httpx.post(live.url + path, json={**BODIES[path], "stream": stream})
        assert reply.status_code == 503 and int(reply.headers["retry-after"]) >= 1
        kind = reply.json()["error"]["type"]
        assert kind == ("overloaded_error" if path == "/v1/messages" else "ServiceUnavailableError")
    for sock in socks:
        sock.close()


def test_n_sequences_that_do_not_all_fit_leave_nothing_behind(say):
    live = say(LONG, engine={"delay_s": 0.02, "max_running": 1, "max_waiting": 2})
    body = {**BODIES["/v1/chat/completions"], "n": 8, "temperature": 1.0}
    assert httpx.post(live.url + "/v1/chat/completions", json=body).status_code == 503
    assert wait_for(lambda: live.engine.status().running + live.engine.status().waiting == 0)
