"""The session directory: the tier that survives a restart.

Files (`cache/segments.py`) are written by one background thread, so that a turn is durable within
SESSION_FLUSH_S without the engine waiting for a disk. The directory is kept under SESSION_CACHE_GB by
removing the least recently used files that no other file continues.

What can go wrong: the disk fills up, someone removes files, two servers share a directory. A failed write
is reported once and costs nothing but the saving; a vanished file is a miss.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import queue
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from soloist.cache.prefix import Planes, SessionError
from soloist.cache.segments import (
    SUFFIX,
    Identity,
    Segment,
    SegmentData,
    open_segment,
    read_pages,
    read_state,
    write_segment,
)
from soloist.cache.snapshot import Snapshot

log = logging.getLogger(__name__)


class SessionStore:
    """Session files of one engine identity under one directory.

    `written` is called from the writer thread with (data, segment or None); `removed` with a segment that made
    room for another. Both must only hand over to the engine thread.
    """

    def __init__(self, directory: str | Path, identity: Identity, capacity: int, flush_s: float = 2.0) -> None:
        self.directory = Path(directory)
        self.identity = identity
        self.capacity = capacity
        self.flush_s = flush_s
        self.written: Callable[[SegmentData, Segment | None], None] = lambda data, segment: None
        self.removed: Callable[[Segment], None] = lambda segment: None
        self._lock = threading.Lock()
        self._segments: list[Segment] = []
        self._queue: queue.Queue[SegmentData | None] = queue.Queue()
        self._failed: set[bytes] = set()  # ends of prefixes whose write failed: nothing can continue them
        self._quiet = False
        self.directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._thread = threading.Thread(target=self._run, name="session-writer", daemon=True)
        self._thread.start()

    @property
    def nbytes(self) -> int:
        with self._lock:
            return sum(segment.nbytes for segment in self._segments)

    def scan(self) -> list[Segment]:
        """Usable files, parents before children. Foreign and damaged ones are refused, one log line per reason."""
        self._sweep()
        found: list[Segment] = []
        refused: dict[str, int] = {}
        for path in sorted(self.directory.glob(f"*{SUFFIX}")):
            try:
                found.append(open_segment(path, self.identity))
            except SessionError as error:
                reason = str(error).replace(path.name, "{}")
                refused[reason] = refused.get(reason, 0) + 1
                if refused[reason] == 1:
                    log.warning("%s; it is not used (see: soloist sessions verify)", error)
        for reason, count in refused.items():
            if count > 1:
                log.warning("%d more session files refused for the same reason: %s", count - 1, reason.format("*"))
        usable: list[Segment] = []
        known: set[bytes] = set()
        for segment in sorted(found, key=lambda s: (s.start, s.end)):
            if segment.parent == segment.root or segment.parent in known:
                known.update(segment.digests)
                usable.append(segment)
            else:
                log.warning("session file %s continues a prefix that is gone; removed", segment.path.name)
                segment.path.unlink(missing_ok=True)
        with self._lock:
            self._segments = list(usable)
        return usable

    def _sweep(self) -> None:
        """Remove what a killed writer left behind."""
        for path in self.directory.glob(f"*{SUFFIX}.*.tmp"):
            owner = path.name.split(".")[-2]
            if not owner.isdigit() or int(owner) == os.getpid() or not Path(f"/proc/{owner}").exists():
                path.unlink(missing_ok=True)

    def submit(self, data: SegmentData) -> None:
        """Queue one segment; the answer comes through `written`."""
        self._queue.put(data)

    def flush(self, timeout: float | None = None) -> bool:
        """Wait until everything submitted so far is on disk or has failed."""
        deadline = None if timeout is None else time.monotonic() + timeout
        with self._queue.all_tasks_done:
            while self._queue.unfinished_tasks:
                left = None if deadline is None else deadline - time.monotonic()
                if left is not None and left <= 0:
                    return False
                self._queue.all_tasks_done.wait(left)
        return True

    def close(self) -> None:
        """Write what is queued and stop."""
        self._queue.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (data := self._queue.get()) is not None:
            try:
                self.written(data, self._write(data))
            except Exception:
                log.exception("session writer")
                self.written(data, None)
            finally:
                self._queue.task_done()
        self._queue.task_done()

    def _write(self, data: SegmentData) -> Segment | None:
        if data.parent in self._failed or (data.nbytes > self.capacity and self._complain("SESSION_CACHE_GB is full")):
            self._failed.update(data.digests)
            return None
        began = time.monotonic()
        self._trim(data.nbytes, data)
        try:
            try:
                segment = write_segment(self.directory, self.identity, data)
            except OSError as error:
                # Another program may have filled the disk: our oldest half makes room once, then we give up.
                if error.errno not in (None, errno.ENOSPC, errno.EDQUOT) or not self._trim(self.capacity // 2, data):
                    raise
                segment = write_segment(self.directory, self.identity, data)
        except OSError as error:
            self._complain(str(error))
            self._failed.update(data.digests)
            return None
        self._quiet = False
        self._failed.difference_update(data.digests)
        with self._lock:
            self._segments = [s for s in self._segments if s.path != segment.path] + [segment]
        took = time.monotonic() - began
        if took > self.flush_s:
            log.warning("writing %s took %.1f s, longer than SESSION_FLUSH_S = %g", segment.path, took, self.flush_s)
        return segment

    def _complain(self, reason: str) -> bool:
        if not self._quiet:
            log.warning("session not saved in %s: %s; it stays in memory only", self.directory, reason)
        self._quiet = True
        return True

    def _trim(self, room: int, data: SegmentData) -> bool:
        """Remove least recently used leaves until `room` more bytes fit under the capacity; True if any went."""
        gone: list[Segment] = []
        with self._lock:
            while sum(s.nbytes for s in self._segments) + room > self.capacity:
                parents = {s.parent for s in self._segments} | {data.parent}
                leaves = [s for s in self._segments if not parents & set(s.digests)]
                if not leaves:
                    break
                oldest = min(leaves, key=lambda s: s.used)
                self._segments.remove(oldest)
                gone.append(oldest)
        for segment in gone:
            segment.path.unlink(missing_ok=True)
            self.removed(segment)
        return bool(gone)

    def read_pages(self, segment: object, start: int, end: int) -> Planes:
        """KV planes of tokens start .. end of a segment. SessionError when the file is gone or damaged."""
        assert isinstance(segment, Segment)
        self._touch(segment)
        with self._forgetting(segment):
            return read_pages(segment, self.identity, start, end)

    def read_state(self, segment: object, length: int) -> Snapshot:
        """The snapshot at `length` of a segment. SessionError as above."""
        assert isinstance(segment, Segment)
        self._touch(segment)
        with self._forgetting(segment):
            return read_state(segment, self.identity, length)

    @contextlib.contextmanager
    def _forgetting(self, segment: Segment) -> Iterator[None]:
        """A file that cannot be read is not listed any more; it stays for `soloist sessions verify`."""
        try:
            yield
        except SessionError:
            with self._lock, contextlib.suppress(ValueError):
                self._segments.remove(segment)
            raise

    def _touch(self, segment: Segment) -> None:
        segment.used = time.time()
        with contextlib.suppress(OSError):
            os.utime(segment.path)
