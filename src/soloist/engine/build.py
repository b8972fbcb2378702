"""From settings to a running engine: the one place where the rooms are put together."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import torch

from soloist.cache.codecs import DenseCodec
from soloist.cache.kv import KVStore
from soloist.cache.pages import PAGE, PageAllocator, pages_for
from soloist.cache.recurrent import RecurrentState, StateShapes
from soloist.checkpoint.reader import Checkpoint, open_checkpoint
from soloist.engine.engine import Engine
from soloist.engine.memory import Memory
from soloist.engine.speculation import NoSpeculation
from soloist.errors import SettingError
from soloist.models.layers import Loader
from soloist.models.qwen3_5 import Qwen35
from soloist.settings import Settings

Progress = Callable[[str, int, int], None]

CPU_CONTEXT = 8192  # MAX_LEN=auto on a CPU: more than anyone waits for
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def model_directory(name: str) -> Path:
    """`demo` is the bundled model; anything else is a directory."""
    if name == "demo":
        from soloist.demo import path

        return path()
    return Path(name).expanduser()


def build_engine(settings: Settings, progress: Progress | None = None) -> Engine:
    """Open, load and start. `progress(what, done, total)` follows the loading; raises a UserError before weights are
    read where anything about the model directory or the knobs is wrong."""
    checkpoint = open_checkpoint(model_directory(settings.model))
    device = _device(settings)
    dtype = _dtype(settings, device)
    torch.set_num_threads(settings.threads or os.cpu_count() or 1)
    torch.set_grad_enabled(False)
    max_len = _context(settings, checkpoint)
    load = Loader(checkpoint, device, dtype, settings.linear)
    model = Qwen35(load, checkpoint.config, progress and (lambda done, total: progress("layers", done, total)))
    memory = _memory(settings, checkpoint, device, dtype, max_len)
    return Engine(
        model,
        memory,
        NoSpeculation(),
        max_len=max_len,
        max_queue=settings.max_queue,
        prefill_slice_ms=settings.prefill_slice_ms,
        verify_rows=16,
        sampler=settings.sampler,
        knobs={"device": str(device), "dtype": str(dtype).removeprefix("torch."), "linear": model.product},
    )


def _device(settings: Settings) -> torch.device:
    if settings.device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if settings.device == "cuda" and not torch.cuda.is_available():
        raise SettingError("DEVICE=cuda, but torch sees no CUDA device.", "Install a CUDA build of torch or use cpu.")
    return torch.device(settings.device)


def _dtype(settings: Settings, device: torch.device) -> torch.dtype:
    if settings.dtype != "auto":
        return DTYPES[settings.dtype]
    return torch.float32 if device.type == "cpu" else torch.bfloat16


def _context(settings: Settings, checkpoint: Checkpoint) -> int:
    limit = checkpoint.config.max_position
    if settings.max_len == "auto":
        return min(limit, CPU_CONTEXT)
    if settings.max_len > limit:
        raise SettingError(
            f"MAX_LEN={settings.max_len} is more than the model's {limit} positions.", f"Set MAX_LEN={limit} or less."
        )
    return settings.max_len


def _memory(
    settings: Settings, checkpoint: Checkpoint, device: torch.device, dtype: torch.dtype, max_len: int
) -> Memory:
    c = checkpoint.config
    pages = pages_for(max_len) * min(settings.max_seqs, 4) + settings.max_seqs
    codec = DenseCodec(dtype, str(dtype).removeprefix("torch."))
    kv = KVStore(
        layers=len(c.attention_layers),
        kv_heads=c.num_kv_heads,
        head_dim=c.head_dim,
        pages=pages,
        codec_k=codec,
        codec_v=codec,
        dtype=dtype,
        device=device,
    )
    shapes = StateShapes(
        len(c.linear_layers),
        c.linear_value_heads,
        c.linear_key_dim,
        c.linear_value_dim,
        c.conv_channels,
        c.conv_kernel,
    )
    state = RecurrentState(shapes, settings.max_seqs, DTYPES[settings.state_dtype], dtype, device)
    return Memory(kv, state, PageAllocator(pages), reserve=min(2048, max_len // 4 // PAGE * PAGE))
