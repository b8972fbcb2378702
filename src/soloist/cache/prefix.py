"""The prefix cache of a hybrid model: which tokens are already known, and from where a request may resume.

Pages hang in a tree of grid blocks; snapshots hang on its nodes. A hit resumes at the deepest snapshot
whose pages all exist, wherever they are: GPU pages as they are, host copies and session files after
loading. Only the prefill path inserts, so that warm equals cold bit for bit (contract E3).

Ownership: the tree holds one reference to each of its pages; `match` retains every page it returns for the
caller, who releases them like pages it allocated. Not thread-safe: the engine thread is the only caller.
What can go wrong: dropping a snapshot while keeping pages that nothing else unlocks would leave dead
weight, so pages and their snapshot go together; a node never vanishes before what hangs below it.
"""

from __future__ import annotations

import heapq
import itertools
import logging
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch

from soloist.cache.pages import PAGE, PageAllocator
from soloist.cache.snapshot import Snapshot
from soloist.cache.tree import Node, Trail, root
from soloist.cache.value import UNREACHABLE, RecomputeCost, Standing, standings

log = logging.getLogger(__name__)
Planes = dict[str, torch.Tensor]


class PageStorage(Protocol):
    """Moves whole pages between the device pool and host tensors (`cache/tiers.py`)."""

    def export(self, pages: Sequence[int]) -> Planes: ...

    def load(self, pages: Sequence[int], planes: Planes) -> None: ...

    def page_nbytes(self) -> int: ...


class SessionTier(Protocol):
    """The disk tier (`cache/sessions.py`). Segments are opaque here; a failed read raises SessionError."""

    def read_pages(self, segment: object, start: int, end: int) -> Planes: ...

    def read_state(self, segment: object, length: int) -> Snapshot: ...


class SessionError(Exception):
    """A session file that cannot be used; the message is one line for the log."""


@dataclass
class Match:
    """A hit: the caller owns one reference to each of `pages`; `length` tokens need no prefill. Empty when cold."""

    pages: list[int] = field(default_factory=list)
    length: int = 0
    snapshot: Snapshot | None = None
    tier: str = "none"  # slowest tier that was needed: "gpu", "host", "disk"


@dataclass
class CacheStats:
    """Counters since start; tokens unless they say otherwise."""

    queries: int = 0
    query_tokens: int = 0
    hit_tokens: int = 0
    loaded_host: int = 0
    loaded_disk: int = 0
    evicted_pages: int = 0
    spilled_pages: int = 0
    dropped_snapshots: int = 0
    refused_snapshots: int = 0


