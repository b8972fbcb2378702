"""Where snapshots are placed, what is given up first, and how a settle pass makes way."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from cache.arms import Arm, text
from cache.fakes import PAGE_BYTES, Pool
from soloist.cache.pages import PageAllocator
from soloist.cache.prefix import PrefixCache
from soloist.cache.snapshot import Snapshot, grid_points
from soloist.cache.value import RecomputeCost
from soloist.cli import app
from soloist.errors import EngineError

VOCAB = 256


@pytest.mark.parametrize(
    ("length", "ends", "every", "points"),
    [
        (63, [], 0, []),
        (64, [], 0, [64]),
        (65, [], 0, [64]),
        (128, [], 0, [64, 128]),  # a resend must leave one token, a longer prompt need not
        (300, [100, 200, 290], 0, [64, 192, 256]),
        (5000, [], 2048, [2048, 4096, 4992]),
        # Old messages only where the next point is far; the last four always.
        (3000, [100, 200, 300, 2000, 2700, 2800, 2900, 2950], 0, [256, 1984, 2688, 2752, 2880, 2944, 2944, 2944]),
    ],
)
def test_grid_points(length: int, ends: list[int], every: int, points: list[int]) -> None:
    assert grid_points(length, ends, every) == sorted(set(points))


def test_grid_points_of_kvarn() -> None:
    assert grid_points(400, [200], 0, grid=128) == [128, 384]


class Shelf:
    """A cache over a small pool; states are as large as asked for."""

    def __init__(self, pages: int, host: int, cost: RecomputeCost | None = None) -> None:
        self.allocator = PageAllocator(pages)
        self.pool = Pool(pages)
        self.cache = PrefixCache(self.allocator, storage=self.pool, host_bytes=host, cost=cost)

    def store(self, name: int, blocks: int, at: list[int] | None = None, state: int = 512) -> list[int]:
        """Prefill `blocks` blocks of a prompt of its own; snapshots after the blocks in `at`, by default the last."""
        tokens = [name] * (64 * blocks) + [0]
        if self.allocator.free < blocks:
            self.cache.evict(blocks - self.allocator.free)
        pages = self.allocator.allocate(blocks)
        assert pages is not None
        for end in range(64, 64 * blocks + 1, 64):
            pages = self.cache.insert(tokens, pages, end)
            if end // 64 in (at or [blocks]):
                snapshot = Snapshot(end, {"state": torch.zeros(state, dtype=torch.uint8)})
                self.cache.attach_snapshot(tokens, end, snapshot)
        self.allocator.release(pages)
        return tokens


def test_what_nothing_unlocks_goes_first() -> None:
    shelf = Shelf(8, host=1 << 20)
    kept = shelf.store(1, 4)
    dead = shelf.store(2, 4, at=[2])  # two blocks beyond the last snapshot
    assert shelf.cache.evict(2) == 2
    assert shelf.cache.reach(kept) == 256 and shelf.cache.reach(dead) == 128
    assert shelf.cache.stats.spilled_pages == 0


def test_the_cheapest_to_recompute_per_byte_goes_first() -> None:
    """Equal bytes, unequal position: late tokens cost more to compute again."""
    shelf = Shelf(16, host=0, cost=RecomputeCost(half=64.0))
    shelf.cache.host_bytes = 3 * 512
    long = shelf.store(1, 8, at=[4, 8])
    short = shelf.store(2, 4)
    shelf.cache.host_bytes = 2 * 512
    third = shelf.store(3, 4)
    assert shelf.cache.reach(long) == 512
    assert shelf.cache.reach(short) == 0 or shelf.cache.reach(third) == 0
    shelf.cache.check()


def test_a_snapshot_never_goes_before_its_pages() -> None:
    """Host memory for one state only: the loser's pages become unreachable and are the next to be evicted."""
    shelf = Shelf(8, host=600)
    first, second = shelf.store(1, 4), shelf.store(2, 4)
    reached = [shelf.cache.reach(tokens) for tokens in (first, second)]
    assert sorted(reached) == [0, 256]
    assert shelf.cache.evict(3) >= 3
    assert [shelf.cache.reach(tokens) for tokens in (first, second)] == reached


def test_recent_use_protects() -> None:
    shelf = Shelf(12, host=3 * (512 + 4 * PAGE_BYTES))
    prompts = [shelf.store(name, 4) for name in (1, 2, 3)]
    for name in range(10, 16):
        hit = shelf.cache.match(prompts[0])
        assert hit.length == 256
        shelf.allocator.release(hit.pages)
        shelf.store(name, 4)
    assert shelf.cache.reach(prompts[0]) == 256
    assert shelf.cache.reach(prompts[1]) == 0


def test_settling_makes_way_and_goes_on(tiny_model: Path) -> None:
    """A request that arrives in the middle of a settle pass is served at once; the pass is finished afterwards."""
    prompt = text(100, VOCAB, 3)
    with Arm(tiny_model, spec="mtp", max_len="2048") as arm:
        answer = arm.ask(prompt, tokens=700)
        settler = arm.engine.settler
        deadline = time.monotonic() + 60
        while settler.tokens == 0 and time.monotonic() < deadline:
            time.sleep(0.001)
        other = arm.ask(text(70, VOCAB, 4), tokens=4)
        assert len(other.tokens) == 4
        arm.quiet()
        follow = [*prompt, *answer.tokens, 1, 2, 3]
        assert arm.ask(follow, tokens=4).cached == (len(prompt) + len(answer.tokens) - 1) // 64 * 64
        # Nothing was computed twice: one pass over the answer, from the prompt's snapshot on (and the short turns').
        assert settler.tokens <= len(answer.tokens) + 64 + 128


