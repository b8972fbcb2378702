"""A card that is not there: code for a card runs on tensors without bytes, and the kernels it asks for are listed.

Inside `rehearsing(card)` a CUDA device is torch's meta device that says it is a card: shapes, strides and alignments
are true, so every launch has the signature and constants it will have on the card, and nothing is computed. `compiled`
then compiles what was asked for, side by side in forked processes, into the caches where the real launches look.

What can go wrong: code that decides by a value the card computed sees zeros (and true for a comparison), so it may take
another branch than on the card; what that branch launches is then compiled at its first launch, as without a rehearsal.
Not for a process that uses CUDA: torch's view of it is replaced.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch.overrides import TorchFunctionMode

from soloist.ops import linear_cuda, upload
from soloist.ops.cuda import nvrtc

# What a launch asks of a tensor: thousands of times, and true as it is.
ASKED = frozenset({"__get__", "data_ptr", "stride", "size", "dim", "numel", "element_size", "is_contiguous"})
META, HERE = torch.device("meta"), torch.device("cpu")


@dataclass(frozen=True)
class Card:
    """What code asks a card about. `arch` as in sm_90; `shared`: bytes of shared memory a block may have."""

    name: str
    arch: int
    multiprocessors: int
    shared: int
    total: int

    @classmethod
    def of(cls, device: torch.device) -> Card:
        """The card of this machine."""
        found = torch.cuda.get_device_properties(device)
        arch = found.major * 10 + found.minor
        shared = found.shared_memory_per_block_optin  # type: ignore[attr-defined]  # not in torch's stubs
        return cls(found.name, arch, found.multi_processor_count, shared, found.total_memory)


@dataclass(frozen=True)
class TritonJob:
    """A variant of a Triton kernel: the function and what the compiler is told."""

    function: Any
    arguments: tuple[Any, ...]

    @property
    def name(self) -> str:
        kernel = self.function.fn
        return f"{kernel.__module__.rpartition('.')[2]}.{kernel.__name__}"

    def weight(self) -> int:
        """Long sources take long."""
        return len(self.function.src)

    def compile(self, directory: Path) -> tuple[list[str], bool]:
        """Compile into Triton's cache. Returns the files that a launch needs and whether they were there."""
        from triton import knobs
        from triton.runtime import driver

        from soloist.ops.aot import Target

        files: list[str] = []
        hits: list[bool] = []

        def listen(*, metadata_group: dict[str, Any], cache_hit: bool, **more: Any) -> None:
            files.extend(str(path) for name, path in metadata_group.items() if name.endswith((".json", ".cubin")))
            hits.append(cache_hit)

        knobs.compilation.listener = listen
        driver.set_active(Target(self.arguments[2]))
        _compile_triton(self.function, *self.arguments, warmup=True)
        return files, all(hits)


@dataclass(frozen=True)
class CudaJob:
    """A variant of a CUDA C++ kernel."""

    source: str
    arch: int
    macros: tuple[tuple[str, int], ...]

    @property
    def name(self) -> str:
        return self.source

    def weight(self) -> int:
        """NVRTC's take longest."""
        return 1 << 20

    def compile(self, directory: Path) -> tuple[list[str], bool]:
        """Compile into `directory`. Returns the file and whether it was there."""
        path, known = nvrtc.prepare(self.source, self.arch, dict(self.macros), directory)
        return [str(path)] if path.exists() else [], known


Job = TritonJob | CudaJob


@dataclass
class Wanted:
    """The variants that were asked for, each once, by what makes them different."""

    jobs: dict[tuple[Any, ...], Job] = field(default_factory=dict)

    def triton(self, function: Any, *arguments: Any) -> _Silent:
        """In place of Triton's compiler: what comes back does nothing when it is launched."""
        key = (function.fn.__module__, function.fn.__name__, str(arguments[0]))
        self.jobs.setdefault(key, TritonJob(function, arguments[:-1]))
        function.device_caches[arguments[2]][0][arguments[0]] = _Silent()
        return _Silent()

    def forget(self) -> None:
        """Take the kernels that do nothing out of Triton's tables."""
        for job in self.jobs.values():
            if isinstance(job, TritonJob):
                job.function.device_caches.clear()

    def cuda(
        self, name: str, entry: str, arch: int, macros: tuple[tuple[str, int], ...], *rest: Any, **more: Any
    ) -> _Silent:
        """In place of `nvrtc.load`."""
        self.jobs.setdefault((name, arch, macros), CudaJob(name, arch, macros))
        return _Silent()


