"""Safetensors files: which tensors a directory holds, found from the headers alone, and their bytes.

A `Shard` knows its header and its true size; nothing else is read until `TensorInfo.view()`, which maps the
file and returns a tensor over the mapped pages (copy it before keeping it: `clone()` is the one copy a
weight makes on its way in). What can go wrong: an index that names what is not there, a shard cut short by
an interrupted download, the same tensor in two files. Each is one CheckpointError, before any weight is read.
"""

from __future__ import annotations

import json
import mmap
import struct
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from soloist.errors import CheckpointError

DTYPES: dict[str, torch.dtype] = {
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F32": torch.float32,
    "F64": torch.float64,
    "I8": torch.int8,
    "U8": torch.uint8,
    "I16": torch.int16,
    "I32": torch.int32,
    "I64": torch.int64,
    "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}
MAX_HEADER = 100 << 20
MAP_NORESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000 if sys.platform == "linux" else 0)  # named from Python 3.13 on
INDEX_NAME = "model.safetensors.index.json"
BESIDE = "soloist.safetensors"
"""What only Soloist reads: named by no index, so that other readers pass it by."""


@dataclass(eq=False)
class Shard:
    """One file: path, size in bytes, offset of the data section, raw header."""

    path: Path
    size: int
    data_start: int
    header: dict[str, Any]
    _map: mmap.mmap | None = field(default=None, repr=False)

    def bytes_at(self) -> mmap.mmap:
        """The mapped file. Private copy-on-write pages: nothing written through a view reaches the file.

        No swap is reserved for it, so that a file larger than the host's memory can be mapped.
        """
        if self._map is None:
            flags = mmap.MAP_PRIVATE | MAP_NORESERVE
            with self.path.open("rb") as handle:
                self._map = mmap.mmap(handle.fileno(), 0, flags=flags, prot=mmap.PROT_READ | mmap.PROT_WRITE)
        return self._map


@dataclass(frozen=True)
class TensorInfo:
    """Where one tensor lies: shard, dtype, shape, and [start, end) in bytes from the start of the file."""

    name: str
    shard: Shard
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    end: int

    @property
    def nbytes(self) -> int:
        return self.end - self.start

    @property
    def numel(self) -> int:
        count = 1
        for size in self.shape:
            count *= size
        return count

    def view(self) -> torch.Tensor:
        """The tensor over the mapped pages, in its stored dtype. Clone before keeping."""
        if self.numel == 0:
            return torch.empty(self.shape, dtype=self.dtype)
        flat = torch.frombuffer(self.shard.bytes_at(), dtype=self.dtype, count=self.numel, offset=self.start)
        return flat.view(self.shape)


