"""CUDA C++ kernels compiled at run time by NVRTC: no nvcc, no headers, no build step on the user's machine.

NVRTC and the driver are reached through `cuda-bindings`, which torch's CUDA wheels bring along. A kernel's
source sits beside this file; its variants are `-D` macros. Cubins are kept on disk where `keep_cubins` said, keyed by
everything that went into them.

What can go wrong: no driver, no NVRTC library, or a compile error. All are `KernelUnavailable` with the reason.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

log = logging.getLogger("soloist.kernels")


class KernelUnavailable(RuntimeError):
    """A run-time compiled kernel cannot be had here; the message is the reason shown in the dispatch table."""


def source(name: str) -> str:
    """Text of `name`.cu behind that of `common.cu`, so that no include path is needed."""
    here = resources.files(__package__)
    return "\n".join(here.joinpath(f"{part}.cu").read_text(encoding="utf-8") for part in ("common", name))


def _nvrtc() -> Any:
    try:
        from cuda.bindings import nvrtc
    except ImportError:
        raise KernelUnavailable("cuda-bindings is not installed (pip install cuda-bindings)") from None
    return nvrtc


def _options(arch: int, macros: Mapping[str, int]) -> list[str]:
    target = "90a" if arch == 90 else arch  # wgmma is in sm_90a only, and no other card is 9.0
    return [f"--gpu-architecture=sm_{target}", "--std=c++17", *(f"-D{k}={v}" for k, v in sorted(macros.items()))]


def compile_cubin(code: str, arch: int, macros: Mapping[str, int], verbose: bool = False) -> tuple[bytes, str]:
    """Compile `code` for sm_`arch` with `-Dkey=value` macros. Returns (cubin, log).

    `verbose` adds ptxas' report of registers, shared memory and spills to the log. Needs no GPU.
    """
    nvrtc = _nvrtc()
    options = _options(arch, macros)
    if verbose:
        options.append("--ptxas-options=-v")
    try:
        error, program = nvrtc.nvrtcCreateProgram(code.encode(), b"kernel.cu", 0, [], [])
    except (RuntimeError, OSError) as missing:
        raise KernelUnavailable(f"the NVRTC library cannot be loaded ({missing})") from None
    if error != nvrtc.nvrtcResult.NVRTC_SUCCESS:
        raise KernelUnavailable(f"NVRTC: {error}")
    try:
        (error,) = nvrtc.nvrtcCompileProgram(program, len(options), [o.encode() for o in options])
        # NVRTC writes into what it is given. Bytes must not be given to it, although they are taken: an empty log has
        # size 1, and `b" " * 1` is the interpreter's only b" ", which would be NUL for the whole process from then on.
        _, size = nvrtc.nvrtcGetProgramLogSize(program)
        log = bytearray(size)
        nvrtc.nvrtcGetProgramLog(program, log)
        text = log.rstrip(b"\0 ").decode(errors="replace")
        if error != nvrtc.nvrtcResult.NVRTC_SUCCESS:
            raise KernelUnavailable(f"NVRTC refused the kernel for sm_{arch}: {text}")
        _, size = nvrtc.nvrtcGetCUBINSize(program)
        cubin = bytearray(size)
        nvrtc.nvrtcGetCUBIN(program, cubin)
        return bytes(cubin), text
    finally:
        nvrtc.nvrtcDestroyProgram(program)


_kept: Path | None = None


def keep_cubins(directory: Path) -> None:
    """Keep compiled kernels in `directory` between starts; until this is called nothing is kept."""
    global _kept
    _kept = directory


def _place(code: str, arch: int, macros: Mapping[str, int], directory: Path) -> Path:
    """Where the cubin is kept; its name says all that went into it."""
    _, major, minor = _nvrtc().nvrtcVersion()
    key = hashlib.sha256(repr((code, _options(arch, macros), major, minor)).encode()).hexdigest()[:32]
    return directory / f"{key}.cubin"


def _cached_cubin(code: str, arch: int, macros: Mapping[str, int], directory: Path | None) -> bytes:
    """The cubin, compiled unless it is there; a directory that cannot be written costs the keeping and nothing else."""
    if directory is None:
        return compile_cubin(code, arch, macros)[0]
    path = _place(code, arch, macros, directory)
    if path.exists():
        return path.read_bytes()
    log.debug("compiling %s", path.name)
    cubin, _ = compile_cubin(code, arch, macros)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(f".{os.getpid()}-{threading.get_ident()}")
        partial.write_bytes(cubin)
        partial.replace(path)
    except OSError as error:
        log.info("compiled kernels could not be kept: %s", error)
    return cubin


def prepare(name: str, arch: int, macros: Mapping[str, int], directory: Path) -> tuple[Path, bool]:
    """Compile `name`.cu into `directory` for a later `load`, on no card. Returns its file and whether it was there."""
    code = source(name)
    path = _place(code, arch, macros, directory)
    known = path.exists()
    _cached_cubin(code, arch, macros, directory)
    return path, known


@dataclass(frozen=True)
class Kernel:
    """A loaded kernel: fixed block and shared memory, launched on torch's current stream."""

    function: Any
    library: Any
    block: int
    shared: int
    types: tuple[Any, ...]
    dependent: bool

    def launch(self, grid: int, arguments: Sequence[int | float], stream: int) -> None:
        """Launch over a 1-D grid; pointers are passed as integers (0 = null)."""
        from cuda.bindings import driver

        packed = (tuple(arguments), self.types)
        if not self.dependent:
            (error,) = driver.cuLaunchKernel(
                self.function, grid, 1, 1, self.block, 1, 1, self.shared, stream, packed, 0
            )
        else:
            config = driver.CUlaunchConfig()
            config.gridDimX, config.gridDimY, config.gridDimZ = grid, 1, 1
            config.blockDimX, config.blockDimY, config.blockDimZ = self.block, 1, 1
            config.sharedMemBytes, config.hStream = self.shared, driver.CUstream(stream)
            attribute = driver.CUlaunchAttribute()
            attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
            attribute.value.programmaticStreamSerializationAllowed = 1
            config.attrs, config.numAttrs = [attribute], 1
            (error,) = driver.cuLaunchKernelEx(config, self.function, packed, 0)
        if error != driver.CUresult.CUDA_SUCCESS:
            raise RuntimeError(f"CUDA kernel launch failed: {error}")