class _Silent:
    """A kernel, a stream, an event or a graph of a card that is not there."""

    cuda_stream = 0

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def launch(self, *args: Any) -> None:
        pass

    record = synchronize = replay = reset = launch_metadata = run = launch
    function = packed_metadata = None

    def pool(self) -> tuple[int, int]:
        return 0, 0

    def __enter__(self) -> None:
        pass

    def __exit__(self, *args: object) -> None:
        pass


class _Played(TorchFunctionMode):
    """Makes tensors without bytes where a card is named, and zeros of what is brought back from it."""

    def __init__(self) -> None:
        super().__init__()
        self.inside = False

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if function is torch.device or function.__name__ in ASKED:
            return function(*args, **kwargs)
        kwargs.pop("pin_memory", None)
        args = tuple(_moved(a) for a in args)
        kwargs = {k: _moved(v) for k, v in kwargs.items()}
        outer, self.inside = self.inside, True
        try:
            brought = self._brought(function, args, kwargs)
            return function(*_together(args), **kwargs) if brought is None else brought
        finally:
            self.inside = outer

    @staticmethod
    def _brought(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What a copy to the host gives, None for everything else."""
        first = args[0] if args and isinstance(args[0], torch.Tensor) else None
        if first is None:
            return None
        if function is torch.Tensor.copy_ and args[1].is_meta and not first.is_meta:
            return first
        if not first.is_meta:
            return None
        if function is torch.equal or function is torch.Tensor.__bool__:
            return True
        if function is torch.Tensor.cpu or (function is torch.Tensor.to and _says_host(args, kwargs)):
            kinds = [x for x in (*args, *kwargs.values()) if isinstance(x, torch.dtype)]
            return torch.zeros(first.shape, dtype=kinds[0] if kinds else first.dtype)
        if function in (torch.Tensor.item, torch.Tensor.tolist):
            return function(torch.zeros(first.shape, dtype=first.dtype))
        return None


def _says_host(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    return any(isinstance(x, torch.device) and x == HERE for x in (*args, *kwargs.values()))


def _together(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Weights are read in part: small ones have bytes, large ones do not. Where they meet, none has."""
    tensors = [t for a in args for t in (a if isinstance(a, list | tuple) else (a,)) if isinstance(t, torch.Tensor)]
    if not any(t.is_meta for t in tensors) or all(t.is_meta for t in tensors):
        return args

    def without(value: Any) -> Any:
        if isinstance(value, list | tuple):
            return type(value)(map(without, value))
        return value.to(META) if isinstance(value, torch.Tensor) else value

    return tuple(map(without, args))


def _moved(value: Any) -> Any:
    if isinstance(value, str) and value.partition(":")[0] == "cuda":
        return META
    if isinstance(value, str) and value == "cpu":
        return HERE
    return META if isinstance(value, torch.device) and value.type == "cuda" else value


def _replace(stack: ExitStack, owner: Any, **values: Any) -> None:
    """Set attributes of `owner` until `stack` closes."""
    for name, value in values.items():
        own = name in vars(owner)
        before = getattr(owner, name)
        setattr(owner, name, value)
        stack.callback(*((setattr, owner, name, before) if own else (delattr, owner, name)))


def _replace_cuda(stack: ExitStack, card: Card) -> None:
    major, minor = divmod(card.arch, 10)
    properties = SimpleNamespace(
        name=card.name,
        major=major,
        minor=minor,
        multi_processor_count=card.multiprocessors,
        shared_memory_per_block_optin=card.shared,
        total_memory=card.total,
    )
    _replace(
        stack,
        torch.cuda,
        is_available=lambda: True,
        is_initialized=lambda: False,
        current_device=lambda: 0,
        get_device_name=lambda *a: card.name,
        get_device_capability=lambda *a: (major, minor),
        get_device_properties=lambda *a: properties,
        current_stream=_Silent,
        synchronize=lambda *a: None,
        empty_cache=lambda: None,
        mem_get_info=lambda *a: (card.total, card.total),
        memory_reserved=lambda *a: 0,
        get_per_process_memory_fraction=lambda *a: 1.0,
        Event=_Silent,
        CUDAGraph=_Silent,
        graph=_Silent,
    )


def _without_dynamo(stack: ExitStack) -> None:
    """Shapes of what torch computes come from functions that import its compiler, to say that it is not wanted: some
    seconds for nothing."""
    if "torch._dynamo" in sys.modules:
        return
    stub = ModuleType("torch._dynamo")
    stub.disable = lambda function, *a, **k: function  # type: ignore[attr-defined]
    stack.enter_context(mock.patch.dict(sys.modules, {"torch._dynamo": stub}))
    stack.enter_context(mock.patch.object(torch, "_dynamo", stub, create=True))


_compile_triton: Callable[..., Any]


@contextmanager
def rehearsing(card: Card) -> Iterator[Wanted]:
    """Inside, `torch.device("cuda")` is `card`; what its kernels would be compiled for is collected."""
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    from soloist.ops.aot import Target

    global _compile_triton
    wanted, mode = Wanted(), _Played()
    device: Any = torch._C.TensorBase.device
    is_cuda: Any = torch._C.TensorBase.is_cuda
    there = torch.device("cuda", 0)

    def of(tensor: torch.Tensor) -> torch.device:
        return there if tensor.is_meta and not mode.inside else device.__get__(tensor)

    def on_card(tensor: torch.Tensor) -> bool:
        return (tensor.is_meta and not mode.inside) or bool(is_cuda.__get__(tensor))

    with ExitStack() as stack:
        stack.callback(setattr, driver, "_active", driver._active)
        driver.set_active(Target(card.arch))
        _compile_triton = JITFunction._do_compile
        _replace(stack, JITFunction, _do_compile=lambda function, *told: wanted.triton(function, *told))
        _replace(stack, nvrtc, load=wanted.cuda)
        _replace(stack, torch.Tensor, device=property(of), is_cuda=property(on_card))
        # The longest part of loading, for shapes that are known.
        _replace(stack, linear_cuda, _fragment_words=lambda codes: codes.new_empty((4, *codes.shape[:3])))
        # Nothing is sent, so nothing is page-locked for it.
        _replace(stack, upload, LEAST=sys.maxsize)
        _replace_cuda(stack, card)
        _without_dynamo(stack)
        stack.enter_context(mode)
        stack.callback(wanted.forget)
        yield wanted


@dataclass(frozen=True)
class Outcome:
    """One variant: seconds it took, whether it was in the cache already, its files there, and what went wrong."""

    name: str
    seconds: float
    known: bool = False
    files: tuple[str, ...] = ()
    error: str = ""


_jobs: list[Job] = []  # what a forked worker inherits


def _compile_one(index: int, directory: Path) -> Outcome:
    job, began = _jobs[index], time.perf_counter()
    try:
        files, known = job.compile(directory)
    except Exception as failed:  # the launch compiles it again, and says what is wrong
        seconds = round(time.perf_counter() - began, 3)
        return Outcome(job.name, seconds, error=f"{type(failed).__name__}: {failed}"[:500])
    return Outcome(job.name, round(time.perf_counter() - began, 3), known, tuple(files))


def end_with(parent: int) -> None:
    """From now on this process ends with the thread of `parent` that started it, however that comes to its end, and at
    Ctrl-C. A pool's processes would wait for work that nobody sends, or finish all of it first."""
    if sys.platform == "linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, ctypes.c_ulong(signal.SIGKILL))
    if os.getppid() != parent:
        raise SystemExit("whoever wanted kernels is gone")
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)