def _no_duplicates(path: Path) -> Any:
    def build(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        table: dict[str, Any] = {}
        for key, value in pairs:
            if key in table:
                raise CheckpointError(f"{path} names {key} twice.", "Write the file again; duplicates are ambiguous.")
            table[key] = value
        return table

    return build


def read_shard(path: Path) -> Shard:
    """Parse one header and check every offset against the file's size. Raises CheckpointError."""
    again = f"Download {path.name} again; `soloist fetch` resumes and checks sizes."
    try:
        size = path.stat().st_size
    except FileNotFoundError:
        raise CheckpointError(f"{path.parent} lacks the shard {path.name}.", again) from None
    with path.open("rb") as handle:
        prefix = handle.read(8)
        length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else -1
        if not 2 <= length <= min(MAX_HEADER, size - 8):
            raise CheckpointError(f"{path} is truncated or not a safetensors file ({size} bytes).", again)
        raw = handle.read(length)
    try:
        header = json.loads(raw.decode("utf-8"), object_pairs_hook=_no_duplicates(path))
    except (UnicodeDecodeError, json.JSONDecodeError):
        raise CheckpointError(f"{path} has a damaged safetensors header.", again) from None
    header.pop("__metadata__", None)
    shard = Shard(path, size, 8 + length, header)
    for name in header:
        info = tensor_info(shard, name)
        if info.end > size:
            missing = max(int(entry["data_offsets"][1]) for entry in header.values()) + shard.data_start - size
            raise CheckpointError(f"{path} is truncated: {missing} bytes are missing (first at {name}).", again)
    return shard


def tensor_info(shard: Shard, name: str) -> TensorInfo:
    """Locate one tensor of a parsed shard; checks dtype, shape and offsets against each other."""
    try:
        entry = shard.header[name]
        dtype_name, shape = str(entry["dtype"]), tuple(int(n) for n in entry["shape"])
        start, end = (int(n) + shard.data_start for n in entry["data_offsets"])
    except (KeyError, TypeError, ValueError):
        raise CheckpointError(f"{shard.path}: the header entry of {name} is damaged.", "Download it again.") from None
    if dtype_name not in DTYPES:
        raise CheckpointError(
            f"{shard.path}: {name} has the unknown dtype {dtype_name}.", f"Known: {', '.join(DTYPES)}."
        )
    info = TensorInfo(name, shard, DTYPES[dtype_name], shape, start, end)
    if min(shape, default=0) < 0 or info.nbytes != info.numel * info.dtype.itemsize or start < shard.data_start:
        raise CheckpointError(
            f"{shard.path}: {name} {dtype_name} {list(shape)} does not fill its {info.nbytes} bytes.",
            "Download it again.",
        )
    return info


def read_directory(directory: Path) -> dict[str, TensorInfo]:
    """Every tensor of a model directory by its stored name.

    With `model.safetensors.index.json` the index is authoritative: tensors of a named shard that it does not
    list are ignored. Without one, all `*.safetensors` files of the directory are read but `BESIDE`. A tensor that
    two of the files in use hold is an error either way.
    """
    index = directory / INDEX_NAME
    weight_map: dict[str, str] | None = None
    if index.exists():
        try:
            table = json.loads(index.read_text(encoding="utf-8"), object_pairs_hook=_no_duplicates(index))
            weight_map = {str(name): str(file) for name, file in table["weight_map"].items()}
        except (UnicodeDecodeError, json.JSONDecodeError, KeyError, AttributeError, TypeError):
            raise CheckpointError(f"{index} is not a safetensors index.", "Download the file again.") from None
        files = sorted(set(weight_map.values()))
        outside = [file for file in files if Path(file).name != file]
        if outside:
            raise CheckpointError(f"{index} points outside the directory: {outside[0]}.", "Use plain file names.")
    else:
        files = sorted(path.name for path in directory.glob("*.safetensors") if path.name != BESIDE)
        if not files:
            raise CheckpointError(
                f"{directory} has no safetensors weights.", "Point MODEL at a Hugging Face model directory."
            )
    tensors: dict[str, TensorInfo] = {}
    for file in files:
        shard = read_shard(directory / file)
        for name in shard.header:
            if weight_map is not None and name not in weight_map:
                continue
            if name in tensors:
                raise CheckpointError(
                    f"{directory}: {name} is in {tensors[name].shard.path.name} and in {file}.",
                    "Remove one of the two files, or list only one in the index.",
                )
            tensors[name] = tensor_info(shard, name)
    for name, file in (weight_map or {}).items():
        if name not in tensors or tensors[name].shard.path.name != file:
            raise CheckpointError(
                f"{directory / file} lacks {name}, which the index places there.",
                f"Download {file} and {INDEX_NAME} again, from the same revision.",
            )
    return tensors


def read_beside(directory: Path) -> dict[str, TensorInfo]:
    """The tensors of `soloist.safetensors` by their canonical names; none if there is no such file."""
    path = directory / BESIDE
    if not path.exists():
        return {}
    shard = read_shard(path)
    return {name: tensor_info(shard, name) for name in shard.header}
