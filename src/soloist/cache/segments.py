"""One session file: a run of grid blocks and the snapshots on their path, self-describing and sealed.

A file is a safetensors file. Its metadata key "soloist" holds a JSON header: whose it is (`Identity`), which
prefix it continues (digests), which tokens it covers, and a digest of every tensor; "seal" is the digest of that
header. Tensors: "tokens" int64 [end - start], "kv.<plane>" [layers, end - start, ...], "state.<length>.<name>".

What can go wrong: a cut or altered file, one of another model, numerics, KV format or an older layout. All of
them raise SessionError with one line; nothing is read from a file whose digests do not agree.
"""

from __future__ import annotations

import hashlib
import json
import os
from array import array
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from soloist.cache.prefix import Planes, SessionError
from soloist.cache.snapshot import Snapshot
from soloist.cache.tree import chain

LAYOUT = 1
SUFFIX = ".session"


@dataclass(frozen=True)
class Identity:
    """A file is used only where all four agree: bits of another engine are not this engine's bits."""

    model: str
    numerics: str
    kv_format: str
    layout: int = LAYOUT


@dataclass(frozen=True)
class SegmentData:
    """What is to be written: tokens start .. end after the prefix `parent`, and states at grid points up to end."""

    root: bytes
    parent: bytes
    start: int
    tokens: array[int]
    grid: int
    planes: Planes
    states: tuple[Snapshot, ...]

    @property
    def end(self) -> int:
        return self.start + len(self.tokens)

    @property
    def nbytes(self) -> int:
        pages = sum(plane.nbytes for plane in self.planes.values())
        return pages + sum(state.nbytes for state in self.states) + 8 * len(self.tokens)

    @property
    def name(self) -> str:
        """File name: the prefix it ends at, plus what tells two files with the same end apart."""
        parts = [self.parent.hex(), str(self.start), *(str(state.length) for state in self.states)]
        tail = hashlib.blake2b(",".join(parts).encode(), digest_size=4).hexdigest()
        return f"{self.digests[-1].hex() if len(self.tokens) else self.parent.hex()}-{tail}{SUFFIX}"

    @property
    def digests(self) -> list[bytes]:
        return chain(self.parent, self.tokens, self.grid)


@dataclass(eq=False)
class Segment:
    """A file on disk. Compared by identity; `digests` are those of the blocks it covers."""

    path: Path
    root: bytes
    parent: bytes
    start: int
    end: int
    grid: int
    states: tuple[int, ...]
    nbytes: int
    tokens: array[int]
    used: float
    digests: list[bytes] = field(default_factory=list)


def _digest(name: str, tensor: torch.Tensor) -> str:
    """Covers name, dtype and shape as well as the bytes."""
    mark = hashlib.blake2b(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode(), digest_size=16)
    mark.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return mark.hexdigest()


def _digests(tensors: dict[str, torch.Tensor]) -> dict[str, str]:
    # hashlib releases the interpreter lock, so a large file is checked at the speed of several cores.
    with ThreadPoolExecutor(max_workers=min(8, os.cpu_count() or 1)) as pool:
        return dict(zip(tensors, pool.map(_digest, tensors.keys(), tensors.values()), strict=True))