def _begin(parent: int) -> None:
    end_with(parent)
    os.nice(5)


def _side_by_side(indices: Sequence[int], workers: int, directory: Path) -> dict[int, Outcome]:
    """Outcomes by index; where a process was killed, those it took with it are missing."""
    fork = multiprocessing.get_context("fork")
    pending: dict[Future[Outcome], int] = {}
    with ProcessPoolExecutor(min(workers, len(indices)), fork, initializer=_begin, initargs=(os.getpid(),)) as pool:
        with suppress(BrokenProcessPool):
            pending.update((pool.submit(_compile_one, i, directory), i) for i in indices)
        return {pending[done]: done.result() for done in as_completed(pending) if done.exception() is None}


def compile_all(jobs: Sequence[Job], workers: int, directory: Path) -> list[Outcome]:
    """Compile variants in `workers` forked processes, long ones first; cubins of CUDA C++ go to `directory`.

    One that fails is an Outcome with an error. Where a process is killed (by the system, for memory, or by a fault of
    the compiler), the rest goes on in half as many; the one that kills even a single process is an Outcome too.
    """
    _jobs[:] = sorted(jobs, key=lambda job: -job.weight())
    outcomes: dict[int, Outcome] = {}
    while left := [i for i in range(len(_jobs)) if i not in outcomes]:
        outcomes |= _side_by_side(left, workers, directory)
        lost = [i for i in left if i not in outcomes]
        if lost and workers == 1:
            outcomes[lost[0]] = Outcome(_jobs[lost[0]].name, 0.0, error="its compiler was killed")
        workers = max(1, workers // 2)
    return [outcomes[i] for i in sorted(outcomes)]
