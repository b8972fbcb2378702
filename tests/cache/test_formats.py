"""Every KV format keeps the contracts: drafts and caches change no bit, whatever is stored."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from cache.arms import Answer, Arm, text

VOCAB = 256
FORMATS = {
    "bf16": {"kv_format": "bf16"},
    "fp8": {"kv_format": "fp8"},
    "int8": {"kv_format": "int8"},
    "fp8+int8": {"kv_format": "fp8", "kv_format_v": "int8"},
    "kvarn": {"ctx": "huge"},
}


@pytest.fixture(scope="module", params=list(FORMATS))
def arms(request: pytest.FixtureRequest, tiny_model: Path) -> Iterator[tuple[Arm, Arm, int]]:
    """A plain arm and one with a drafting tree and a cache, of one format; and the cache's grid."""
    knobs = FORMATS[request.param]
    with (
        Arm(tiny_model, spec="none", lookup="0", prefix_cache="0", **knobs) as plain,
        Arm(tiny_model, spec="mtp", tree="1", **knobs) as full,
    ):
        yield plain, full, full.engine.reuse.prefix.grid


@pytest.mark.parametrize("length", [128, 257, 390])
def test_drafts_and_hits_change_nothing(arms: tuple[Arm, Arm, int], length: int) -> None:
    _same(*arms, length)


@pytest.mark.timeout(0)
@pytest.mark.parametrize(
    "step",
    [pytest.param(13, id="thirteenth", marks=pytest.mark.slow), pytest.param(1, id="all", marks=pytest.mark.full)],
)
def test_lengths_over_two_tiles(arms: tuple[Arm, Arm, int], step: int) -> None:
    for length in range(240, 400, step):
        _same(*arms, length)


def _same(plain: Arm, full: Arm, grid: int, length: int) -> None:
    prompt = text(length, VOCAB, 40 + length)
    expected = plain.ask(prompt, tokens=24)
    first = full.ask(prompt, tokens=24)
    assert first.bits == expected.bits
    again = full.ask(prompt, tokens=24)
    assert again.bits == expected.bits and again.cached == (length - 1) // grid * grid
    full.quiet()
    follow = [*prompt, *first.tokens, *text(20, VOCAB, 3)]
    turn = full.ask(follow)
    assert turn.bits == plain.ask(follow).bits
    assert turn.cached == (length + len(first.tokens) - 1) // grid * grid


def test_tiles_are_packed_where_the_rule_says(tiny_model: Path) -> None:
    """Up to 256 tokens a KVarN row reads nothing packed; from tile 3 on it does."""
    knobs = {"spec": "none", "lookup": "0", "prefix_cache": "0"}
    with Arm(tiny_model, **knobs) as full, Arm(tiny_model, kv_format="kvarn", **knobs) as packed:
        short, long = text(250, VOCAB, 1), text(390, VOCAB, 2)
        assert packed.ask(short, tokens=100).bits[1][:100] == full.ask(short, tokens=100).bits[1][:100]
        assert packed.ask(long).logprobs != full.ask(long).logprobs


@pytest.mark.parametrize("requests", [40, pytest.param(200, marks=pytest.mark.slow)])
def test_a_small_pool_of_scaled_pages_is_reused_again_and_again(
    tiny_model: Path, requests: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """R50: every page of a small pool is handed out again and again, cache on; the last answers are right too."""
    knobs = {"spec": "mtp", "kv_format": "int8", "max_len": "512", "max_seqs": "4"}
    # Five conversations at a time, others after every ten requests.
    heads = [text(70 + 50 * (i % 5), VOCAB, 5_000 + i) for i in range(5 + requests // 2)]
    asked = [heads[n // 10 * 5 + n * n % 5] + text(1 + 37 * n % 130, VOCAB, 6_000 + n) for n in range(requests)]
    with (
        Arm(tiny_model, spec="none", lookup="0", prefix_cache="0", kv_format="int8", max_len="512") as plain,
        Arm(tiny_model, **knobs, pool_tokens="1536", reserve_tokens="64", host_cache_gb="0.002") as arm,
    ):
        got: list[Answer] = []
        handed: Counter[int] = Counter()
        pages = arm.engine.memory.pages
        allocate = pages.allocate

        def counted(count: int) -> list[int] | None:
            found = allocate(count)
            handed.update(found or ())
            return found

        monkeypatch.setattr(pages, "allocate", counted)
        for start in range(0, requests, 4):
            running = [arm.start(prompt) for prompt in asked[start : start + 4]]
            got += [pending.answer() for pending in running]
        arm.quiet()
        assert len(handed) == pages.total and min(handed.values()) > 1 and arm.engine.reuse.prefix.stats.hit_tokens > 0
        assert [n for n, prompt in enumerate(asked) if plain.ask(prompt).bits != got[n].bits] == []


@pytest.mark.slow
def test_parked_and_resumed(arms: tuple[Arm, Arm, int], tiny_model: Path) -> None:
    plain, full, _ = arms
    prompts = [text(150 + 9 * i, VOCAB, 800 + i) for i in range(4)]
    knobs = {"kv_format": full.engine.memory.kv.format.split("+")[0]}
    if "+" in full.engine.memory.kv.format:
        knobs["kv_format_v"] = full.engine.memory.kv.format.split("+")[1]
    sizes = {"pool_tokens": "1024", "max_len": "512", "max_seqs": "4", "reserve_tokens": "64"}
    with Arm(tiny_model, spec="mtp", tree="1", **knobs, **sizes) as arm:
        answers = [pending.answer() for pending in [arm.start(prompt, tokens=160) for prompt in prompts]]
        arm.quiet()
        assert arm.engine.counters["preemptions"] > 0
    for prompt, answer in zip(prompts, answers, strict=True):
        assert answer.bits == plain.ask(prompt, tokens=160).bits


def test_a_restart_finds_the_conversation(arms: tuple[Arm, Arm, int], tiny_model: Path, tmp_path: Path) -> None:
    plain, full, grid = arms
    prompt = text(400, VOCAB, 55)
    knobs = {"session_dir": str(tmp_path), "spec": "mtp"}
    knobs["kv_format"], _, value = full.engine.memory.kv.format.partition("+")
    knobs |= {"kv_format_v": value} if value else {}
    with Arm(tiny_model, **knobs) as arm:
        answer = arm.ask(prompt)
        arm.quiet()
    follow = [*prompt, *answer.tokens, *text(40, VOCAB, 32)]
    with Arm(tiny_model, **knobs) as arm:
        warm = arm.ask(follow)
    assert warm.cached == (len(prompt) + len(answer.tokens) - 1) // grid * grid
    assert warm.bits == plain.ask(follow).bits
