"""What dashboards and supervisors read: metrics, the status page, the metrics object, the log row."""

from __future__ import annotations

import logging
import time

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

CHAT = {"messages": [{"role": "user", "content": "x"}], "enable_thinking": False}
NAMES = """vllm:num_requests_running vllm:num_requests_waiting vllm:kv_cache_usage_perc vllm:prompt_tokens_total
 vllm:generation_tokens_total vllm:prompt_tokens_cached_total vllm:prefix_cache_queries_total
 vllm:prefix_cache_hits_total vllm:request_success_total vllm:num_preemptions_total vllm:spec_decode_num_drafts_total
 vllm:spec_decode_num_draft_tokens_total vllm:spec_decode_num_accepted_tokens_total
 vllm:spec_decode_num_accepted_tokens_per_pos_total vllm:time_to_first_token_seconds_count
 vllm:inter_token_latency_seconds_count vllm:request_time_per_output_token_seconds_count
 vllm:e2e_request_latency_seconds_count vllm:request_queue_time_seconds_count vllm:request_prefill_time_seconds_count
 vllm:request_decode_time_seconds_count vllm:request_prompt_tokens_count vllm:request_generation_tokens_count"""


def scrape(live):
    text = httpx.get(live.url + "/metrics").text
    return {
        (s.name, s.labels.get("finished_reason") or s.labels.get("position")): s.value
        for family in text_string_to_metric_families(text)
        for s in family.samples
    }


def test_prometheus_names_and_sums(say):
    live = say("one two three four five six seven", block=4)
    for _ in range(3):
        reply = httpx.post(live.url + "/v1/chat/completions", json=CHAT).json()
    values = scrape(live)
    assert set(NAMES.split()) <= {name for name, _ in values}
    tokens = reply["usage"]["completion_tokens"]
    assert values["vllm:generation_tokens_total", None] == 3 * tokens
    assert values["vllm:request_success_total", "stop"] == 3
    spec = reply["metrics"]["speculative_decoding"]
    assert values["vllm:spec_decode_num_drafts_total", None] == 3 * spec["num_spec_steps"]
    accepted = values["vllm:spec_decode_num_accepted_tokens_total", None]
    assert accepted == 3 * spec["num_accepted_draft_tokens"]
    per_position = [v for (n, p), v in values.items() if n == "vllm:spec_decode_num_accepted_tokens_per_pos_total"]
    assert sum(per_position) == accepted and per_position == sorted(per_position, reverse=True)
    assert tokens == spec["num_spec_steps"] + spec["num_accepted_draft_tokens"], "mean tokens a step = 1 + a / n"


def test_a_cancelled_request_is_counted_too(say):
    live = say(" word" * 500, engine={"delay_s": 0.01})
    with httpx.stream("POST", live.url + "/v1/chat/completions", json={**CHAT, "stream": True}) as reply:
        next(reply.iter_lines())
    deadline = time.monotonic() + 2
    while ("vllm:request_success_total", "abort") not in scrape(live) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert scrape(live)["vllm:request_success_total", "abort"] == 1


def test_llama_swap_finds_its_numbers(say):
    live = say("one two three four five", block=2, engine={"delay_s": 0.01}, force_usage=True)
    whole = httpx.post(live.url + "/v1/chat/completions", json=CHAT).json()
    stream = httpx.post(live.url + "/v1/chat/completions", json={**CHAT, "stream": True}).text
    assert '"usage":{"prompt_tokens"' in stream and '"num_accepted_draft_tokens"' in stream
    metrics, usage = whole["metrics"], whole["usage"]
    assert metrics["time_to_first_token_ms"] > 0 and metrics["mean_itl_ms"] > 0
    assert usage["prompt_tokens_details"]["cached_tokens"] == 0 and "timings" not in whole
    assert {"num_draft_tokens", "num_accepted_draft_tokens"} <= set(metrics["speculative_decoding"])


def test_metrics_can_be_switched_off(say):
    reply = httpx.post(say("x", request_metrics=False).url + "/v1/chat/completions", json=CHAT).json()
    assert reply["metrics"] is None


def test_one_log_row_per_request(say, caplog):
    live = say("one two three", block=2)
    with caplog.at_level(logging.INFO, "soloist.requests"):
        httpx.post(live.url + "/v1/chat/completions", json={**CHAT, "n": 3, "temperature": 1})
        httpx.post(live.url + "/v1/completions", json={"prompt": "a"})
    rows = [r.getMessage() for r in caplog.records if r.name == "soloist.requests"]
    assert len(rows) == 2 and rows[0].startswith("chat chatcmpl-") and "finish=stop" in rows[0]
    assert "tokens/step=" in rows[1]


def test_status_page_and_its_data(say):
    live = say(" word" * 300, block=3, engine={"delay_s": 0.01})
    page = httpx.get(live.url + "/")
    assert page.headers["content-type"].startswith("text/html") and "http" not in page.text.replace("http-equiv", "")
    with httpx.stream("POST", live.url + "/v1/chat/completions", json={**CHAT, "stream": True}) as reply:
        lines = reply.iter_lines()
        for _ in range(8):
            next(lines)
        status = httpx.get(live.url + "/status").json()
    (stream,) = status["streams"]
    assert stream["endpoint"] == "chat" and stream["generated"] > 0 and stream["per_step"] == 3.0
    assert status["running"] == 1 and status["generated"] == stream["generated"] and status["trouble"] is None
    deadline = time.monotonic() + 2
    while (after := httpx.get(live.url + "/status").json())["streams"] and time.monotonic() < deadline:
        time.sleep(0.01)
    assert after["streams"] == [] and after["generated"] >= stream["generated"] and after["steps"] > 0


@pytest.mark.parametrize("fields", [("reasoning",), ("reasoning_content",), ("reasoning", "reasoning_content")])
def test_names_of_the_reasoning_fields(say, fields):
    live = say("hm</think>ok", reasoning_fields=fields)
    message = httpx.post(live.url + "/v1/chat/completions", json={"messages": CHAT["messages"]}).json()["choices"][0]
    assert {k for k in message["message"] if k.startswith("reasoning")} == set(fields)
