"""How much of everything an engine allocates: KV formats, pool pages, longest context.

On a card the free memory at boot decides; on a CPU the pool holds four requests of full length. Everything
is allocated once, here; nothing allocates later.
"""

from __future__ import annotations

import gc
import os
from pathlib import Path

import torch

from soloist.cache.pages import PAGE, pages_for
from soloist.checkpoint.config import DrafterConfig
from soloist.checkpoint.reader import Checkpoint, open_checkpoint
from soloist.engine.drafters import drafter_directory, drafter_kind
from soloist.errors import CapacityError, SettingError
from soloist.planner import (
    BYTES,
    GRAPHS,
    MIB,
    Choices,
    draft_items,
    kv_token_bytes,
    pool_pages,
    slot_items,
    step_items,
    vision_items,
    weight_items,
)
from soloist.settings import Settings

CPU_CONTEXT = 8192  # MAX_LEN=auto on a CPU: more than anyone waits for
CPU_RESIDENTS = 4
PROFILES = {"fast": "", "long": "fp8", "huge": "kvarn"}
SHORT = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}


def kv_formats(settings: Settings, dtype: str, device: torch.device | None = None) -> tuple[str, str]:
    """Formats of keys and values. `dtype` is the compute type; without a device the card is assumed to know fp8."""
    key: str = settings.kv_format
    if key == "auto":
        key = PROFILES.get(settings.ctx, "") or SHORT[dtype]
        if key == "fp8" and device is not None and device.type == "cuda" and not _knows_fp8(device):
            key = "int8"
    value = key if settings.kv_format_v == "same" else settings.kv_format_v
    if key == "kvarn" and value != "kvarn":
        raise SettingError(
            "KV_FORMAT=kvarn packs keys and values together.", "Leave KV_FORMAT_V out, or choose another KV_FORMAT."
        )
    return key, value


def _knows_fp8(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device) >= (8, 9)


def choices(settings: Settings, checkpoint: Checkpoint, dtype: str, device: torch.device | None = None) -> Choices:
    """The knobs that cost memory, as the planner takes them."""
    key, value = kv_formats(settings, dtype, device)
    return Choices(
        spec=drafter_kind(settings, checkpoint),
        kv_format=key,
        kv_format_v=value,
        state_dtype=settings.state_dtype,
        dtype=dtype,
        max_seqs=settings.max_seqs,
        verify_rows=settings.verify_rows,
        reserve=settings.reserve_mb * MIB,
        tower=sum(info.numel for info in checkpoint.visual.values()) * BYTES[dtype] if settings.vision else 0,
        offload=settings.vision_offload,
        pixels=settings.vision_max_pixels,
        pictures=settings.vision_max_images,
    )


def drafter_of(settings: Settings, checkpoint: Checkpoint, chosen: Choices) -> tuple[DrafterConfig | None, int]:
    """Config and bytes on the device of the DFlash2 drafter, where one drafts."""
    where = drafter_directory(settings, checkpoint) if chosen.spec == "dflash2" else None
    if where is None:
        return None, 0
    source = open_checkpoint(where, "drafter")
    # Keys and values of the context are one product over all layers, beside each layer's own q, k and v.
    twice = sum(m.nbytes for name, m in source.modules.items() if name.endswith((".k_proj", ".v_proj")))
    return source.drafter_config, sum(source.nbytes().values()) + twice


def check_sizes(settings: Settings, checkpoint: Checkpoint, chosen: Choices, device: torch.device) -> None:
    """Refuse, before any weight is read, what cannot fit once they are. SettingError or CapacityError.

    Only what is certain: the weights as stored and the pool that was asked for, against the memory that is free now.
    """
    limit = checkpoint.config.max_position
    if settings.max_len != "auto" and settings.max_len > limit:
        raise SettingError(
            f"MAX_LEN={settings.max_len} is more than the model's {limit} positions.", f"Set MAX_LEN={limit} or less."
        )
    pages = _pages_asked(settings, chosen, device, limit)
    if pages is not None:
        _check_context(settings, chosen, pages)
    elif settings.max_len != "auto":
        pages = pages_for(settings.max_len + 1, _group(chosen))
    on_card = device.type == "cuda"
    room = card_room(device) if on_card else host_room()
    weights = sum(checkpoint.nbytes().values())
    pool = (pages or 0) * PAGE * kv_token_bytes(checkpoint.config, chosen)
    if weights + pool > room:
        raise CapacityError(
            f"The weights take {weights / 2**30:.2f} GiB and the pool that was asked for {pool / 2**30:.2f} GiB, and "
            f"{'the card' if on_card else 'host memory'} has {room / 2**30:.2f} GiB free.",
            "Lower MAX_LEN or POOL_TOKENS, close other programs, or see `soloist plan` for what buys room.",
        )