def write_segment(directory: Path, identity: Identity, data: SegmentData) -> Segment:
    """Write one file so that it appears complete or not at all, durable when this returns. OSError on failure."""
    tensors = {"tokens": torch.tensor(list(data.tokens), dtype=torch.int64)}
    tensors |= {f"kv.{name}": plane.contiguous() for name, plane in data.planes.items()}
    for state in data.states:
        tensors |= {f"state.{state.length}.{name}": t.contiguous() for name, t in state.tensors.items()}
    header = json.dumps(
        asdict(identity)
        | {
            "root": data.root.hex(),
            "parent": data.parent.hex(),
            "start": data.start,
            "end": data.end,
            "grid": data.grid,
            "states": [state.length for state in data.states],
            "digests": _digests(tensors),
        },
        sort_keys=True,
    )
    seal = hashlib.blake2b(header.encode(), digest_size=16).hexdigest()
    path = directory / data.name
    scratch = directory / f"{data.name}.{os.getpid()}.tmp"
    try:
        save_file(tensors, scratch, metadata={"soloist": header, "seal": seal})
        with open(scratch, "rb") as file:
            os.fsync(file.fileno())
        os.replace(scratch, path)
        folder = os.open(directory, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
    except (OSError, SafetensorError) as error:
        scratch.unlink(missing_ok=True)
        raise OSError(str(error)) from error
    stat = path.stat()
    states = tuple(state.length for state in data.states)
    return Segment(
        path, data.root, data.parent, data.start, data.end, data.grid, states, stat.st_size, data.tokens,
        stat.st_mtime, data.digests,
    )  # fmt: skip


def _header(path: Path, identity: Identity | None) -> dict[str, object]:
    try:
        with safe_open(path, "pt") as file:
            metadata = file.metadata() or {}
            names = set(file.keys())
    except (OSError, SafetensorError) as error:
        raise SessionError(f"session file {path.name} is damaged ({error})") from None
    text = metadata.get("soloist", "")
    if not text or hashlib.blake2b(text.encode(), digest_size=16).hexdigest() != metadata.get("seal"):
        raise SessionError(f"session file {path.name} is damaged (its header does not match its seal)")
    header = json.loads(text)
    if header.get("layout") != LAYOUT:
        raise SessionError(f"session file {path.name} has layout version {header.get('layout')}, this is {LAYOUT}")
    if identity is not None:
        for key, value in asdict(identity).items():
            if header.get(key) != value:
                raise SessionError(f"session file {path.name} belongs to another {key} ({header.get(key)!r})")
    if names != set(header["digests"]):
        raise SessionError(f"session file {path.name} is damaged (tensors are missing)")
    return header


def _read(path: Path, wanted: str, header: dict[str, object]) -> dict[str, torch.Tensor]:
    """Tensors whose name starts with `wanted`, checked."""
    expected: dict[str, str] = header["digests"]  # type: ignore[assignment]
    try:
        with safe_open(path, "pt") as file:
            tensors = {name: file.get_tensor(name) for name in expected if name.startswith(wanted)}
    except (OSError, SafetensorError) as error:
        raise SessionError(f"session file {path.name} is damaged ({error})") from None
    for name, digest in _digests(tensors).items():
        if digest != expected[name]:
            raise SessionError(f"session file {path.name} is damaged ({name} does not match its checksum)")
    return tensors


def open_segment(path: Path, identity: Identity | None) -> Segment:
    """Header and tokens of a file; its KV and states are checked when they are read. `identity` None takes any."""
    header = _header(path, identity)
    tokens = array("q", _read(path, "tokens", header)["tokens"].tolist())
    start, end, grid = int(header["start"]), int(header["end"]), int(header["grid"])  # type: ignore[call-overload]
    if len(tokens) != end - start:
        raise SessionError(f"session file {path.name} is damaged ({len(tokens)} tokens for {start} .. {end})")
    parent = bytes.fromhex(str(header["parent"]))
    states: list[int] = header["states"]  # type: ignore[assignment]
    stat = path.stat()
    return Segment(
        path, bytes.fromhex(str(header["root"])), parent, start, end, grid, tuple(states), stat.st_size, tokens,
        stat.st_mtime, chain(parent, tokens, grid),
    )  # fmt: skip


def read_pages(segment: Segment, identity: Identity, start: int, end: int) -> Planes:
    """KV planes of tokens start .. end (absolute), [layers, end - start, ...] each."""
    tensors = _read(segment.path, "kv.", _header(segment.path, identity))
    first, last = start - segment.start, end - segment.start
    return {name[3:]: tensor[:, first:last] for name, tensor in tensors.items()}


def read_state(segment: Segment, identity: Identity, length: int) -> Snapshot:
    """The snapshot at `length`."""
    prefix = f"state.{length}."
    tensors = _read(segment.path, prefix, _header(segment.path, identity))
    if not tensors:
        raise SessionError(f"session file {segment.path.name} holds no state at {length}")
    return Snapshot(length, {name[len(prefix) :]: tensor for name, tensor in tensors.items()})


def verify_segment(path: Path) -> Segment:
    """Check every byte of a file of any model. Raises SessionError."""
    header = _header(path, None)
    _read(path, "", header)
    return open_segment(path, None)
