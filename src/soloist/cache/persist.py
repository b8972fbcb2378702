"""Between the prefix tree and the session directory: what to save after a turn, what to find after a start.

Runs on the engine thread; the writer thread only leaves its results in a queue that `poll` empties.
"""

from __future__ import annotations

import queue
from array import array
from collections.abc import Sequence

import torch

from soloist.cache.prefix import Planes, PrefixCache
from soloist.cache.segments import Segment, SegmentData
from soloist.cache.sessions import SessionStore
from soloist.cache.tree import Node, Trail, root_for

STATES = 4  # snapshots saved with a turn: the deepest ones, for branches near its end


class Persister:
    """Saves prefixes of `cache` into `store` and rebuilds the tree from it."""

    def __init__(self, cache: PrefixCache, store: SessionStore) -> None:
        self.cache = cache
        self.store = store
        cache.sessions = store
        self._results: queue.SimpleQueue[tuple[SegmentData | None, Segment | None]] = queue.SimpleQueue()
        self._jobs: dict[int, tuple[list[Node], list[Node]]] = {}
        self._pending_states: set[Node] = set()
        store.written = lambda data, segment: self._results.put((data, segment))
        store.removed = lambda segment: self._results.put((None, segment))

    def save(self, tokens: Sequence[int] | Trail, length: int, salt: str = "") -> int:
        """Queue the blocks up to `length` that are not on disk yet, with the deepest snapshots; returns their bytes."""
        self.poll()
        cache = self.cache
        trail = tokens if isinstance(tokens, Trail) else cache.trail(tokens, salt)
        path = trail.follow(length // cache.grid)
        while path and not path[-1].resumable:
            path.pop()
        fresh = [node for node in path if node.saved is None and not node.pending]
        # A hole (a saved block below an unsaved one) cannot be continued: everything from the first gap on is new.
        first = path.index(fresh[0]) if fresh else len(path)
        blocks = path[first:]
        states = [node for node in path if node.snapshot is not None][-STATES:]
        states = [node for node in states if node.saved_state is None and node not in self._pending_states]
        if (not blocks and not states) or cache.storage is None:
            return 0
        planes = self._planes(blocks)
        if planes is None:
            return 0
        parent = path[first - 1] if first else trail.root
        data = SegmentData(
            root=trail.root.digest,
            parent=parent.digest,
            start=parent.length,
            tokens=trail.tokens(parent.length, path[-1].length if blocks else parent.length),
            grid=cache.grid,
            planes=planes,
            states=tuple(node.snapshot for node in states if node.snapshot is not None),
        )
        for node in blocks:
            node.pending = True
        self._pending_states.update(states)
        self._jobs[id(data)] = (blocks, states)
        self.store.submit(data)
        return data.nbytes

    def _planes(self, blocks: list[Node]) -> Planes | None:
        """Host copies of the blocks' KV, joined along the tokens. None when a block is only in another file."""
        assert self.cache.storage is not None
        parts: list[Planes] = []
        run: list[int] = []
        for node in blocks:
            if node.pages is not None:
                run.extend(node.pages)
                continue
            if run:
                parts.append(self.cache.storage.export(run))
                run = []
            if node.host is None:
                return None
            parts.append(node.host)
        if run:
            parts.append(self.cache.storage.export(run))
        names = parts[0].keys() if parts else ()
        return {name: torch.cat([part[name] for part in parts], dim=1) for name in names}

    def poll(self) -> None:
        """Take over what the writer thread has finished since the last call. Cheap; call it when idle."""
        while True:
            try:
                data, segment = self._results.get_nowait()
            except queue.Empty:
                return
            if data is None:
                assert segment is not None
                self.cache.forget_segment(segment)
                continue
            blocks, states = self._jobs.pop(id(data))
            self._pending_states.difference_update(states)
            for node in blocks:
                node.pending = False
                if segment is not None and not node.dropped:
                    node.saved = (segment, node.length - self.cache.grid)
            for node in states:
                if segment is not None and not node.dropped:
                    node.saved_state = segment
            if segment is None:
                self.cache.prune()

    def close(self) -> None:
        """Wait for the writer and stop it."""
        self.store.close()
        self.poll()

    def restore(self) -> int:
        """Hang every usable session file into the tree; returns the tokens that became reachable. Reads no KV."""
        known: dict[bytes, Node] = {node.digest: node for node in self.cache.nodes()}
        tokens = 0
        for segment in self.store.scan():
            if segment.grid != self.cache.grid:
                continue
            start = self.cache.adopt_root(root_for(segment.root))
            parent = start if segment.parent == segment.root else known.get(segment.parent)
            if parent is None:
                continue
            path = [*parent.path(), *self._hang(segment, parent, known)]
            tokens += len(segment.tokens)
            for length in segment.states:
                path[length // self.cache.grid - 1].saved_state = segment
        self.cache.prune()
        return tokens

    def _hang(self, segment: Segment, parent: Node, known: dict[bytes, Node]) -> list[Node]:
        nodes: list[Node] = []
        for at in range(0, len(segment.tokens), self.cache.grid):
            block: array[int] = segment.tokens[at : at + self.cache.grid]
            parent = parent.child(block.tobytes())
            parent.saved = parent.saved or (segment, segment.start + at)
            known[parent.digest] = parent
            nodes.append(parent)
        return nodes
