"""Random lives of requests against one small pool: nothing leaks, nothing is shared by mistake, nothing is lost.

Every page's content names the prefix it was computed for, so an aliased or stale page is seen by its
content, not only by its counts.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from cache.fakes import FakeStore, Names, Pool
from soloist.cache.pages import PageAllocator
from soloist.cache.persist import Persister
from soloist.cache.prefix import PrefixCache
from soloist.cache.snapshot import Snapshot
from soloist.cache.tree import Trail

BLOCKS = st.lists(st.integers(0, 2), min_size=1, max_size=5)
PICK = st.integers(0, 1 << 16)


@dataclass
class Sequence:
    tokens: list[int]
    salt: str
    trail: Trail
    pages: list[int]
    computed: int  # prompt tokens whose KV is in `pages`, a multiple of the grid
    decoded: list[int] = field(default_factory=list)  # content of the private pages behind the prompt
    parked: dict[str, torch.Tensor] | None = None
    parked_pages: int = 0


class Lives(RuleBasedStateMachine):
    @initialize(
        groups=st.integers(4, 12), span=st.sampled_from([1, 2]), host=st.sampled_from([0, 3, 40]), disk=st.booleans()
    )
    def start(self, groups: int, span: int, host: int, disk: bool) -> None:
        self.span, self.grid, self.total = span, 64 * span, groups * span
        self.host_bytes = host * 1024
        self.names = Names()
        self.store = FakeStore() if disk else None
        self.boot()

    def boot(self) -> None:
        self.pool = Pool(self.total)
        self.allocator = PageAllocator(self.total, self.span)
        self.cache = PrefixCache(self.allocator, grid=self.grid, storage=self.pool, host_bytes=self.host_bytes)
        self.persister = Persister(self.cache, self.store) if self.store is not None else None
        self.running: list[Sequence] = []
        if self.persister is not None:
            self.persister.restore()

    def pick(self, number: int) -> Sequence:
        return self.running[number % len(self.running)]

    def name(self, sequence: Sequence, block: int) -> int:
        return self.names((hash(sequence.salt), *sequence.tokens[: (block + 1) * self.grid]))

    def state_of(self, sequence: Sequence, length: int) -> Snapshot:
        number = self.name(sequence, length // self.grid - 1)
        return Snapshot(length, {"state": torch.full((64,), number, dtype=torch.int64)})

    def take(self) -> list[int] | None:
        if self.allocator.free < self.span:
            self.cache.evict(self.span - self.allocator.free)
        return self.allocator.allocate(self.span)

    @rule(blocks=BLOCKS, tail=st.integers(0, 63), salt=st.sampled_from(["", "", "x"]))
    def arrive(self, blocks: list[int], tail: int, salt: str) -> None:
        tokens = [b for block in blocks for b in [block] * self.grid] + [9] * tail
        trail = self.cache.trail(tokens, salt)
        match = self.cache.match(trail)
        sequence = Sequence(tokens, salt, trail, list(match.pages), match.length)
        assert match.length <= len(tokens) - 1 and match.length % self.grid == 0
        assert len(match.pages) == match.length // 64
        if match.length:
            assert match.snapshot is not None and match.snapshot.length == match.length
            assert torch.equal(match.snapshot.tensors["state"], self.state_of(sequence, match.length).tensors["state"])
        for i, page in enumerate(match.pages):
            assert self.pool.content(page) == self.name(sequence, i // self.span)
        self.running.append(sequence)

    @rule(blocks=BLOCKS, tail=st.integers(0, 63), marks=st.integers(1, 31), persist=st.booleans(), leave=st.booleans())
    def serve(self, blocks: list[int], tail: int, marks: int, persist: bool, leave: bool) -> None:
        """A whole prompt with snapshots where `marks` has a bit; the usual life, so that hits and spills are common."""
        self.arrive(blocks, tail, "")
        which = len(self.running) - 1
        sequence = self.running[which]
        while sequence.computed + self.grid <= len(sequence.tokens):
            before = sequence.computed
            self.prefill(which, bool(marks >> before // self.grid & 1), persist)
            if sequence.computed == before:
                break
        if not leave:
            self.finish(which)
            while self.store is not None and self.store.queue:
                self.disk_answers(True)

    @precondition(lambda self: self.running)
    @rule(which=PICK, snapshot=st.booleans(), persist=st.booleans())
    def prefill(self, which: int, snapshot: bool, persist: bool) -> None:
        sequence = self.pick(which)
        end = sequence.computed + self.grid
        if sequence.parked is not None or sequence.decoded or end > len(sequence.tokens):
            return
        fresh = self.take()
        if fresh is None:
            return
        for page in fresh:
            self.pool.write(page, self.name(sequence, sequence.computed // self.grid))
        sequence.pages += fresh
        sequence.computed = end
        sequence.pages = self.cache.insert(sequence.trail, sequence.pages, end)
        if snapshot and not self.cache.has_snapshot(sequence.trail, end):
            kept = self.cache.attach_snapshot(sequence.trail, end, self.state_of(sequence, end))
            assert kept == self.cache.has_snapshot(sequence.trail, end)
        if persist and self.persister is not None:
            self.persister.save(sequence.trail, end)

    @precondition(lambda self: self.running)
    @rule(which=PICK)
    def decode(self, which: int) -> None:
        sequence = self.pick(which)
        fresh = self.take() if sequence.parked is None else None
        if fresh is None:
            return
        for page in fresh:
            sequence.decoded.append(self.names.private())
            self.pool.write(page, sequence.decoded[-1])
        sequence.pages += fresh

    @precondition(lambda self: self.running)
    @rule(which=PICK)
    def finish(self, which: int) -> None:
        sequence = self.running.pop(which % len(self.running))
        self.allocator.release(sequence.pages)

    @precondition(lambda self: self.running)
    @rule(which=PICK)
    def park(self, which: int) -> None:
        sequence = self.pick(which)
        if sequence.parked is None:
            sequence.parked = self.pool.export(sequence.pages)
            self.allocator.release(sequence.pages)
            sequence.parked_pages = len(sequence.pages)
            sequence.pages = []

    @precondition(lambda self: self.running)
    @rule(which=PICK)
    def resume(self, which: int) -> None:
        sequence = self.pick(which)
        if sequence.parked is None:
            return
        need = sequence.parked_pages
        if self.allocator.free < need:
            self.cache.evict(need - self.allocator.free)
        pages = self.allocator.allocate(need)
        if pages is None:
            return
        self.pool.load(pages, sequence.parked)
        sequence.pages, sequence.parked = pages, None

    @rule(pages=st.integers(0, 12))
    def evict(self, pages: int) -> None:
        before = self.allocator.free
        assert self.cache.evict(pages) == self.allocator.free - before

    @precondition(lambda self: self.store is not None and self.store.queue)
    @rule(ok=st.booleans())
    def disk_answers(self, ok: bool) -> None:
        self.store.finish(ok)
        self.persister.poll()

    @precondition(lambda self: self.store is not None and self.store.files)
    @rule(which=PICK, seldom=st.integers(0, 4))
    def damage(self, which: int, seldom: int) -> None:
        if seldom:
            return
        self.store.files[which % len(self.store.files)].broken = True

    @precondition(lambda self: self.store is not None)
    @rule()
    def restart(self) -> None:
        self.store.queue.clear()
        self.boot()

    @rule()
    def clear(self) -> None:
        self.cache.clear()

    @invariant()
    def sound(self) -> None:
        self.cache.check()
        self.allocator.check([*self.cache.owned_pages(), *(s.pages for s in self.running)])
        assert self.cache.host_used <= self.host_bytes
        for sequence in self.running:
            prompt = sequence.computed // 64
            for i, page in enumerate(sequence.pages):
                own = self.name(sequence, i // self.span) if i < prompt else sequence.decoded[i - prompt]
                assert self.pool.content(page) == own, "a running request's page was changed"
        for node in self.cache.nodes():
            if node.resumable:
                assert all(above.present or above.pending for above in node.path()), "a snapshot outlived its pages"

    def teardown(self) -> None:
        for sequence in self.running:
            self.allocator.release(sequence.pages)
        self.cache.clear()
        self.allocator.check([])
        assert self.allocator.free == self.total and self.cache.host_used == 0


QUIET = {"deadline": None, "suppress_health_check": list(HealthCheck)}
TestLives = Lives.TestCase
TestLives.settings = settings(max_examples=150, stateful_step_count=40, **QUIET)


@pytest.mark.timeout(0)
@pytest.mark.parametrize(
    "lives", [pytest.param(1_000, marks=pytest.mark.slow), pytest.param(10_000, marks=pytest.mark.full)]
)
def test_many_lives(lives: int) -> None:
    from hypothesis.stateful import run_state_machine_as_test

    run_state_machine_as_test(Lives, settings=settings(max_examples=lives, stateful_step_count=50, **QUIET))
