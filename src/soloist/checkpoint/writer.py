"""Writing a model directory: planned from shapes, filled tensor by tensor, visible only when complete.

The plan says which file holds which tensor, so every byte has its place before the first one is computed.
Work happens in `OUT.partial`: finished modules are noted in a journal, an interrupted run with the same plan
goes on behind the last note, and one rename makes the directory appear. Nothing at OUT is ever half-written.
Files of the source that do not change are hard-linked where possible; they are never opened for writing.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from soloist.checkpoint.shards import BESIDE, DTYPES, INDEX_NAME, TensorInfo
from soloist.errors import CapacityError, CheckpointError

DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
JOURNAL = "journal.jsonl"
COPY_CHUNK = 16 << 20


@dataclass(frozen=True)
class OutTensor:
    """A tensor to be written: stored name, dtype, shape; `source` if its bytes are copied unchanged."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    source: TensorInfo | None = None

    @property
    def nbytes(self) -> int:
        count = self.dtype.itemsize
        for size in self.shape:
            count *= size
        return count


@dataclass(frozen=True)
class OutFile:
    """One safetensors file of the plan. `link` names a source file that can stand in for it unchanged."""

    name: str
    tensors: tuple[OutTensor, ...]
    link: Path | None = None


def tensor_bytes(tensor: torch.Tensor) -> memoryview:
    """The raw bytes of a tensor of any dtype."""
    flat = tensor.detach().cpu().contiguous().view(-1)
    return flat.view(torch.uint8).numpy().data if flat.numel() else memoryview(b"")


def header_bytes(tensors: Sequence[OutTensor]) -> bytes:
    """A safetensors header for tensors laid out in this order, padded to 8 bytes."""
    table: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for tensor in tensors:
        end = offset + tensor.nbytes
        dtype = DTYPE_NAMES[tensor.dtype]
        table[tensor.name] = {"dtype": dtype, "shape": list(tensor.shape), "data_offsets": [offset, end]}
        offset = end
    raw = json.dumps(table, separators=(",", ":")).encode()
    raw += b" " * (-len(raw) % 8)
    return struct.pack("<Q", len(raw)) + raw


def index_text(listed: Mapping[str, tuple[str, int]]) -> str:
    """The index over tensors (name -> file, bytes), without those of `soloist.safetensors`."""
    named = {name: entry for name, entry in listed.items() if entry[0] != BESIDE}
    index = {
        "metadata": {"total_size": sum(nbytes for _, nbytes in named.values())},
        "weight_map": {name: file for name, (file, _) in named.items()},
    }
    return json.dumps(index, indent=1) + "\n"


def write_text_atomic(path: Path, text: str) -> None:
    """Replace a file in one step: written beside it, flushed to disk, renamed over it."""
    temporary = path.with_name(path.name + ".tmp")
    with temporary.open("w", encoding="utf-8") as handle:
        handle.write(text)
        handle.flush()
        os.fsync(handle.fileno())
    temporary.replace(path)


