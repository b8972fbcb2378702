"""The client's clock and books against a server whose script is known."""

from __future__ import annotations

import asyncio

import pytest

from bench.fake_server import COPY, PER_STEP, FakeServer, Faults
from soloist.bench.client import Answer, Client, _take
from soloist.bench.measure import decode_rate, speculation_of
from soloist.errors import UserError


def ask(server: FakeServer, text: str, **fields):
    async def go():
        async with Client(server.url) as client:
            return await client.chat(text, **fields), client

    return asyncio.run(go())


def test_times_tokens_and_speculation_of_one_answer():
    text = "x" * 31
    with FakeServer(step_s=0.02, prefill_s=0.1) as server:
        answer, _ = ask(server, COPY + text, max_tokens=100)
    assert answer.text == text and answer.error is None and answer.finish_reason == "length"
    assert answer.completion_tokens == 31
    assert answer.ttft_ms is not None and answer.ttft_ms >= 100
    steps = 30 // PER_STEP
    assert len(answer.gaps_ms) == steps
    assert answer.tpot_ms == pytest.approx((answer.total_ms - answer.ttft_ms) / 30)
    assert steps * 20 <= answer.total_ms - answer.ttft_ms
    assert decode_rate(1, [answer]) == pytest.approx(1000 / answer.tpot_ms)
    spec = speculation_of([answer])
    assert spec is not None
    assert spec.tokens_per_step == pytest.approx(3.0) and spec.rows_per_step == pytest.approx(5.0)
    assert spec.per_position == (1.0, 1.0, 0.0, 0.0)


def test_the_role_chunk_is_not_the_first_token():
    with FakeServer(prefill_s=0.2) as server:
        answer, _ = ask(server, "hello", max_tokens=5)
    assert answer.ttft_ms is not None and answer.ttft_ms >= 200


def test_blank_reasoning_of_the_template_is_not_the_first_token():
    answer = Answer()
    assert not _take(answer, {"choices": [{"delta": {"reasoning_content": "\n\n"}}]})
    assert _take(answer, {"choices": [{"delta": {"content": "\n\n"}}]})
    answer.ttft_ms = 1.0
    assert _take(answer, {"choices": [{"delta": {"reasoning": "\n"}}]})
    assert answer.reasoning == "\n\n\n" and answer.text == "\n\n"


def test_what_is_not_reported_stays_absent():
    with FakeServer(faults=Faults(no_usage=True)) as server:
        answer, _ = ask(server, "hello", max_tokens=9)
    assert answer.completion_tokens is None and answer.tpot_ms is None and answer.cached_tokens is None
    assert speculation_of([answer]) is None and decode_rate(1, [answer]) is None


def test_a_refused_optional_field_is_left_out_and_remembered():
    with FakeServer(faults=Faults(refuse_fields=("ignore_eos", "top_k"))) as server:
        answer, client = ask(server, "hello", max_tokens=5, ignore_eos=True, top_k=3, temperature=0)
    assert answer.error is None and answer.text
    assert sorted(client.refused) == ["ignore_eos", "top_k"]
    assert "ignore_eos" not in server.bodies[-1] and server.bodies[-1]["temperature"] == 0


def test_a_refused_required_field_is_an_error_with_the_servers_words():
    with FakeServer(faults=Faults(refuse_fields=("temperature",))) as server:
        answer, _ = ask(server, "hello", temperature=0.5)
    assert answer.error is not None and "unknown field temperature" in answer.error


def test_a_stream_that_breaks_off_is_an_error():
    with FakeServer(faults=Faults(cut_after=3)) as server:
        answer, _ = ask(server, "hello", max_tokens=60)
    assert answer.error == "the stream ended without a finish_reason" and answer.text


def test_no_server_is_a_user_error_with_a_remedy():
    async def go():
        async with Client("http://127.0.0.1:9"):
            pass

    with pytest.raises(UserError, match="No OpenAI-compatible server answers") as caught:
        asyncio.run(go())
    assert "soloist serve" in caught.value.remedy
