"""Minutes of everything at once against a small pool: answers stay right, and at the end every page is free."""

from __future__ import annotations

import random
import time
from pathlib import Path

import pytest

from cache.arms import Answer, Arm, Pending, text

VOCAB = 256
COMPARED = 400  # answers asked again of a plain engine
ARMS = {"mtp": {"spec": "mtp"}, "dflash2-kvarn": {"spec": "dflash2", "tree": "0", "kv_format": "kvarn"}}


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("arm_of", ARMS)
@pytest.mark.parametrize(
    "seconds", [pytest.param(60, marks=pytest.mark.slow), pytest.param(600, marks=pytest.mark.full)], ids=str
)
def test_a_mixed_soak(tiny_model: Path, tmp_path: Path, arm_of: str, seconds: int, record_property) -> None:
    knobs = ARMS[arm_of]
    rng = random.Random(1)
    kv = {"kv_format": knobs["kv_format"]} if "kv_format" in knobs else {}
    sizes = {"pool_tokens": "2048", "max_len": "768", "max_seqs": "6", "reserve_tokens": "64", "host_cache_gb": "0.004"}
    chats = [text(80 + 30 * i, VOCAB, i) for i in range(5)]
    done: list[tuple[list[int], int, Answer]] = []
    asked = cancelled = 0
    with Arm(tiny_model, **knobs, **sizes, session_dir=str(tmp_path)) as arm:
        until = time.monotonic() + seconds
        running: list[tuple[int, list[int], Pending]] = []
        while time.monotonic() < until:
            which = rng.randrange(5)
            kind = rng.random()
            prompt = list(chats[which])
            if kind < 0.2:
                prompt[rng.randrange(len(prompt))] = rng.randrange(VOCAB)
            elif kind < 0.3:
                prompt = prompt[: rng.randrange(2, len(prompt))]
            running.append((which, prompt, arm.start(prompt, tokens=rng.randrange(1, 120))))
            asked += 1
            if rng.random() < 0.15:
                arm.engine.cancel(running.pop(rng.randrange(len(running)))[2].request)
                cancelled += 1
            while len(running) >= 6:
                which, prompt, pending = running.pop(0)
                answer = pending.answer()
                # The latest ones: what went wrong early shows late.
                done = [*done[-COMPARED + 1 :], (prompt, pending.request.params.max_tokens, answer)]
                longer = [*prompt, *answer.tokens, *text(rng.randrange(5, 60), VOCAB, rng.randrange(1 << 20))]
                chats[which] = longer if len(longer) < 600 else text(80, VOCAB, rng.randrange(1 << 20))
            if rng.random() < 0.1:
                time.sleep(0.2)
        for _, _, pending in running:
            pending.answer()
        arm.quiet()
        stats, counters = arm.engine.reuse.prefix.stats, arm.engine.counters
        assert stats.hit_tokens and stats.evicted_pages and stats.spilled_pages and counters["preemptions"]
        arm.engine.call(arm.engine.reuse.prefix.clear)
        assert arm.engine.memory.pages.used == 0 and arm.engine.memory.slots_used == 0
    found = {"seconds": seconds, "requests": asked, "cancelled": cancelled, "compared": len(done), **vars(stats)}
    for name, value in {**found, "preemptions": counters["preemptions"], "pages in use at the end": 0}.items():
        record_property(name, value)
    with Arm(tiny_model, spec="none", lookup="0", prefix_cache="0", **kv) as plain:
        for prompt, tokens, answer in done:
            assert plain.ask(prompt, tokens=tokens).bits == answer.bits
