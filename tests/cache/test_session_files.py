"""Damaged, foreign and old session files are refused with one line, and nothing is ever half-written."""

from __future__ import annotations

import contextlib
import json
import logging
import resource
import subprocess
import sys
from array import array
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from cache.arms import Arm, text
from soloist.cache import segments
from soloist.cache.prefix import SessionError
from soloist.cache.segments import Identity, SegmentData, open_segment, read_pages, read_state, write_segment
from soloist.cache.sessions import SessionStore
from soloist.cache.snapshot import Snapshot
from soloist.cache.tree import chain, root
from tiny import build_tiny

VOCAB = 256
ME = Identity("model", "numerics", "target=bf16")
ROOT = root("").digest


def _data(start: int = 0, blocks: int = 2, parent: bytes = ROOT, seed: int = 0) -> SegmentData:
    g = torch.Generator().manual_seed(seed)
    tokens = array("q", torch.randint(0, 1000, (blocks * 64,), generator=g).tolist())
    planes = {
        "target.k.data": torch.randn(2, blocks * 64, 1, 8, generator=g).to(torch.bfloat16),
        "target.v.data": torch.randn(2, blocks * 64, 1, 8, generator=g).to(torch.float8_e4m3fn),
    }
    end = start + blocks * 64
    state = Snapshot(end, {"state.0": torch.randn(4, 8, generator=g), "mtp.hidden": torch.randn(8, generator=g)})
    return SegmentData(ROOT, parent, start, tokens, 64, planes, (state,))


def test_a_file_gives_back_every_bit(tmp_path: Path) -> None:
    data = _data()
    write_segment(tmp_path, ME, data)
    (path,) = tmp_path.iterdir()
    segment = open_segment(path, ME)
    assert (segment.start, segment.end, segment.states) == (0, 128, (128,)) and segment.tokens == data.tokens
    assert segment.digests == chain(ROOT, data.tokens, 64)
    part = read_pages(segment, ME, 64, 128)
    for name, plane in data.planes.items():
        assert torch.equal(part[name].view(torch.uint8), plane[:, 64:].view(torch.uint8))
    state = read_state(segment, ME, 128)
    assert all(torch.equal(state.tensors[n], t) for n, t in data.states[0].tensors.items())


def _everything(path: Path) -> None:
    segment = open_segment(path, ME)
    read_pages(segment, ME, 0, 128)
    read_state(segment, ME, 128)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    write_segment(tmp_path, ME, _data())
    (path,) = tmp_path.iterdir()
    return path


def test_any_flipped_byte_is_found(file: Path) -> None:
    good = file.read_bytes()
    for at in range(0, len(good), 97):
        file.write_bytes(good[:at] + bytes([good[at] ^ 0x10]) + good[at + 1 :])
        with pytest.raises(SessionError, match=r"^session file [^\n]*$"):
            _everything(file)
    file.write_bytes(good)
    _everything(file)


@pytest.mark.parametrize("keep", [0, 7, 100, 0.5, -1])
def test_a_cut_file_is_refused(file: Path, keep: float) -> None:
    good = file.read_bytes()
    file.write_bytes(good[: int(keep * len(good)) if 0 < keep < 1 else int(keep)])
    with pytest.raises(SessionError, match="damaged"):
        _everything(file)


@pytest.mark.parametrize("field", ["model", "numerics", "kv_format"])
def test_foreign_files_say_what_differs(file: Path, field: str) -> None:
    with pytest.raises(SessionError, match=f"belongs to another {field}"):
        open_segment(file, replace(ME, **{field: "other"}))


def test_an_older_layout_is_refused(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segments, "LAYOUT", segments.LAYOUT + 1)
    with pytest.raises(SessionError, match="layout version 1, this is 2"):
        open_segment(file, replace(ME, layout=2))


def test_a_header_cannot_be_edited(file: Path) -> None:
    """Changing the identity in the header without its seal is damage, not another model."""
    with safe_open(file, "pt") as handle:
        metadata = dict(handle.metadata())
    tensors = load_file(file)
    metadata["soloist"] = json.dumps(json.loads(metadata["soloist"]) | {"model": "mine"})
    save_file(tensors, file, metadata)
    with pytest.raises(SessionError, match="seal"):
        open_segment(file, replace(ME, model="mine"))


@pytest.fixture
def store(tmp_path: Path) -> Iterator[SessionStore]:
    store = SessionStore(tmp_path / "sessions", ME, capacity=1 << 20)
    yield store
    store.close()


def _submit(store: SessionStore, *data: SegmentData) -> list[bool]:
    results: list[bool] = []
    store.written = lambda _, segment: results.append(segment is not None)
    for part in data:
        store.submit(part)
    assert store.flush(20)
    return results


