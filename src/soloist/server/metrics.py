"""Prometheus meters under vLLM's names, in a registry of their own; and the `metrics` object of a reply.

Counters grow when a request ends, from the engine's own `RequestStats`; gauges are read from the engine when
scraped.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, ProcessCollector, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric

from soloist.engine.request import FinishReason, RequestStats
from soloist.server.face import EngineFace

_SECONDS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640)
_STEP_SECONDS = (0.001, 0.002, 0.005, 0.01, 0.015, 0.02, 0.025, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1, 2.5, 5)
_TOKENS = tuple(n * 10**e for e in range(6) for n in (1, 2, 5))


class _EngineGauges:
    """Read at scrape time, so that they are never stale."""

    def __init__(self, engine: EngineFace, model: str) -> None:
        self._engine = engine
        self._model = model

    def collect(self) -> Iterator[Metric]:
        status = self._engine.status()
        pages = status.pages_used / status.pages_total if status.pages_total else 0.0
        for name, text, value in (
            ("vllm:num_requests_running", "Requests in the batch.", status.running),
            ("vllm:num_requests_waiting", "Requests in the queue.", status.waiting),
            ("vllm:kv_cache_usage_perc", "Share of the page pool in use, 0 to 1.", pages),
            ("soloist:requests_parked", "Requests moved to host memory.", status.parked),
            ("soloist:turns_settling", "Finished turns still to be prefilled into the cache.", status.settling),
            ("soloist:slots_used", "Recurrent-state slots in use.", status.slots_used),
            ("soloist:slots_total", "Recurrent-state slots.", status.slots_total),
            ("soloist:pages_used", "Pages in use.", status.pages_used),
            ("soloist:pages_total", "Pages of the pool.", status.pages_total),
            ("soloist:asleep", "1 while the card is given back.", int(status.wakefulness != "awake")),
            ("soloist:degraded_parts", "Parts that run slower or less exact than they could.", len(status.degraded)),
        ):
            gauge = GaugeMetricFamily(name, text, labels=["model_name"])
            gauge.add_metric([self._model], value)
            yield gauge
        engine = GaugeMetricFamily("soloist:engine", "The engine's own counters.", labels=["model_name", "counter"])
        for counter, value in sorted(status.counters.items()):
            engine.add_metric([self._model, counter], value)
        yield engine


class Meters:
    """All meters of one served model."""

    def __init__(self, engine: EngineFace, model: str) -> None:
        self.registry = CollectorRegistry()
        self.registry.register(_EngineGauges(engine, model))
        ProcessCollector(registry=self.registry)
        self._model = model

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(name, text, ["model_name", *labels], registry=self.registry)

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(name, text, ["model_name"], registry=self.registry, buckets=buckets)

        self.prompt = counter("vllm:prompt_tokens", "Prompt tokens processed.")
        self.generated = counter("vllm:generation_tokens", "Tokens generated.")
        self.cached = counter("vllm:prompt_tokens_cached", "Prompt tokens served from the prefix cache.")
        self.queries = counter("vllm:prefix_cache_queries", "Prompt tokens looked up in the prefix cache.")
        self.hits = counter("vllm:prefix_cache_hits", "Prompt tokens found in the prefix cache.")
        self.success = counter("vllm:request_success", "Requests that ended.", "finished_reason")
        self.preemptions = counter("vllm:num_preemptions", "Times a request was moved out of the batch.")
        self.drafts = counter("vllm:spec_decode_num_drafts", "Steps that verified drafts.")
        self.draft_tokens = counter("vllm:spec_decode_num_draft_tokens", "Draft tokens verified.")
        self.accepted = counter("vllm:spec_decode_num_accepted_tokens", "Draft tokens accepted.")
        self.per_position = counter(
            "vllm:spec_decode_num_accepted_tokens_per_pos", "Draft tokens accepted at a position.", "position"
        )
        self.per_source = counter("soloist:accepted_tokens", "Draft tokens accepted, by who proposed them.", "source")
        self.splice_hits = counter("soloist:splice_hits", "Prompts whose history kept its generated ids.")
        self.splice_misses = counter("soloist:splice_misses", "Prompts with a history that had to be encoded afresh.")
        self.ttft = histogram("vllm:time_to_first_token_seconds", "Arrival to first token.", _SECONDS)
        self.itl = histogram("vllm:inter_token_latency_seconds", "Between tokens.", _STEP_SECONDS)
        self.tpot = histogram("vllm:request_time_per_output_token_seconds", "Mean time per token.", _STEP_SECONDS)
        self.e2e = histogram("vllm:e2e_request_latency_seconds", "Arrival to end.", _SECONDS)
        self.queue = histogram("vllm:request_queue_time_seconds", "Arrival to scheduling.", _SECONDS)
        self.prefill = histogram("vllm:request_prefill_time_seconds", "Scheduling to first token.", _SECONDS)
        self.decode = histogram("vllm:request_decode_time_seconds", "First to last token.", _SECONDS)
        self.worst_gap = histogram("soloist:worst_gap_seconds", "Longest wait between two tokens.", _SECONDS)
        self.prompt_size = histogram("vllm:request_prompt_tokens", "Prompt length.", _TOKENS)
        self.answer_size = histogram("vllm:request_generation_tokens", "Answer length.", _TOKENS)

    def exposition(self) -> bytes:
        """Prometheus text format."""
        return generate_latest(self.registry)

    def record(self, stats: RequestStats, reason: FinishReason) -> None:
        """Book one ended sequence."""
        m = self._model
        self.success.labels(m, reason).inc()
        for meter, value in (
            (self.prompt, stats.prompt_tokens),
            (self.generated, stats.output_tokens),
            (self.cached, stats.cached_tokens),
            (self.queries, stats.prompt_tokens),
            (self.hits, stats.cached_tokens),
            (self.preemptions, stats.parked),
            (self.drafts, stats.draft_steps),
            (self.draft_tokens, stats.drafted),
            (self.accepted, stats.accepted),
        ):
            meter.labels(m).inc(value)
        for position in range(1, len(stats.accepted_histogram)):
            self.per_position.labels(m, str(position - 1)).inc(sum(stats.accepted_histogram[position:]))
        for source, count in stats.accepted_by_source.items():
            self.per_source.labels(m, source).inc(count)
        self.prompt_size.labels(m).observe(stats.prompt_tokens)
        self.answer_size.labels(m).observe(stats.output_tokens)
        if stats.scheduled:
            self.queue.labels(m).observe(stats.scheduled - stats.arrived)
        if stats.first_token:
            decode = stats.last_token - stats.first_token
            self.ttft.labels(m).observe(stats.first_token - stats.arrived)
            self.prefill.labels(m).observe(stats.first_token - stats.scheduled)
            self.decode.labels(m).observe(decode)
            self.worst_gap.labels(m).observe(stats.worst_gap)
            if stats.output_tokens > 1:
                mean = decode / (stats.output_tokens - 1)
                self.tpot.labels(m).observe(mean)
        self.e2e.labels(m).observe((stats.finished or time.perf_counter()) - stats.arrived)

    def splice(self, hit: bool) -> None:
        """Book a prompt with earlier answers in it: did it begin with a remembered transcript?"""
        (self.splice_hits if hit else self.splice_misses).labels(self._model).inc()

    def record_gap(self, seconds: float, tokens: int) -> None:
        """Book the wait before a step's tokens; a step of several tokens shares it among them."""
        for _ in range(tokens):
            self.itl.labels(self._model).observe(seconds / tokens)