@cache
def load(
    name: str,
    entry: str,
    arch: int,
    macros: tuple[tuple[str, int], ...],
    block: int,
    shared: int,
    types: str,
    dependent: bool = False,
    directory: Path | None = None,
) -> Kernel:
    """Compile `entry` of `name`.cu, or read it from `directory` (default: that of `keep_cubins`), and load it.

    types      one letter per argument: p pointer, i int32, l uint64, f float32
    dependent  launch with programmatic stream serialization (sm_90 and newer)
    """
    from cuda.bindings import driver

    cubin = _cached_cubin(source(name), arch, dict(macros), directory or _kept)
    error, library = driver.cuModuleLoadData(cubin)
    if error != driver.CUresult.CUDA_SUCCESS:
        raise KernelUnavailable(f"the driver refused the kernel: {error}")
    _, function = driver.cuModuleGetFunction(library, entry.encode())
    limit = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
    (error,) = driver.cuFuncSetAttribute(function, limit, shared)
    if error != driver.CUresult.CUDA_SUCCESS:
        raise KernelUnavailable(f"{shared} bytes of shared memory per block are not to be had: {error}")
    letters = {"p": ctypes.c_void_p, "i": ctypes.c_int, "l": ctypes.c_uint64, "f": ctypes.c_float}
    return Kernel(function, library, block, shared, tuple(letters[t] for t in types), dependent)
