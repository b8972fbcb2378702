"""Sources of the products (`ops/cuda/w4a16*.cu`) compiled for the CPU, in NVRTC's place: see products_on_host.h."""

from __future__ import annotations

import ctypes
import faulthandler
import os
import re
import signal
import subprocess
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from soloist.ops import linear_cuda

CUDA = Path(linear_cuda.__file__).parent / "cuda"
HEADER = Path(__file__).with_suffix(".h")
LETTERS = {"p": ctypes.c_void_p, "i": ctypes.c_int, "l": ctypes.c_uint64, "f": ctypes.c_float}
OPTIONS = (
    "-std=c++17",
    "-Og",
    "-w",
    "-ffp-contract=off",
    "-fno-strict-aliasing",
    "-U_FORTIFY_SOURCE",
    "-fno-gnu-unique",
    "-shared",
    "-fPIC",
)
# Of a kernel's macros, so not in the header.
SCALE = "inline float scale_value(u16 s) { return SCALE_BF16 ? host::value(s, 0) : host::half_value(s); }"
# What the prefill products share that is not made of instructions stands as it is.
STORE = re.search(
    r"^template <[^\n]*\n[^\n]* store_tile\(.*?^}\n", (CUDA / "common.cu").read_text(), re.MULTILINE | re.DOTALL
)
assert STORE is not None
BEFORE = f"{SCALE}\n{STORE[0]}"


def _without_instructions(source: str) -> str:
    """The source without its functions made of instructions: the header has their meaning."""
    out, at = [], 0
    for start in re.finditer(r"^__device__ __forceinline__ [^\n]*\{", source, re.MULTILINE):
        depth, end = 1, start.end()
        while depth:
            depth += {"{": 1, "}": -1}.get(source[end], 0)
            end += 1
        if "asm" in source[start.start() : end]:
            out.append(source[at : start.start()])
            at = end
    code = "".join(out) + source[at:]
    assert "asm" not in code
    return code


def on_host(source: str) -> str:
    """The source as C++ behind the header. Shared memory is the block's, which the header keeps."""
    code = re.sub(r"extern __shared__ .*?;", "u8* smem = host::block().shared.data();", _without_instructions(source))
    names = iter(range(100))

    def variable(found: re.Match[str]) -> str:
        kind, name, size = found.groups()
        return f"auto& {name} = host::fixed<{kind}{size}>({next(names)});"

    code = re.sub(r"__shared__ (?:__align__\(\d+\) )?(\w+) (\w+)((?:\[[^;]*\])?);", variable, code)
    assert "__shared__" not in code
    return code.replace('extern "C" __', "__")


@dataclass
class Kernel:
    """Like `nvrtc.Kernel`; what is launched runs at `Host.run`."""

    host: Host
    index: int
    types: str

    def launch(self, grid: int, arguments: Sequence[int | float], stream: int) -> None:
        values = [LETTERS[t](v) for t, v in zip(self.types, arguments, strict=True)]
        getattr(self.host.library, f"add{self.index}")(grid, *values)


class Host:
    """In the place of `nvrtc.load`. All variants that are loaded before the first launch make one library.

    edit  (text, what stands in its place) in sources that are loaded from now on: to show that a fault is seen
    """

    def __init__(self, directory: Path) -> None:
        self.directory, self.edit = directory, ("", "")
        self._variants: dict[object, Kernel] = {}
        self._text = [f'#include "{HEADER}"\n']
        self._library: ctypes.CDLL | None = None

    def load(
        self,
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
        key = (name, arch, macros, block, shared, dependent, self.edit)
        if key not in self._variants:
            assert self._library is None, f"{key} is loaded after the first launch"
            index = len(self._variants)
            self._variants[key] = Kernel(self, index, types)
            self._add(
                name, entry, (*macros, ("__CUDA_ARCH__", arch * 10)), f"{block}, {shared}, {int(dependent)}", index
            )
        return self._variants[key]

    def _add(self, name: str, entry: str, macros: Iterable[tuple[str, int]], launch: str, index: int) -> None:
        code = (CUDA / f"{name}.cu").read_text(encoding="utf-8")
        old, new = self.edit
        assert not old or code.count(old) == 1, old
        code = on_host(code.replace(old, new) if old else code)
        found = re.search(rf"\n{entry}\((.*?)\) \{{\n", code, re.DOTALL)
        assert found is not None
        parameters = found.group(1)
        names = ", ".join(p.split()[-1].lstrip("*") for p in parameters.split(","))
        defines = "".join(f"#undef {key}\n#define {key} {value}\n" for key, value in macros)
        self._text.append(
            f"{defines}namespace v{index} {{\n"
            f"{BEFORE}\n{code}}}\n"
            f'extern "C" void add{index}(u32 grid, {parameters}) {{\n'
            f"    host::add(grid, {launch}, [=] {{ v{index}::{entry}({names}); }});\n}}\n"
        )

    @property
    def library(self) -> ctypes.CDLL:
        if self._library is None:
            text, library = self.directory / "kernels.cpp", self.directory / "kernels.so"
            text.write_text("".join(self._text) + 'extern "C" bool run(u64 seed) { return host::run(seed); }\n')
            subprocess.run(["g++", *OPTIONS, str(text), "-o", str(library)], check=True)
            self._library = ctypes.CDLL(str(library.resolve()))
            self._library.run.restype = ctypes.c_bool
        return self._library

    def run(self, seed: int) -> bool:
        """Run what was launched since the last run. False if some thread waits for what never comes."""
        return bool(self.library.run(ctypes.c_uint64(seed)))


def holds_in_child(check: Callable[[], bool]) -> bool:
    """What `check` says in a process of its own, which a fault in a kernel may end or keep busy for ever."""
    child = os.fork()
    if child == 0:
        faulthandler.disable()  # an end is expected
        signal.alarm(120)
        holds = False
        try:
            holds = check()
        finally:
            os._exit(not holds)
    return os.waitpid(child, 0)[1] == 0