def reply_metrics(stats: RequestStats | None) -> dict[str, Any] | None:
    """The `metrics` object of a reply; times in ms. None before the first token."""
    if stats is None or not stats.first_token:
        return None
    generation = 1000 * (stats.last_token - stats.first_token)
    total = stats.last_token - stats.scheduled
    return {
        "time_to_first_token_ms": 1000 * (stats.first_token - stats.scheduled),
        "generation_time_ms": generation,
        "queue_time_ms": 1000 * (stats.scheduled - stats.arrived),
        "mean_itl_ms": generation / (stats.output_tokens - 1) if stats.output_tokens > 1 else None,
        "tokens_per_second": stats.output_tokens / total if total > 0 else None,
        "speculative_decoding": _speculation(stats),
    }


def _speculation(stats: RequestStats) -> dict[str, Any] | None:
    if not stats.draft_steps:
        return None
    return {
        "mean_acceptance_length": 1 + stats.accepted / stats.draft_steps,
        "draft_acceptance_rate": stats.accepted / stats.drafted if stats.drafted else 0.0,
        "acceptance_histogram": list(stats.accepted_histogram),
        "num_spec_steps": stats.draft_steps,
        "num_accepted_draft_tokens": stats.accepted,
        "num_draft_tokens": stats.drafted,
        "num_spec_tokens": max(len(stats.accepted_histogram) - 1, 0),
        "accepted_by_source": dict(stats.accepted_by_source),
    }
