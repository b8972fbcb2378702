"""Random JSON schemas under speculation: does every answer fit, and what do the masks cost?

The cost is processor time of the engine's thread (one thread of arithmetic), so a busy machine changes it little.
"""

from __future__ import annotations

import json
import random
import time
from collections import Counter
from typing import Any

import httpx

from live import serving
from random_schemas import random_schema, violation
from soloist import demo
from soloist.engine.build import build_engine
from soloist.engine.runner import Runner
from soloist.sampling.llg import LLGrammar
from soloist.server.template import ChatTemplate
from soloist.server.tokenizer import Tokenizer
from soloist.settings import resolve

WHAT = "answers of the bundled demo to random JSON schemas at T=1, drafts on, checked by the jsonschema package"
COUNT = 500
MAX_TOKENS = 200
KNOBS = {"model": "demo", "max_len": "4096", "threads": "1", "spec": "mtp"}


class Meter:
    """Calls and processor seconds of a method while it is wrapped."""

    def __init__(self, owner: type, name: str) -> None:
        self.calls, self.seconds = 0, 0.0
        inner = getattr(owner, name)

        def timed(*args: Any, **kwargs: Any) -> Any:
            began = time.thread_time()
            try:
                return inner(*args, **kwargs)
            finally:
                self.calls += 1
                self.seconds += time.thread_time() - began

        setattr(owner, name, timed)


def ask(client: httpx.Client, schema: dict[str, Any], seed: int) -> dict[str, Any]:
    body = {
        "messages": [{"role": "user", "content": "Describe a thing as JSON."}],
        "response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": schema}},
        "max_tokens": MAX_TOKENS,
        "temperature": 1.0,
        "seed": seed,
        "enable_thinking": False,
    }
    reply = client.post("/v1/chat/completions", json=body)
    return {"status": reply.status_code, **reply.json()}


def run(count: int) -> dict[str, Any]:
    masks, steps = Meter(LLGrammar, "mask"), Meter(Runner, "decode")
    engine = build_engine(resolve(KNOBS, {}, {}))
    endings: Counter[str] = Counter()
    faults: list[dict[str, Any]] = []
    drafted: Counter[str] = Counter()
    rng = random.Random(3)
    directory = demo.path()
    with serving(engine, Tokenizer.load(directory), ChatTemplate.load(directory)) as live:
        client = httpx.Client(base_url=live.url, timeout=600)
        for i in range(count):
            schema = random_schema(rng)
            reply = ask(client, schema, seed=i)
            if reply["status"] != 200:
                endings[f"refused {reply['status']}"] += 1
                faults.append({"schema": schema, "reply": reply["error"]})
                continue
            choice = reply["choices"][0]
            endings[choice["finish_reason"]] += 1
            for source, tokens in reply["metrics"]["speculative_decoding"]["accepted_by_source"].items():
                drafted[source] += tokens
            if choice["finish_reason"] == "stop":
                fault = violation(json.loads(choice["message"]["content"]), schema)
                if fault is not None:
                    faults.append({"schema": schema, "answer": choice["message"]["content"], "fault": fault})
            if i % 50 == 49:
                print(f"{i + 1}: {dict(endings)}, {len(faults)} faults", flush=True)
        output = engine.status().counters["output_tokens"]
    engine.close()
    return {
        "knobs": KNOBS,
        "schemas": count,
        "max_tokens": MAX_TOKENS,
        "endings": dict(endings),
        "faults": faults,
        "output_tokens": int(output),
        "accepted_by_source": dict(drafted),
        "masked_rows": masks.calls,
        "decode_steps": steps.calls,
        "tokens_per_step": round(output / steps.calls, 3),
        "cpu_us_per_masked_row": round(1e6 * masks.seconds / masks.calls, 1),
        "cpu_ms_per_step": round(1e3 * steps.seconds / steps.calls, 3),
        "mask_share_of_step": round(masks.seconds / steps.seconds, 4),
        "logits_width": engine.vocab_size,
    }