def test_chains_survive_and_orphans_go(store: SessionStore, caplog: pytest.LogCaptureFixture) -> None:
    first = _data()
    second = _data(128, 1, first.digests[-1], seed=1)
    assert _submit(store, first, second) == [True, True]
    assert [(s.start, s.end) for s in store.scan()] == [(0, 128), (128, 192)]
    (store.directory / first.name).unlink()
    with caplog.at_level(logging.WARNING):
        assert store.scan() == []
    assert "gone" in caplog.text and not list(store.directory.iterdir())


def test_the_size_cap_removes_the_oldest_leaf(tmp_path: Path) -> None:
    size = write_segment(tmp_path, ME, _data()).nbytes
    store = SessionStore(tmp_path / "capped", ME, capacity=int(3.5 * size))
    removed: list[Path] = []
    store.removed = lambda segment: removed.append(segment.path)
    old, kept = _data(seed=1), _data(seed=2)
    child = _data(128, 2, kept.digests[-1], seed=3)
    assert _submit(store, old, kept, child, _data(256, 2, child.digests[-1], seed=4)) == [True] * 4
    assert [path.name for path in removed] == [old.name]
    assert store.nbytes <= store.capacity
    store.close()


def test_a_full_disk_costs_only_the_saving(store: SessionStore, caplog: pytest.LogCaptureFixture) -> None:
    """The file system refuses to write past a few hundred bytes: nothing is left behind, one line is logged."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        with caplog.at_level(logging.WARNING):
            resource.setrlimit(resource.RLIMIT_FSIZE, (512, hard))
            first = _data()
            assert _submit(store, first, _data(128, 1, first.digests[-1], seed=1)) == [False, False]
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert len([r for r in caplog.records if "session not saved" in r.message]) == 1
    assert list(store.directory.iterdir()) == []
    assert _submit(store, first, _data(128, 1, first.digests[-1], seed=1)) == [True, True]


def test_a_killed_writer_leaves_nothing_usable(store: SessionStore) -> None:
    code = f"""
import sys, os, signal
sys.path[:0] = {sys.path!r}
from pathlib import Path
from cache import test_session_files as t
t.segments.os.replace = lambda a, b: os.kill(os.getpid(), signal.SIGKILL)
t.write_segment(Path({str(store.directory)!r}), t.ME, t._data())
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == -9, done.stderr
    assert len(list(store.directory.glob("*.tmp"))) == 1
    assert store.scan() == [] and list(store.directory.iterdir()) == []


DAMAGE = {
    "cut": "damaged",
    "flipped": "damaged",
    "empty": "damaged",
    "other model": "belongs to another model",
    "other format": "belongs to another kv_format",
    "older version": "layout version",
    "disk full": "session not saved",
}


def _damage(kind: str, path: Path) -> None:
    raw = path.read_bytes()
    if kind == "cut":
        path.write_bytes(raw[: len(raw) // 2])
    elif kind == "flipped":
        # The last bytes belong to a KV plane or a state: the header stays whole, so it is found on use.
        path.write_bytes(raw[:-40] + bytes([raw[-40] ^ 1]) + raw[-39:])
    elif kind == "empty":
        path.write_bytes(b"")


@contextlib.contextmanager
def _writes_end_after(nbytes: int) -> Iterator[None]:
    """The file system takes no more than so many bytes of any file."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("kind", DAMAGE)
def test_an_engine_answers_right_after_damage(
    tiny_model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """One clear line, the cold answer, nothing half-written; and the next session is saved as ever."""
    prompt, where = text(200, VOCAB, 91), tmp_path / "s"
    knobs = {"spec": "none", "lookup": "0", "session_dir": str(where)}
    model, saving = tiny_model, contextlib.nullcontext()
    if kind == "disk full":
        saving = _writes_end_after(512)
    with caplog.at_level(logging.WARNING), Arm(model, **knobs) as arm:
        expected = arm.ask(prompt)
        with saving:
            arm.quiet()
    for path in where.iterdir():
        _damage(kind, path)
    if kind == "other model":
        model = build_tiny(tmp_path / "other", seed=5)
    elif kind == "other format":
        knobs["kv_format"] = "int8"
    elif kind == "older version":
        monkeypatch.setattr(segments, "LAYOUT", segments.LAYOUT + 1)
        monkeypatch.setattr(Identity.__init__, "__defaults__", (segments.LAYOUT,))
    if kind in ("other model", "other format"):
        with Arm(model, **{**knobs, "session_dir": "none", "prefix_cache": "0"}) as arm:
            expected = arm.ask(prompt)
    with caplog.at_level(logging.WARNING), Arm(model, **knobs) as arm:
        answer = arm.ask(prompt)
        assert answer.bits == expected.bits and answer.cached == 0
        arm.quiet()
    lines = [r.getMessage() for r in caplog.records if "session" in r.getMessage()]
    assert len(lines) == 1 and "\n" not in lines[0] and DAMAGE[kind] in lines[0]
    assert all(path.suffix == segments.SUFFIX for path in where.iterdir()), "something half-written was left"
    with Arm(model, **knobs) as arm:  # saved anew, over or beside what was refused
        assert arm.ask(prompt).cached == 192
