"""From settings to a running engine: the one place where the rooms are put together."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from soloist import toolchain
from soloist.cache.kv import KVStore
from soloist.cache.pages import PAGE, PageAllocator, pages_for
from soloist.cache.recurrent import RecurrentState, StateShapes
from soloist.cache.tiles import make_store
from soloist.checkpoint.reader import Checkpoint, open_checkpoint
from soloist.cores import usable_cores
from soloist.engine.caching import build_reuse
from soloist.engine.capacity import SHORT, check_sizes, choices, kv_formats, size_pool
from soloist.engine.drafters import build_speculation, tap_layers
from soloist.engine.engine import Engine
from soloist.engine.kept import Kept
from soloist.engine.memory import Memory
from soloist.engine.scheduler import IDLE_SLICE_TOKENS
from soloist.engine.segments import side_by_side
from soloist.engine.selfcheck import MEANING, ROWS, cached_check, card_prints, check_contracts, check_products
from soloist.engine.speculation import Speculation
from soloist.engine.vision import build_tower
from soloist.errors import CheckpointError, SettingError, UserError
from soloist.models.card_loader import CardLoader
from soloist.models.layers import Loader
from soloist.models.qwen3_5 import Qwen35
from soloist.models.state import Caches
from soloist.models.step import prefill_step
from soloist.ops.cuda.nvrtc import keep_cubins
from soloist.ops.kvarn import TILE
from soloist.ops.numerics import digest, fingerprint
from soloist.ops.products import candidates
from soloist.ops.upload import staged
from soloist.planner import MAX_ROWS, Choices
from soloist.progress import Progress, silent
from soloist.settings import KNOBS, Settings

if TYPE_CHECKING:
    from soloist.models.card import CardShapes

Check = Callable[[str, Callable[[], list[str]]], list[str]]
log = logging.getLogger("soloist.engine")

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def model_directory(name: str) -> Path:
    """`demo` is the bundled model; anything else is a directory, which must exist (CheckpointError)."""
    if name == "demo":
        from soloist.demo import path

        return path()
    directory = Path(name).expanduser()
    if not directory.is_dir():
        raise CheckpointError(
            f"{directory} is not a directory.",
            "Point MODEL at a Hugging Face model directory; `soloist fetch` downloads one.",
        )
    return directory


def build_engine(
    settings: Settings, progress: Progress | None = None, keep_sessions: bool = False, kept: Kept | None = None
) -> Engine:
    """Open, load and start. `progress(what, done, total)` follows the loading; raises a UserError before weights are
    read where anything about the model directory or the knobs is wrong. `keep_sessions` decides SESSION_DIR=auto.
    `kept` is what an engine of the same settings left behind when it went to sleep.

    The work is done on a thread that ends: OpenMP keeps a team of workers per calling thread, and a second team beside
    the engine thread's costs a third of the decode speed of a small machine.
    """
    with ThreadPoolExecutor(1, "soloist-build") as thread:
        return thread.submit(_build, settings, progress, keep_sessions, kept or Kept()).result()


def _build(settings: Settings, progress: Progress | None, keep_sessions: bool, kept: Kept) -> Engine:
    checkpoint = open_checkpoint(model_directory(settings.model))
    device = _device(settings)
    dtype = compute_dtype(settings, device)
    if device.type == "cuda":
        from soloist.engine.compile_ahead import compile_ahead, cubins

        lacking = toolchain.missing()
        if lacking is not None:  # said now, not at the first launch, when the weights have been read
            raise UserError(f"Triton needs {lacking}, and this machine has none.", toolchain.REMEDY)
        keep_cubins(cubins())
    torch.set_num_threads(settings.threads or usable_cores())
    torch.set_grad_enabled(False)
    chosen = choices(settings, checkpoint, str(dtype).removeprefix("torch."), device)
    if kept.weights is not None:
        model, tower, degraded = kept.weights.restore()
    else:
        check_sizes(settings, checkpoint, chosen, device)
        ahead = compile_ahead(settings, checkpoint, device) if device.type == "cuda" else None
        tower = build_tower(settings, checkpoint, device, dtype)
        if ahead is not None:
            model, degraded = load_on_card(settings, checkpoint, device, dtype, progress, ahead.wait)
        else:
            model, degraded = _on_cpu(settings, checkpoint, device, dtype, progress)
    memory, speculation, max_len = equip(settings, checkpoint, model, dtype, chosen, progress)
    prints = digest(fingerprint(device, dtype, DTYPES[settings.state_dtype], model.product))
    return Engine(
        model,
        memory,
        speculation,
        build_reuse(settings, checkpoint, memory, speculation, prints, keep_sessions, kept),
        settle=settings.settle and settings.prefix_cache,
        max_len=max_len,
        max_queue=settings.max_queue,
        prefill_slice_ms=settings.prefill_slice_ms,
        verify_rows=settings.verify_rows,
        sampler=settings.sampler,
        knobs=_reported(settings)
        | {"device": str(device), "dtype": str(dtype).removeprefix("torch."), "linear": model.product},
        degraded=degraded,
        tower=tower,
    )


def equip(
    settings: Settings,
    checkpoint: Checkpoint,
    model: Qwen35,
    dtype: torch.dtype,
    chosen: Choices,
    progress: Progress | None = None,
) -> tuple[Memory, Speculation, int]:
    """Everything around a loaded model: pool and slots, a card's graphs, drafters. Also the longest context."""
    device = model.device
    pages, max_len = size_pool(settings, checkpoint, chosen, device)
    with side_by_side(device):
        memory = _memory(settings, checkpoint, device, dtype, chosen, pages, max_len)
    say = progress or silent
    if device.type == "cuda":
        from soloist.engine.graphs import GraphedModel

        assert isinstance(model, GraphedModel)
        shapes = card_shapes(settings.max_seqs, settings.verify_rows, pages_for(max_len), pages)
        model.prepare(shapes, memory.kv, memory.state, tap_layers(settings, checkpoint))
        say("graphs", 0, 1)
        model.capture()
    say("drafter", 0, 1)
    speculation = build_speculation(settings, checkpoint, model, memory)
    if device.type == "cuda":
        say("first prompt", 0, 1)
        warm_prompt(model, memory, speculation.taps)
    return memory, speculation, max_len


