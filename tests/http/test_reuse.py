"""Reports R07 and R10: reuse between turns as a client sees it, over HTTP on a real engine with drafts and cache on."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator

import httpx
import pytest

import soloist.engine.build
from live import Live, serving
from soloist.engine.request import Request
from soloist.server.template import ChatTemplate
from soloist.server.tokenizer import Tokenizer
from soloist.settings import resolve
from tiny import build_tiny


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    """A random model whose tokens are bytes."""
    directory = build_tiny(tmp_path_factory.mktemp("tiny") / "model")
    tokenizer = Tokenizer.load(directory)
    knobs = {"model": str(directory), "threads": "1", "spec": "mtp", "max_len": "4096", "max_seqs": "2"}
    engine = soloist.engine.build.build_engine(resolve(knobs, {}, {}))
    with serving(engine, tokenizer, ChatTemplate.load(directory)) as server:
        yield server
    engine.close()


def letters(live: Live) -> dict[str, int]:
    """A bias that leaves the lower-case letters and the end: random bytes would not come back as the text they were."""
    tokenizer = live.service.tokenizer
    ids = [tokenizer.encode(letter)[0] for letter in "abcdefghijklmnopqrstuvwxyz"]
    return {str(token): 100 for token in [*ids, tokenizer.id_of("<|im_end|>")]}


def settled(live: Live) -> None:
    deadline = time.monotonic() + 60
    while live.engine.status().running or live.engine.status().settling:
        assert time.monotonic() < deadline
        time.sleep(0.005)


@pytest.fixture
def asked(live: Live, monkeypatch: pytest.MonkeyPatch) -> list[Request]:
    """Requests as the engine gets them."""
    seen: list[Request] = []
    submit = live.engine.submit
    monkeypatch.setattr(live.engine, "submit", lambda request: (seen.append(request), submit(request))[1])
    return seen


def known(one: Request, two: Request) -> int:
    """How many ids the second prompt shares with the first prompt and its answer."""
    return sum(1 for _ in itertools.takewhile(lambda p: p[0] == p[1], zip(one.prompt + one.output, two.prompt)))


@pytest.mark.parametrize("thinking", [False, True])
def test_every_turn_of_a_chat_reuses_the_turns_before(live: Live, asked: list[Request], thinking: bool) -> None:
    """R07: from turn 2 on, all that the template left as it was but for the documented unit.

    The template takes the thinking block out of an answer when the next question comes, so an answer is known as
    history one turn later.
    """
    unit = httpx.get(live.url + "/v1/models").json()["data"][0]["cache_unit"]
    messages = [{"role": "system", "content": f"Thinking is {thinking}. " + "Answer in letters. " * 8}]
    spared = 0
    for turn in range(6):
        messages.append({"role": "user", "content": f"Question number {turn}: what comes next?"})
        body = {"messages": messages, "max_tokens": 300, "min_tokens": 20 + 9 * turn, "temperature": 0}
        body |= {"logit_bias": letters(live), "chat_template_kwargs": {"enable_thinking": thinking}}
        reply = httpx.post(live.url + "/v1/chat/completions", json=body, timeout=60).json()
        cached = reply["usage"]["prompt_tokens_details"]["cached_tokens"]
        if turn:
            shared = known(asked[-2], asked[-1])
            assert shared >= len(asked[-2].prompt) - 8, "all but the generation prompt stays"
            assert shared - unit <= cached <= shared
            spared += cached
        answer = reply["choices"][0]["message"]
        messages.append({k: answer[k] for k in ("role", "content", "reasoning_content") if answer.get(k) is not None})
        settled(live)
    assert spared > 1000


def test_a_changing_attribution_block_costs_nothing(live: Live, asked: list[Request]) -> None:
    """R10: a coding agent's system prompt of 2,000 tokens behind a line with a checksum that changes every time."""
    system = "You are an agent with rules. " * 70
    reads = []
    for checksum in ("a1b2c", "00000", "fffff"):
        lead = {"type": "text", "text": f"x-anthropic-billing-header: cc_version=2.1.0; cch={checksum};"}
        body = {
            "model": "demo",
            "max_tokens": 4,
            "temperature": 0,
            "system": [lead, {"type": "text", "text": system}],
            "messages": [{"role": "user", "content": "Go."}],
        }
        reply = httpx.post(live.url + "/v1/messages", json=body, timeout=60)
        assert reply.status_code == 200, reply.text
        usage = reply.json()["usage"]
        assert usage["input_tokens"] > 2000
        reads.append(usage["cache_read_input_tokens"] / usage["input_tokens"])
        settled(live)
    assert reads[0] == 0 and min(reads[1:]) >= 0.95
    assert len({tuple(request.prompt) for request in asked}) == 1
    assert "cch" not in live.service.tokenizer.decode(asked[0].prompt)
