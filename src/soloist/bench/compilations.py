"""Which kernels this process found compiled and which it compiled itself, at their first launch."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from soloist.ops.cuda import nvrtc


class Compilations:
    """Counts from `watch` on. `late` are the compiled ones, with seconds, in order."""

    def __init__(self) -> None:
        self.known = 0
        self.late: list[dict[str, Any]] = []

    def watch(self) -> None:
        """Hear of every Triton kernel and every CUDA C++ kernel from now on."""
        from triton import knobs

        def triton(*, metadata: Mapping[str, Any], times: Any, cache_hit: bool, **more: Any) -> None:
            if cache_hit:
                self.known += 1
                return
            self.late.append({"kernel": str(metadata.get("name")), "seconds": round(times.total / 1e6, 3)})

        knobs.compilation.listener = triton
        compile_cubin = nvrtc.compile_cubin

        def cuda(code: str, arch: int, macros: Mapping[str, int], verbose: bool = False) -> tuple[bytes, str]:
            began = time.perf_counter()
            try:
                return compile_cubin(code, arch, macros, verbose)
            finally:
                seconds = round(time.perf_counter() - began, 3)
                self.late.append({"kernel": "CUDA C++", "macros": dict(macros), "seconds": seconds})

        nvrtc.compile_cubin = cuda

    def report(self) -> dict[str, Any]:
        """What was seen so far."""
        seconds = round(sum(one["seconds"] for one in self.late), 2)
        return {"triton_known": self.known, "compiled": len(self.late), "compiled_s": seconds, "late": list(self.late)}
