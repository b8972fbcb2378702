"""Kernels of `soloist.ops.cuda` compiled for the CPU, so that their indexing is tested where there is no card."""

from __future__ import annotations

import ctypes
import random
import re
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

# Functions made of instructions: `cuda_on_host.h` has their meaning.
INSTRUCTIONS = ("half_value", "to_halves", "mma_f16", "arrive")


def _without(code: str, name: str) -> str:
    """The source without the definition of `name`, which ends at a brace of its own line."""
    return re.sub(rf"^[^\n/]*\b{name}\(.*?^}}\n", "", code, count=1, flags=re.MULTILINE | re.DOTALL)


def compile_kernel(source: Path, entry: str, macros: Mapping[str, int], directory: Path) -> ctypes.CDLL:
    """A library whose `launch(grid, threads, order, <the kernel's arguments>)` runs `entry` of a .cu block by block."""
    code = source.read_text(encoding="utf-8")
    for name in INSTRUCTIONS:
        code = _without(code, name)
    found = re.search(rf"\n{entry}\((.*?)\) \{{\n", code, re.DOTALL)
    assert found is not None
    parameters = found.group(1)
    names = ", ".join(p.split()[-1].lstrip("*") for p in parameters.split(","))
    code += (
        f'\nextern "C" bool launch(u32 grid, u32 threads, const u32* order, {parameters}) {{\n'
        f"    return host::run(grid, threads, order, [=] {{ {entry}({names}); }});\n}}\n"
    )
    directory.mkdir(parents=True, exist_ok=True)
    text, library = directory / "kernel.cpp", directory / "kernel.so"
    text.write_text(f'#include "{Path(__file__).with_suffix(".h")}"\n{code}', encoding="utf-8")
    options = [
        "-std=c++17",
        "-O1",
        "-w",
        "-ffp-contract=off",
        "-fno-strict-aliasing",
        "-fno-gnu-unique",
        "-shared",
        "-fPIC",
    ]
    defines = [f"-D{name}={value}" for name, value in macros.items()]
    subprocess.run(["g++", *options, *defines, str(text), "-o", str(library)], check=True)
    return ctypes.CDLL(str(library))


def launch(library: ctypes.CDLL, grid: int, threads: int, arguments: Sequence[object], types: str, seed: int) -> None:
    """Run all blocks in a random order. Tensors are passed as pointers; types as in `nvrtc.load`."""
    order = list(range(grid))
    random.Random(seed).shuffle(order)
    blocks = torch.tensor(order, dtype=torch.int32)
    letters = {"p": ctypes.c_void_p, "i": ctypes.c_int, "l": ctypes.c_uint64, "f": ctypes.c_float}
    values = [a.data_ptr() if isinstance(a, torch.Tensor) else a for a in arguments]
    packed = [letters[t](v) for t, v in zip(types, values, strict=True)]
    library.launch.restype = ctypes.c_bool
    finished = library.launch(grid, threads, ctypes.c_void_p(blocks.data_ptr()), *packed)
    assert finished, "some threads wait for a barrier that others never reach"
