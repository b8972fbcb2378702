"""A thinking budget of N is N tokens and the closing ones, whoever drafts: the demo, kept from closing by itself."""

from __future__ import annotations

import httpx
import pytest

from live import serving
from soloist import demo
from soloist.engine.build import build_engine
from soloist.server.template import ChatTemplate
from soloist.server.tokenizer import Tokenizer
from soloist.settings import resolve

DRAFTERS = {
    "none": {"spec": "none", "lookup": "0"},
    "lookup": {"spec": "none"},
    "mtp chain": {"spec": "mtp", "lookup": "0", "tree": "0"},
    "mtp tree": {"spec": "mtp", "lookup": "0"},
    "dflash2 chain": {"spec": "dflash2", "lookup": "0", "tree": "0"},
    "dflash2 tree and lookup": {"spec": "dflash2"},
}
BUDGETS = (0, 1, 7, 64, 500)
AFTER = 8  # tokens of the answer


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_exactly_n_thinking_tokens(drafter):
    knobs = {"model": "demo", "max_len": "1024", "max_seqs": "2", "block_rule": "saturated", **DRAFTERS[drafter]}
    engine = build_engine(resolve(knobs, {}, {}))
    tokenizer = Tokenizer.load(demo.path())
    close = tokenizer.encode("\n</think>\n\n")
    # Its own </think>, end of turn and calls are out of its reach; what the budget dictates is not.
    never = {str(tokenizer.id_of(t)): -100 for t in ("</think>", "<|im_end|>", "<|endoftext|>", "<tool_call>")}
    accepted = 0
    try:
        with serving(engine, tokenizer, ChatTemplate.load(demo.path())) as live:
            for n in BUDGETS:
                body = {
                    "messages": [{"role": "user", "content": "Count from one to a hundred, and again."}],
                    "enable_thinking": True,
                    "thinking_token_budget": n,
                    "temperature": 0,
                    "logit_bias": never,
                    "max_tokens": n + len(close) + AFTER,
                    "return_token_ids": True,
                }
                reply = httpx.post(live.url + "/v1/chat/completions", json=body, timeout=900).json()
                ids, usage = reply["choices"][0]["token_ids"], reply["usage"]
                assert ids[n : n + len(close)] == close and close[1] not in ids[:n] + ids[n + len(close) :]
                assert usage["completion_tokens_details"]["reasoning_tokens"] == n
                assert usage["completion_tokens"] == len(ids) == n + len(close) + AFTER
                drafts = reply["metrics"]["speculative_decoding"] or {}
                accepted += drafts.get("num_accepted_draft_tokens", 0)
    finally:
        engine.close()
    assert (accepted > 0) == (drafter != "none")
