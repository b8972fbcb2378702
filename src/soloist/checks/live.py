"""A running server, looked at from outside (`soloist doctor --server`)."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

from soloist.bench.prometheus import Samples, parse_metrics
from soloist.checks.base import Subject, Verdict, check, fail, ok, verdict, warn

TIMEOUT_S = 5.0
LOW_ACCEPTANCE = 1.3  # tokens per step under which drafting hardly pays
FULL_POOL = 0.95
PARTS = ("device", "dtype", "linear", "graphs", "state_dtype", "kv_format", "spec")


def url(subject: Subject) -> str:
    """The server to look at: --url, or the one on HOST and PORT."""
    if subject.server_url:
        return subject.server_url.rstrip("/").removesuffix("/v1")
    return subject.settings.url


def fetch(subject: Subject, path: str) -> tuple[int, str]:
    """(status, text) of a GET; status 0 and the reason when nothing answers."""
    keys = subject.settings.api_key
    request = urllib.request.Request(
        url(subject) + path, headers={"Authorization": f"Bearer {keys[0]}"} if keys else {}
    )
    try:
        with urllib.request.urlopen(request, timeout=TIMEOUT_S) as reply:
            return reply.status, reply.read().decode("utf-8", "replace")
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode("utf-8", "replace")
    except (OSError, ValueError) as error:
        return 0, str(getattr(error, "reason", error))


def fetch_json(subject: Subject, path: str) -> dict[str, Any]:
    """The JSON object of a GET, whatever its status; empty when it is none."""
    try:
        found = json.loads(fetch(subject, path)[1])
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def scrape(subject: Subject) -> Samples | None:
    status, text = fetch(subject, "/metrics")
    return parse_metrics(text) if status == 200 else None


@check(
    "server",
    "Server answers",
    "`/health` is 200 while the engine lives and moves, `/ready` while it admits requests, also by waking up.",
    fine=ok("{url} is ready, version {version}"),
    asleep=ok("{url} is {state}: the next request, or `soloist wake`, takes the card again"),
    silent=fail("Nothing answers at {url} ({reason}).", "Start it with `soloist serve`, or give --url."),
    foreign=fail("What answers at {url} is not Soloist.", "Give the --url of a Soloist server."),
    not_ready=fail("{url} is not ready: {reason}.", "See its log; `systemctl --user restart soloist` starts it again."),
)
def server(subject: Subject) -> Iterator[Verdict]:
    status, text = fetch(subject, "/ready")
    if status == 0:
        yield verdict("silent", url=url(subject), reason=text)
        return
    ready = fetch_json(subject, "/ready")
    if "ready" not in ready:
        yield verdict("foreign", url=url(subject))
    elif not ready["ready"]:
        yield verdict("not_ready", url=url(subject), reason=ready.get("reason"))
    elif ready.get("state", "awake") != "awake":
        yield verdict("asleep", url=url(subject), state=ready["state"])
    else:
        yield verdict("fine", url=url(subject), version=fetch_json(subject, "/version").get("version", "?"))


@check(
    "server-key",
    "Key and model",
    "The configured API_KEY must open `/v1/models`.",
    fine=ok("serves {models} with a context of {context}"),
    refused=fail("The server refuses this key (401).", "Set API_KEY to the server's."),
    broken=fail("/v1/models answered {status}.", "See the server's log."),
)
def server_key(subject: Subject) -> Iterator[Verdict]:
    status, _ = fetch(subject, "/v1/models")
    if status == 401:
        yield verdict("refused")
        return
    listed = fetch_json(subject, "/v1/models").get("data") or []
    if status != 200 or not listed:
        yield verdict("broken", status=status)
        return
    names = ", ".join(m["id"] for m in listed)
    yield verdict("fine", models=names, context=listed[0].get("max_model_len"))


@check(
    "server-parts",
    "Parts in use",
    "What the running server could not have as fast or as exact as meant: a product whose rows are not independent, a "
    "kernel replaced by its reference, a contract that is off.",
    fine=ok("every part is as fast and as exact as meant ({knobs})"),
    degraded=warn("{sentence}", "See docs/performance.md; `soloist doctor --self-check` measures the contracts."),
)
def server_parts(subject: Subject) -> Iterator[Verdict]:
    ready = fetch_json(subject, "/ready")
    knobs = fetch_json(subject, "/props").get("knobs") or {}
    shown = ", ".join(f"{name} {knobs[name]}" for name in PARTS if name in knobs) or "it reports none"
    yield from [verdict("degraded", sentence=s) for s in ready.get("degraded") or []] or [verdict("fine", knobs=shown)]


@check(
    "server-pool",
    "Page pool",
    "Pages hold the keys and values of running requests and of the prefix cache. A full pool parks requests.",
    fine=ok("{used:.0f} of {total:.0f} pages in use, {running:.0f} running, {waiting:.0f} waiting"),
    full=warn(
        "{used:.0f} of {total:.0f} pages in use, {parked:.0f} requests parked.",
        "Lower MAX_LEN or MAX_SEQS, or use CTX=long.",
    ),
    asleep=ok("the pool is given back"),
    silent=warn("The server exports no page gauges.", "Update it, or look at /metrics yourself."),
)
def server_pool(subject: Subject) -> Iterator[Verdict]:
    samples = scrape(subject)
    used = samples.total("soloist:pages_used") if samples else None
    total = samples.total("soloist:pages_total") if samples else None
    if samples is None or used is None or not total:
        yield verdict("asleep" if samples is not None and samples.total("soloist:asleep") else "silent")
        return
    parked = samples.total("soloist:requests_parked") or 0.0
    yield verdict(
        "full" if parked or (used > FULL_POOL * total and samples.total("vllm:num_requests_waiting")) else "fine",
        used=used,
        total=total,
        parked=parked,
        running=samples.total("vllm:num_requests_running") or 0.0,
        waiting=samples.total("vllm:num_requests_waiting") or 0.0,
    )


@check(
    "server-drafts",
    "Acceptance",
    "Tokens per step since the server started. Prose gives 2 to 4, copying much more; near 1 drafting only costs.",
    fine=ok("{tokens:.2f} tokens per step over {steps:.0f} steps"),
    low=warn("Only {tokens:.2f} tokens per step over {steps:.0f} steps.", "Check DRAFTER, or use SPEC=none."),
    none=ok("no drafted step yet"),
)
def server_drafts(subject: Subject) -> Iterator[Verdict]:
    samples = scrape(subject)
    steps = samples.total("vllm:spec_decode_num_drafts_total") if samples else None
    if samples is None or not steps:
        yield verdict("none")
        return
    tokens = 1 + (samples.total("vllm:spec_decode_num_accepted_tokens_total") or 0.0) / steps
    yield verdict("low" if tokens < LOW_ACCEPTANCE and steps > 200 else "fine", tokens=tokens, steps=steps)


SERVER_CHECKS = (server, server_key, server_parts, server_pool, server_drafts)