def write_file_atomic(path: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """Write one small safetensors file in one step."""
    plan = [OutTensor(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()]
    temporary = path.with_name(path.name + ".tmp")
    with temporary.open("wb") as handle:
        handle.write(header_bytes(plan))
        for tensor in tensors.values():
            handle.write(tensor_bytes(tensor))
        handle.flush()
        os.fsync(handle.fileno())
    temporary.replace(path)


class DirectoryWriter:
    """Fills a planned directory. Use as: `put`/`copy` tensors, `finished(key)` per module, then `commit`."""

    def __init__(self, out: Path, files: Sequence[OutFile], plan_key: str) -> None:
        """`plan_key` identifies source and recipe: only a partial directory with the same key is resumed."""
        if out.exists():
            raise CheckpointError(f"{out} exists already.", "Choose another --out, or remove that directory.")
        self.out = out
        self.partial = out.with_name(out.name + ".partial")
        self.files = files
        self._places: dict[str, tuple[Path, int, OutTensor]] = {}
        for file in files:
            offset = len(header_bytes(file.tensors))
            for tensor in file.tensors:
                self._places[tensor.name] = (self.partial / file.name, offset, tensor)
                offset += tensor.nbytes
        self._key = hashlib.sha256(json.dumps([plan_key, sorted(self._places)]).encode()).hexdigest()
        self.done: dict[str, dict[str, Any]] = {}
        self._unsynced: set[Path] = set()

    def open(self) -> None:
        """Create or resume the partial directory. Raises CapacityError if the disk cannot hold the result."""
        journal = self.partial / JOURNAL
        if journal.exists():
            lines = [line for line in journal.read_text(encoding="utf-8").splitlines() if line]
            if lines and json.loads(lines[0]) == {"plan": self._key}:
                self.done = {entry["done"]: entry.get("note", {}) for entry in map(_entry, lines[1:]) if entry}
                return
        if self.partial.exists():
            shutil.rmtree(self.partial)
        self.out.parent.mkdir(parents=True, exist_ok=True)
        need = sum(t.nbytes for file in self.files if file.link is None for t in file.tensors)
        free = shutil.disk_usage(self.out.parent).free
        if need > free:
            raise CapacityError(
                f"{self.out} needs {need / 1e9:.1f} GB, {free / 1e9:.1f} GB are free.", "Free space or choose --out."
            )
        self.partial.mkdir()
        for file in self.files:
            path = self.partial / file.name
            if file.link is not None:
                link_or_copy(file.link, path)
                continue
            header = header_bytes(file.tensors)
            with path.open("wb") as handle:
                handle.write(header)
                handle.truncate(len(header) + sum(tensor.nbytes for tensor in file.tensors))
        self._note({"plan": self._key})

    def put(self, name: str, values: torch.Tensor, row: int = 0) -> None:
        """Write `values` into tensor `name` from row `row` on; dtype and row width must be the planned ones."""
        path, offset, tensor = self._places[name]
        if values.dtype != tensor.dtype or tuple(values.shape[1:]) != tensor.shape[1:]:
            raise ValueError(f"{name}: planned {tensor.dtype} {tensor.shape}, got {values.dtype} {tuple(values.shape)}")
        row_bytes = tensor.nbytes // max(1, tensor.shape[0]) if tensor.shape else tensor.nbytes
        with path.open("r+b") as handle:
            handle.seek(offset + row * row_bytes)
            handle.write(tensor_bytes(values))
        self._unsynced.add(path)

    def get(self, name: str) -> torch.Tensor:
        """Read back a tensor that was put."""
        path, offset, tensor = self._places[name]
        with path.open("rb") as handle:
            handle.seek(offset)
            raw = bytearray(handle.read(tensor.nbytes))
        return torch.frombuffer(raw, dtype=tensor.dtype).view(tensor.shape)

    def copy(self, name: str) -> None:
        """Copy a tensor's bytes from its source file through a small buffer."""
        path, offset, tensor = self._places[name]
        if tensor.source is None:
            raise ValueError(f"{name} has no source to copy from")
        self._unsynced.add(path)
        with tensor.source.shard.path.open("rb") as source, path.open("r+b") as target:
            source.seek(tensor.source.start)
            target.seek(offset)
            left = tensor.nbytes
            while left:
                chunk = source.read(min(COPY_CHUNK, left))
                if not chunk:
                    raise CheckpointError(f"{tensor.source.shard.path} ended early.", "Download it again.")
                target.write(chunk)
                left -= len(chunk)

    def finished(self, key: str, note: dict[str, Any] | None = None) -> None:
        """Remember that everything under `key` is written, with a note for whoever resumes: the data reaches the disk
        before the note does."""
        for path in self._unsynced:
            with path.open("rb") as handle:
                os.fsync(handle.fileno())
        self._unsynced.clear()
        self.done[key] = note or {}
        self._note({"done": key, "note": self.done[key]})

    def commit(self, sidecars: Mapping[str, str], copies: Sequence[Path]) -> None:
        """Add text files and copied files, flush, drop the journal and rename the directory into place."""
        for file in self.files:
            if file.link is None:
                with (self.partial / file.name).open("rb") as handle:
                    os.fsync(handle.fileno())
        if len(self.files) > 1 or self.files[0].name != "model.safetensors":
            listed = {tensor.name: (file.name, tensor.nbytes) for file in self.files for tensor in file.tensors}
            (self.partial / INDEX_NAME).write_text(index_text(listed), encoding="utf-8")
        for path in copies:
            shutil.copyfile(path, self.partial / path.name)
        for name, text in sidecars.items():
            (self.partial / name).write_text(text, encoding="utf-8")
        (self.partial / JOURNAL).unlink()
        self.partial.rename(self.out)

    def _note(self, entry: dict[str, Any]) -> None:
        with (self.partial / JOURNAL).open("a", encoding="utf-8") as handle:
            handle.write(json.dumps(entry) + "\n")
            handle.flush()
            os.fsync(handle.fileno())


def _entry(line: str) -> dict[str, Any] | None:
    """A journal line, or None for the torn last line of a killed run."""
    try:
        entry = json.loads(line)
    except json.JSONDecodeError:
        return None
    return entry if isinstance(entry, dict) and "done" in entry else None


def link_or_copy(source: Path, target: Path) -> None:
    """Hard-link a file that will not change; copy it where links are impossible."""
    try:
        os.link(source.resolve(), target)
    except OSError:
        shutil.copyfile(source, target)