class PrefixCache:
    """`grid` is 64 tokens, 128 with KVarN; `host_bytes` bounds snapshots and spilled pages together."""

    def __init__(
        self,
        allocator: PageAllocator,
        *,
        grid: int = PAGE,
        storage: PageStorage | None = None,
        host_bytes: int = 0,
        sessions: SessionTier | None = None,
        cost: Callable[[int, int], float] | None = None,
        content: str = "",
    ) -> None:
        if grid % PAGE or grid // PAGE % allocator.group:
            raise ValueError(f"a grid of {grid} tokens is no whole number of page groups")
        self.allocator = allocator
        self.grid = grid
        self.storage = storage
        self.host_bytes = host_bytes
        self.sessions = sessions
        self.cost = cost or RecomputeCost()
        self.content = content
        self.stats = CacheStats()
        self.host_used = 0
        self.clock = 0.0
        self._roots: dict[bytes, Node] = {}
        self._span = grid // PAGE
        self._page_bytes = storage.page_nbytes() if storage is not None else 0

    def trail(self, tokens: Sequence[int], salt: str = "") -> Trail:
        """A cursor over `tokens`, to be passed instead of them where a long sequence is used many times."""
        start = root(salt, self.content)
        return Trail(self._roots.setdefault(start.digest, start), tokens, self.grid)

    def adopt_root(self, start: Node) -> Node:
        """The root with `start`'s digest, `start` itself if there was none (session files name roots by digest)."""
        return self._roots.setdefault(start.digest, start)

    def nodes(self) -> Iterable[Node]:
        """Every node except the roots, parents first."""
        for start in self._roots.values():
            yield from (node for node in start.subtree() if node.parent is not None)

    def match(self, tokens: Sequence[int] | Trail, salt: str = "") -> Match:
        """The deepest resumable prefix, at most len(tokens) - 1 tokens, brought into GPU pages and retained."""
        trail = self._trail(tokens, salt)
        self.stats.queries += 1
        self.stats.query_tokens += len(trail)
        limit = max(len(trail) - 1, 0) // self.grid
        while True:
            # A block that is only on its way to disk cannot be read yet: it counts again when the writer is done.
            path = list(itertools.takewhile(lambda node: node.present, trail.follow(limit)))
            while path and not path[-1].resumable:
                path.pop()
            if not path:
                return Match()
            tier = self._bring(path)
            pages = [page for node in path for page in node.pages or ()] if tier else []
            try:
                snapshot = self._snapshot_of(path[-1]) if tier else None
            except Exception:
                self.allocator.release(pages)
                raise  # whoever asked hears of it, and nobody's pages are lost
            if snapshot is not None:
                break
            self.allocator.release(pages)
            limit = len(path) - 1
        path[-1].stamp = self.clock
        self.stats.hit_tokens += path[-1].length
        return Match(pages, path[-1].length, snapshot, tier)

    def reach(self, tokens: Sequence[int] | Trail, salt: str = "") -> int:
        """How many tokens `match` would find, without touching anything."""
        trail = self._trail(tokens, salt)
        path = itertools.takewhile(lambda node: node.present, trail.follow(max(len(trail) - 1, 0) // self.grid))
        return max((node.length for node in path if node.resumable), default=0)

    def _trail(self, tokens: Sequence[int] | Trail, salt: str) -> Trail:
        return tokens if isinstance(tokens, Trail) else self.trail(tokens, salt)

    def _bring(self, path: list[Node]) -> str:
        """Make every node of `path` GPU-resident and retain its pages for the caller; "" when that failed."""
        held = [page for node in path for page in node.pages or ()]
        self.allocator.retain(held)
        missing = [node for node in path if node.pages is None]
        if not missing:
            return "gpu"
        need = len(missing) * self._span
        if self.allocator.free < need:
            self.evict(need - self.allocator.free, keep=set(path))
        pages = self.allocator.allocate(need) if self.storage is not None else None
        if pages is None:
            self.allocator.release(held)
            return ""
        try:
            tier = self._load(missing, pages)
        except Exception as error:
            self.allocator.release(held)
            self.allocator.release(pages)
            if not isinstance(error, SessionError):
                raise
            log.warning("%s; prefilling those tokens again", error)
            return ""
        for i, node in enumerate(missing):
            node.pages = tuple(pages[i * self._span : (i + 1) * self._span])
            self._set_host(node, None)
        self.allocator.retain(pages)  # allocation gave the tree its reference; this one is the caller's
        return tier

    def _load(self, missing: list[Node], pages: list[int]) -> str:
        assert self.storage is not None
        tier = "host"
        i = 0
        while i < len(missing):
            node = missing[i]
            run = 1
            if node.host is not None:
                planes: Planes = node.host
                self.stats.loaded_host += self.grid
            else:
                assert node.saved is not None and self.sessions is not None
                tier = "disk"
                segment, start = node.saved
                while i + run < len(missing) and missing[i + run].host is None and (
                    missing[i + run].saved == (segment, start + run * self.grid)
                ):  # fmt: skip
                    run += 1
                try:
                    planes = self.sessions.read_pages(segment, start, start + run * self.grid)
                except SessionError:
                    self.forget_segment(segment)
                    raise
                self.stats.loaded_disk += run * self.grid
            self.storage.load(pages[i * self._span : (i + run) * self._span], planes)
            i += run
        return tier

    def _snapshot_of(self, node: Node) -> Snapshot | None:
        if node.snapshot is None and node.saved_state is not None and self.sessions is not None:
            try:
                snapshot = self.sessions.read_state(node.saved_state, node.length)
            except SessionError as error:
                log.warning("%s; prefilling those tokens again", error)
                self.forget_segment(node.saved_state)
                return None
            if self._make_room(snapshot.nbytes, math.inf, keep=set(node.path())):
                self._set_snapshot(node, snapshot)
            return snapshot
        return node.snapshot

    def forget_segment(self, segment: object) -> None:
        """Forget everything a session segment held; nodes that live nowhere else go, with what is below them."""
        for node in list(self.nodes()):
            if node.saved is not None and node.saved[0] == segment:
                node.saved = None
            if node.saved_state == segment:
                node.saved_state = None
        self.prune()

    def prune(self) -> None:
        """Drop nodes whose data is nowhere any more."""
        for node in list(self.nodes()):
            if not node.dropped and not node.present and not node.pending:
                self._drop(node)

    def insert(self, tokens: Sequence[int] | Trail, pages: Sequence[int], upto: int, salt: str = "") -> list[int]:
        """Share the KV of the first `upto` tokens (a grid multiple) computed by a prefill.

        `pages` is the request's page table. Returns the table to use from now on: where another request had
        already stored the same block, its page takes the place of the request's own (equal bits), which is released.
        """
        if upto % self.grid:
            raise ValueError(f"{upto} is not a multiple of the grid {self.grid}")
        table = list(pages)
        trail = self._trail(tokens, salt)
        for i, node in enumerate(trail.follow(upto // self.grid, create=True)):
            at = slice(i * self._span, (i + 1) * self._span)
            own = tuple(table[at])
            if node.pages is None:
                self.allocator.retain(own)
                node.pages = own
                self._set_host(node, None)
            elif node.pages != own:
                self.allocator.retain(node.pages)
                self.allocator.release(own)
                table[at] = node.pages
        return table

    def has_snapshot(self, tokens: Sequence[int] | Trail, length: int, salt: str = "") -> bool:
        """True when taking a snapshot at `length` would be wasted work."""
        path = self._trail(tokens, salt).follow(length // self.grid)
        return len(path) * self.grid == length and bool(path) and path[-1].resumable

    def attach_snapshot(self, tokens: Sequence[int] | Trail, length: int, snapshot: Snapshot, salt: str = "") -> bool:
        """Hang a snapshot on the grid point `length`, whose pages were inserted before. False when it is not kept.

        The first snapshot of a point stays: a second one has equal bits. One that is worth less than everything
        it would push out of the host budget is refused.
        """
        path = self._trail(tokens, salt).follow(length // self.grid)
        if length % self.grid or not path or path[-1].length != length or not path[-1].present:
            return False
        node = path[-1]
        node.stamp = self.clock
        if node.snapshot is not None:
            return True
        self._set_snapshot(node, snapshot.to_host())  # counted and ranked like the others, so that it may lose
        if self.host_used > self.host_bytes:
            own = self._rank()[node].own
            if not self._make_room(0, math.nextafter(own, math.inf), keep={node}):
                self._set_snapshot(node, None)
                self.clock = max(self.clock, own)
                self.stats.refused_snapshots += 1
        return node.snapshot is not None

    def evict(self, pages_needed: int, keep: set[Node] | None = None) -> int:
        """Free at least `pages_needed` pages if unused cached pages allow it; returns how many were freed.

        Leaf first in order of value; pages used by a running request stay. Evicted pages move to host memory when
        they are worth more there than what they displace, or stay on disk if they are saved, else they are gone.
        """
        keep = keep or set()
        target = max(pages_needed, self.allocator.total // 64)  # a little ahead: ranking costs a walk over the tree
        rank = self._rank()
        heap = [(rank[node].best, -node.length, i, node) for i, node in enumerate(self.nodes()) if self._loose(node)]
        heapq.heapify(heap)
        victims: list[Node] = []
        chosen: set[Node] = set()
        while heap and len(victims) * self._span < target:
            _, _, i, node = heapq.heappop(heap)
            if node in keep:
                continue
            victims.append(node)
            chosen.add(node)
            parent = node.parent
            if parent is not None and self._loose(parent, chosen):
                heapq.heappush(heap, (rank[parent].best, -parent.length, i, parent))
        return self._release(victims, rank, keep)

    def vacate(self) -> None:
        """Give up the pool: every page moves to host memory, stays on disk, or is forgotten where neither has room.

        Nobody else may hold pages. A share at a time, so that the host budget goes to what is worth most.
        """
        while self.allocator.used and self.evict(1):
            pass
        self.storage = None

    def rebind(self, allocator: PageAllocator, storage: PageStorage) -> None:
        """Go on over another pool of the same format, after `vacate`. ValueError when the pages are of another size."""
        if storage.page_nbytes() != self._page_bytes or self._span % allocator.group or self.owned_pages():
            raise ValueError("the cache does not fit this pool")
        self.allocator, self.storage = allocator, storage

    def _rank(self) -> dict[Node, Standing]:
        return standings(self._roots.values(), self.cost, self._page_bytes / PAGE)

    def available(self, tokens: Sequence[int] | Trail, salt: str = "") -> int:
        """Pages a request for `tokens` could count on: free, evictable, or its own prefix in use by others."""
        trail = self._trail(tokens, salt)
        path = trail.follow(max(len(trail) - 1, 0) // self.grid)
        references = self.allocator.references
        idle = sum(references(p) == 1 for node in self.nodes() for p in node.pages or ())
        return self.allocator.free + idle + sum(references(p) > 1 for node in path for p in node.pages or ())

    def _loose(self, node: Node, gone: Iterable[Node] = ()) -> bool:
        """The tree alone owns the node's pages, and no child still has pages."""
        if node.pages is None or node.parent is None:
            return False
        if any(child.pages is not None and child not in gone for child in node.children.values()):
            return False
        return all(self.allocator.references(page) == 1 for page in node.pages)

    def _release(self, victims: list[Node], rank: dict[Node, Standing], keep: set[Node]) -> int:
        spill = [n for n in victims if n.saved is None and not n.pending and rank[n].best > UNREACHABLE]
        size = len(spill) * self._span * self._page_bytes
        worth = max((rank[node].best for node in spill), default=0.0)
        room = self.storage is not None and self._make_room(size, worth, keep | set(victims))
        before = self.allocator.free
        for node in victims:
            if node.dropped or node.pages is None:
                continue
            self.clock = max(self.clock, rank[node].best)
            if room and node in spill and self.storage is not None:
                self._set_host(node, self.storage.export(node.pages))
                self.stats.spilled_pages += len(node.pages)
            if node.host is not None or node.saved is not None or node.pending:
                self.allocator.release(node.pages)
                node.pages = None
            else:
                self._drop(node)
        freed = self.allocator.free - before
        self.stats.evicted_pages += freed
        return freed

    def _make_room(self, size: int, worth: float, keep: set[Node]) -> bool:
        """Bring host memory to at most `host_bytes - size` by giving up what is worth less than `worth`."""
        if size > self.host_bytes:
            return False
        while self.host_used + size > self.host_bytes:
            rank = self._rank()
            victims = sorted(
                (node for node in rank if node not in keep and (node.snapshot is not None or node.host is not None)),
                key=lambda node: (self._host_rank(rank[node], node), -node.length),
            )
            stale: set[Node] = set()  # ranked before something below them went
            for node in victims:
                value = self._host_rank(rank[node], node)
                if value >= worth or self.host_used + size <= self.host_bytes:
                    break
                if node.dropped or node in stale:
                    continue
                above = node.path()
                if self._give_up(node, rank[node], keep):
                    self.clock = max(self.clock, value)
                    stale.update(above)
            if not stale:
                return False
        return True

    @staticmethod
    def _host_rank(standing: Standing, node: Node) -> float:
        """A snapshot with others below it is judged by itself, a page's copy by the best snapshot it unlocks."""
        return standing.own if node.snapshot is not None and standing.deeper else standing.best

    def _give_up(self, node: Node, standing: Standing, keep: set[Node]) -> bool:
        """Free what `node` holds in host memory; True when something was freed."""
        if node.snapshot is not None and (standing.deeper or node.saved_state is not None):
            self._set_snapshot(node, None)
            self.stats.dropped_snapshots += 1
            return True
        if node.host is not None and node.saved is not None:
            self._set_host(node, None)
            return True
        if node.snapshot is None and standing.deeper:
            return False  # unlocks others that are ranked by themselves; it goes with the last of them
        if any(below in keep for below in node.subtree()):
            return False
        self._drop(node)
        return True

    def _drop(self, node: Node) -> None:
        """Remove `node` and everything below it from the tree, releasing the tree's references and host copies."""
        assert node.parent is not None
        del node.parent.children[node.key]
        for gone in node.subtree():
            if gone.pages is not None:
                self.allocator.release(gone.pages)
                gone.pages = None
            if gone.snapshot is not None:
                self.stats.dropped_snapshots += 1
            self._set_host(gone, None)
            self._set_snapshot(gone, None)
            gone.saved = gone.saved_state = None
            gone.dropped = True

    def _set_host(self, node: Node, planes: Planes | None) -> None:
        self.host_used -= sum(p.nbytes for p in node.host.values()) if node.host is not None else 0
        node.host = planes
        self.host_used += sum(p.nbytes for p in planes.values()) if planes is not None else 0

    def _set_snapshot(self, node: Node, snapshot: Snapshot | None) -> None:
        self.host_used -= node.snapshot.nbytes if node.snapshot is not None else 0
        node.snapshot = snapshot
        self.host_used += snapshot.nbytes if snapshot is not None else 0

    def clear(self) -> None:
        """Forget everything in memory; session files stay but are no longer found until the next start."""
        for start in self._roots.values():
            for child in list(start.children.values()):
                self._drop(child)

    def owned_pages(self) -> list[list[int]]:
        """The tree's references, one list per node, for `PageAllocator.check`."""
        return [list(node.pages) for node in self.nodes() if node.pages is not None]

    def check(self) -> None:
        """Assert the tree's integrity; callable at idle and in tests."""
        seen: set[int] = set()
        held = 0
        for node in self.nodes():
            assert not node.dropped, "a dropped node is still reachable"
            assert node.parent is not None and node.length == node.parent.length + self.grid
            assert node.present or node.pending, f"the block ending at {node.length} is nowhere"
            above = node.parent
            if node.pages is not None:
                assert above.parent is None or above.pages is not None, "GPU residency has a hole"
                assert len(node.pages) == self._span and not seen & set(node.pages), "a page is in two nodes"
                seen |= set(node.pages)
                assert all(self.allocator.references(page) >= 1 for page in node.pages), "a cached page is free"
            held += node.snapshot.nbytes if node.snapshot is not None else 0
            held += sum(p.nbytes for p in node.host.values()) if node.host is not None else 0
        assert held == self.host_used, f"host memory is {held} B but {self.host_used} B are counted"