def test_settling_can_be_switched_off(tiny_model: Path) -> None:
    prompt = text(100, VOCAB, 5)
    with Arm(tiny_model, spec="none", settle="0") as arm:
        answer = arm.ask(prompt, tokens=100)
        assert arm.ask([*prompt, *answer.tokens, 1], tokens=1).cached == 64


@pytest.mark.parametrize("spec", ["mtp", "dflash2"])
def test_drafters_are_as_good_warm_as_cold(spec: str) -> None:
    """On the demo: the same drafts are accepted after a resume as in the cold run."""
    from soloist import demo
    from soloist.bench.document_text import make_document
    from soloist.server.tokenizer import Tokenizer

    prompt = Tokenizer.load(demo.path()).encode(make_document(2500, seed=8).text)[:700]
    with Arm("demo", lookup="0", block_rule="saturated", spec=spec, tree="0") as arm:
        first = arm.start(prompt, tokens=60)
        cold = first.answer()
        again = arm.start(prompt, tokens=60)
        warm = again.answer()
        assert warm.cached == 640 and warm.bits == cold.bits
        accepted = [pending.request.stats.accepted for pending in (first, again)]
        assert accepted[0] > 5 and abs(accepted[0] - accepted[1]) <= 1


def test_the_status_counts_turns_that_are_still_to_be_settled(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever compares pages between two moments has to wait for these, not only for requests."""
    with Arm(tiny_model, spec="none") as arm:
        turn = threading.Event()
        step = arm.engine.settler.step

        def waiting() -> None:
            turn.wait(60)
            step()

        monkeypatch.setattr(arm.engine.settler, "step", waiting)
        running = [arm.start(text(70, VOCAB, seed), tokens=80) for seed in (1, 2)]
        for pending in running:
            pending.answer()
        before = arm.engine.status()
        assert (before.running, before.settling) == (0, 2)
        turn.set()
        arm.quiet()
        after = arm.engine.status()
        assert after.settling == 0 and after.pages_used > before.pages_used


def test_the_sessions_command(tiny_model: Path, tmp_path: Path) -> None:
    where = ["--session-dir", str(tmp_path)]
    shared = text(200, VOCAB, 6)
    with Arm(tiny_model, spec="none", session_dir=str(tmp_path)) as arm:
        arm.ask(shared)
        arm.quiet()
        for branch in (1, 2):
            arm.ask([*shared[:192], *text(100, VOCAB, 60 + branch)])
            arm.quiet()
    run = CliRunner()
    listed = run.invoke(app, ["sessions", "ls", *where])
    assert listed.exit_code == 0
    names = [line.split()[0] for line in listed.output.splitlines()[1:3]]
    assert len(set(names)) == 2 and "3 files" in listed.output
    whole = run.invoke(app, ["sessions", "verify", *where])
    assert whole.exit_code == 0 and "are whole" in whole.output
    gone = run.invoke(app, ["sessions", "rm", names[0], *where])
    assert gone.exit_code == 0
    left = run.invoke(app, ["sessions", "ls", *where]).output
    assert names[0] not in left and names[1] in left
    path = next(tmp_path.glob(f"{names[1]}*"))
    raw = path.read_bytes()
    path.write_bytes(raw[:-9] + bytes([raw[-9] ^ 1]) + raw[-8:])
    broken = run.invoke(app, ["sessions", "verify", *where])
    assert broken.exit_code == 2 and "checksum" in broken.output
    assert run.invoke(app, ["sessions", "rm", *where]).exit_code == 2
    assert run.invoke(app, ["sessions", "rm", "nobody", *where]).exit_code == 2
    assert run.invoke(app, ["sessions", "rm", "--all", *where]).exit_code == 0
    assert not list(tmp_path.glob("*.session"))


def test_faults_of_the_cache_end_one_request_at_most(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted where host memory is copied to and from: the engine goes on, and no page or slot is lost."""
    prompt = text(200, VOCAB, 15)
    with Arm(tiny_model, spec="mtp", pool_tokens="1024", max_len="512", reserve_tokens="64") as arm:
        expected = arm.ask(prompt)
        arm.quiet()
        state, reuse = arm.engine.memory.state, arm.engine.reuse

        def broken(*_: object) -> None:
            raise MemoryError("planted")

        with monkeypatch.context() as patch:  # a snapshot that cannot be restored
            patch.setattr(state, "load", broken)
            with pytest.raises(EngineError, match="planted"):
                arm.ask(prompt)
        assert arm.ask(prompt).bits == expected.bits
        with monkeypatch.context() as patch:  # a settle pass and a cancelled prefill that cannot be kept
            patch.setattr(reuse, "keep", broken)
            pending = arm.start(text(400, VOCAB, 17))
            arm.engine.cancel(pending.request)
            pending.answer()
            arm.quiet()
        with monkeypatch.context() as patch:  # parking without room in host memory
            patch.setattr(state, "export", broken)
            patch.setattr(reuse, "computed", lambda request: None)
            patch.setattr(arm.engine.runner, "_computed", lambda request: None)
            running = [arm.start(text(120 + i, VOCAB, 900 + i), tokens=300) for i in range(6)]
            outcomes = []
            for pending in running:
                try:
                    outcomes.append(len(pending.answer().tokens))
                except EngineError:
                    outcomes.append(0)
            assert 0 in outcomes and 300 in outcomes
            arm.quiet()
        arm.engine.call(reuse.prefix.clear)
        assert arm.engine.memory.pages.used == 0 and arm.engine.memory.slots_used == 0
        assert arm.ask(prompt).bits == expected.bits