@torch.inference_mode()
def warm_prompt(model: Qwen35, memory: Memory, taps: Sequence[int]) -> None:
    """Run the longest prompt slice once: its kernels are compiled and its workspace is had from the driver before
    anybody asks. It leaves pages and a slot that nobody owns yet, and that whoever gets them writes first."""
    pages = list(range(min(pages_for(IDLE_SLICE_TOKENS), memory.pages.total)))
    step = prefill_step([0] * (len(pages) * PAGE), 0, 0, pages)
    features = model.forward(step, memory.caches, taps)
    model.logits(features.hidden[-1:])
    memory.state.reset(0)
    torch.cuda.synchronize(model.device)


def _reported(settings: Settings) -> dict[str, str]:
    """The knobs as texts, for whoever asks the server what it is; secrets and directories stay out."""
    private = {"model", "drafter", "session_dir", "host"}
    return {n: k.show(getattr(settings, n)) for n, k in KNOBS.items() if not k.secret and n not in private}


def card_shapes(max_seqs: int, verify_rows: int, context_pages: int, pool_pages: int) -> CardShapes:
    """Buffers of the largest step: every request with its rows, up to MAX_ROWS rows in all."""
    rows = max(verify_rows, min(max_seqs * verify_rows, MAX_ROWS))
    from soloist.models.card import MAX_DEPTH, CardShapes
    from soloist.ops.triton.attention import SPLIT

    splits = pool_pages * PAGE // SPLIT + 2 * max_seqs
    return CardShapes(
        rows=rows,
        requests=max_seqs + 1,
        # Whole sixteens: Triton compiles a variant of its own for a stride that is one, and how many pages fit is known
        # only when the weights are loaded.
        pages=-(-(context_pages + 1) // 16) * 16,
        branches=rows // 2,
        splits=verify_rows * splits + rows,
        depth=max(verify_rows, MAX_DEPTH),
    )


def load_on_card(
    settings: Settings,
    checkpoint: Checkpoint,
    device: torch.device,
    dtype: torch.dtype,
    progress: Progress | None = None,
    ready: Callable[[], None] = lambda: None,
    check: Check = cached_check,
) -> tuple[Qwen35, tuple[str, ...]]:
    """Load onto the card; the contracts are checked on the eager sequence, which the graphs repeat. `ready` is called
    between the last weight and the first launch. Also says which contracts are off."""
    from soloist.engine.graphs import GraphedModel

    if dtype is torch.float32:
        raise SettingError("DTYPE=float32 has no kernels on a card.", "Set DTYPE=bfloat16, or DEVICE=cpu.")
    state_dtype = DTYPES[settings.state_dtype]
    name = str(dtype).removeprefix("torch.")
    formats = kv_formats(settings, name, device)
    # Tiles have attention of their own; all other formats share one.
    tiles = "kvarn" in formats
    stored = formats if tiles else (SHORT[name],) * 2
    follow = partial(progress, "layers") if progress is not None else None
    with side_by_side(device), staged(device):
        model = GraphedModel(CardLoader(checkpoint, device, dtype), checkpoint.config, follow)
    model.mode = settings.graphs
    say = progress or silent
    say("kernels", 0, 1)
    ready()
    say("checks", 0, 1)
    prints = fingerprint(device, dtype, state_dtype, model.product) | card_prints()
    prints["model"] = checkpoint.fingerprint()
    if tiles:
        prints["kv"] = "kvarn"

    def fresh(slots: int, pages: int) -> Caches:
        caches = Caches(*_caches(checkpoint, device, dtype, state_dtype, slots, pages, stored))
        model.prepare(card_shapes(slots, ROWS, pages, pages), caches.kv, caches.state, ())
        return caches

    broken = check(digest(prints), lambda: check_contracts(model, fresh, TILE if tiles else PAGE))
    model.unprepare()  # the check's buffers would count as taken when the pool is sized
    for contract in broken:
        log.warning("%s", MEANING[contract])
    return model, tuple(f"{MEANING[contract]}." for contract in broken)


def _on_cpu(
    settings: Settings, checkpoint: Checkpoint, device: torch.device, dtype: torch.dtype, progress: Progress | None
) -> tuple[Qwen35, tuple[str, ...]]:
    """Load with the first product whose rows stand alone here; say which contracts are off if there is none."""
    state_dtype = DTYPES[settings.state_dtype]
    plain = (SHORT[str(dtype).removeprefix("torch.")],) * 2
    follow = partial(progress, "layers") if progress is not None else None
    names = candidates(device, dtype) if settings.linear == "auto" else [settings.linear]
    for name in names:
        load = Loader(checkpoint, device, dtype, name)
        model = Qwen35(load, checkpoint.config, follow)
        prints = fingerprint(device, dtype, state_dtype, model.product) | {"model": checkpoint.fingerprint()}

        def run(model: Qwen35 = model) -> list[str]:
            shapes = check_products(model)
            if shapes:
                log.warning("product %s: rows vary at %s", model.product, ", ".join(shapes))

            def fresh(slots: int, pages: int) -> Caches:
                return Caches(*_caches(checkpoint, device, dtype, state_dtype, slots, pages, plain))

            return check_contracts(model, fresh)

        broken = cached_check(digest(prints), run)
        if not broken or name == names[-1]:
            break
        log.warning("product %s breaks %s here; trying the next", name, ", ".join(broken))
    for contract in broken:
        log.warning("%s (product %s)", MEANING[contract], model.product)
    return model, tuple(f"{MEANING[contract]} (LINEAR={model.product})." for contract in broken)


def _device(settings: Settings) -> torch.device:
    if settings.device == "auto":
        usable = torch.cuda.is_available()
        if not usable and shutil.which("nvidia-smi"):
            log.warning("this torch cannot use the card, so the CPU serves; `soloist doctor` says what to do")
        return torch.device("cuda" if usable else "cpu")
    if settings.device == "cuda" and not torch.cuda.is_available():
        raise SettingError("DEVICE=cuda, but torch sees no CUDA device.", "Install a CUDA build of torch or use cpu.")
    return torch.device(settings.device)


def compute_dtype(settings: Settings, device: torch.device) -> torch.dtype:
    """The type of activations and products: DTYPE, or what suits the device."""
    if settings.dtype != "auto":
        return DTYPES[settings.dtype]
    return torch.float32 if device.type == "cpu" else torch.bfloat16


def _caches(
    checkpoint: Checkpoint,
    device: torch.device,
    dtype: torch.dtype,
    state_dtype: torch.dtype,
    slots: int,
    pages: int,
    formats: tuple[str, str],
) -> tuple[KVStore, RecurrentState]:
    """Empty KV pages and state slots of the checkpoint's shapes."""
    c = checkpoint.config
    kv = make_store(
        *formats,
        layers=len(c.attention_layers),
        kv_heads=c.num_kv_heads,
        head_dim=c.head_dim,
        pages=pages,
        slots=slots,
        dtype=dtype,
        device=device,
    )
    return kv, RecurrentState(StateShapes.of(c), slots, state_dtype, dtype, device)


def _memory(
    settings: Settings,
    checkpoint: Checkpoint,
    device: torch.device,
    dtype: torch.dtype,
    chosen: Choices,
    pages: int,
    max_len: int,
) -> Memory:
    formats = (chosen.kv_format, chosen.kv_format_v)
    state_dtype = DTYPES[settings.state_dtype]
    kv, state = _caches(checkpoint, device, dtype, state_dtype, settings.max_seqs, pages, formats)
    allocator = PageAllocator(pages, kv.tile // PAGE)
    return Memory(kv, state, allocator, reserve=min(settings.reserve_tokens, max_len // 4 // PAGE * PAGE))