def size_pool(settings: Settings, checkpoint: Checkpoint, chosen: Choices, device: torch.device) -> tuple[int, int]:
    """(pages, longest context) for an engine whose target is loaded already. CapacityError with the numbers."""
    limit = checkpoint.config.max_position
    pages = _pages_asked(settings, chosen, device, limit)
    if pages is None:
        pages = _pages_left(settings, checkpoint, chosen, device)
    _check_context(settings, chosen, pages)
    wanted = settings.max_len if settings.max_len != "auto" else limit if device.type == "cuda" else CPU_CONTEXT
    return pages, min(wanted, limit, _holds(pages))


def _group(chosen: Choices) -> int:
    return 2 if chosen.kv_format == "kvarn" else 1


def _holds(pages: int) -> int:
    """The longest context of a pool: one position fewer than it has, for the drafter's row of the next token."""
    return pages * PAGE - 1


def _pages_asked(settings: Settings, chosen: Choices, device: torch.device, limit: int) -> int | None:
    """The pool the knobs ask for; None where it is what a card has left."""
    if settings.pool_tokens != "auto":
        return pages_for(settings.pool_tokens, _group(chosen))
    if device.type == "cuda":
        return None
    wanted = min(limit, CPU_CONTEXT) if settings.max_len == "auto" else settings.max_len
    return pages_for(wanted + 1, _group(chosen)) * min(settings.max_seqs, CPU_RESIDENTS)


def _check_context(settings: Settings, chosen: Choices, pages: int) -> None:
    if settings.max_len != "auto" and _holds(pages) < settings.max_len:
        raise CapacityError(
            f"MAX_LEN={settings.max_len} needs {pages_for(settings.max_len + 1, _group(chosen)) * PAGE} tokens of KV, "
            f"the pool has {pages * PAGE}.",
            f"Set MAX_LEN={_holds(pages)} or less, or see `soloist plan` for what buys room.",
        )


def card_room(device: torch.device) -> int:
    """Bytes this process can still have on a card: what is free, or less where it was given a share of the card."""
    free, total = torch.cuda.mem_get_info(device)
    index = torch.cuda.current_device() if device.index is None else device.index
    share = int(torch.cuda.get_per_process_memory_fraction(index) * total)
    # What torch holds without using it can be had again, but not in one piece.
    return min(free, share - torch.cuda.memory_reserved(device))


def host_room() -> int:
    """Bytes of host memory that can be had without swapping."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration):
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _pages_left(settings: Settings, checkpoint: Checkpoint, chosen: Choices, device: torch.device) -> int:
    """Pages in what the card has free now, after everything still to come."""
    gc.collect()
    torch.cuda.empty_cache()  # loading repacks weights; what that left behind is free
    free, total = card_room(device), torch.cuda.mem_get_info(device)[1]
    config = checkpoint.config
    drafter, drafter_bytes = drafter_of(settings, checkpoint, chosen)
    loaded = {"layers", "embedding", "head", "vision tower"}
    weights = weight_items(config, checkpoint.nbytes(), drafter_bytes, chosen) + vision_items(config, chosen)
    coming = [i for i in weights if i.name not in loaded]
    coming += slot_items(config, drafter, chosen)
    coming += step_items(config, chosen, len(drafter.tap_layers) if drafter is not None else 0)
    coming += draft_items(config, drafter, chosen)
    need = sum(item.nbytes for item in coming) + GRAPHS + chosen.reserve
    pages = pool_pages(config, chosen, free - need)
    if pages * PAGE < settings.reserve_tokens + PAGE:
        used = total - torch.cuda.mem_get_info(device)[0] - torch.cuda.memory_reserved(device)
        raise CapacityError(
            f"{free / 2**30:.2f} GiB of the card are free after loading, {need / 2**30:.2f} GiB go to drafter, slots, "
            f"workspace and reserve; {pages * PAGE} tokens are left. Other programs and the driver hold "
            f"{used / 2**30:.2f} GiB.",
            "Close other programs on the card, or see `soloist plan` for what buys room.",
        )
    return pages
