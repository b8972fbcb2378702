"""Compile every kernel for a card that is not here: `python -m soloist.ops.aot 80 86 89 90 120`.

Triton is given a driver that only names a target and stops after the compiler; each kernel's own wrapper runs on CPU
tensors of the 27B's and the demo's shapes, so what is compiled is what a step launches. CUDA C++ kernels go through
NVRTC. The table shows registers, spills and shared memory; a kernel that exceeds its card fails the run.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from soloist.ops.aot_draft import block_calls
from soloist.ops.aot_kvarn import kvarn_calls
from soloist.ops.aot_tensors import full, half, index

# Shared memory a block may have, bytes, by compute capability.
SHARED_LIMIT = {80: 166912, 86: 101376, 89: 101376, 90: 232448, 120: 101376}
# The KV formats that need decoding, by the type of their codes (`cache/codecs.py`).
FORMATS = {"fp8": torch.float8_e4m3fn, "int8": torch.int8}


@dataclass(frozen=True)
class Compiled:
    """One kernel for one card. `spills` in bytes of local memory, None where the tool did not say."""

    name: str
    arch: int
    registers: int
    spills: int
    shared: int
    warps: int

    def excess(self) -> str | None:
        """Why the card cannot launch it, or None."""
        if self.shared > SHARED_LIMIT[self.arch]:
            return f"{self.shared} bytes of shared memory, sm_{self.arch} has {SHARED_LIMIT[self.arch]}"
        if self.registers * self.warps * 32 > 65536:
            return f"{self.registers} registers x {self.warps * 32} threads exceed the file of 65536"
        return None


class Target:
    """The part of a Triton driver that the compiler asks."""

    def __init__(self, arch: int) -> None:
        from triton.backends.compiler import GPUTarget

        self._target = GPUTarget("cuda", arch, 32)

    def get_current_target(self) -> Any:
        return self._target

    def get_current_device(self) -> int:
        return self._target.arch

    def get_current_stream(self, device: int) -> int:
        return 0


@contextmanager
def compiling(arch: int, seen: list[tuple[str, Any]]) -> Iterator[None]:
    """Inside, launching a Triton kernel compiles it for sm_`arch` and appends (name, compiled kernel) to `seen`."""
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    from soloist.ops.triton import pdl

    original = JITFunction.run

    def run(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        kernel = original(self, *args, grid=grid, warmup=True, **kwargs)
        seen.append((self.fn.__name__, kernel))
        return kernel

    before, dependent, shared, groups = driver._active, pdl.dependent, pdl.shared_memory, pdl.warp_groups
    driver.set_active(Target(arch))
    JITFunction.run = run
    pdl.dependent = lambda x: arch >= 90
    pdl.shared_memory = lambda x: SHARED_LIMIT[arch]
    pdl.warp_groups = lambda x: arch // 10 == 9
    try:
        yield
    finally:
        JITFunction.run = original
        pdl.dependent, pdl.shared_memory, pdl.warp_groups = dependent, shared, groups
        driver._active = before


def _usage(cubin: bytes) -> tuple[int, int]:
    """(registers, bytes of local memory) from Triton's own cuobjdump."""
    import triton

    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = subprocess.run(
            [str(tool), "--dump-resource-usage", file.name], capture_output=True, text=True, check=True
        ).stdout
    registers = max(int(n) for n in re.findall(r"REG:(\d+)", text))
    return registers, max(int(n) for n in re.findall(r"STACK:(\d+)", text))


def triton_kernels(arch: int, calls: dict[str, Callable[[], object]]) -> list[Compiled]:
    """Every kernel that `calls` launch, compiled for sm_`arch`."""
    out = []
    for label, call in calls.items():
        seen: list[tuple[str, Any]] = []
        with compiling(arch, seen):
            call()
        for name, kernel in seen:
            registers, stack = _usage(kernel.asm["cubin"])
            m = kernel.metadata
            out.append(Compiled(f"{name} ({label})", arch, registers, stack, m.shared, m.num_warps))
    return out


def reductions(kernel: Any) -> list[str]:
    """The layouts in which a compiled Triton kernel sums, in order: equal layouts add in equal order."""
    ir = kernel.asm["ttgir"]
    layouts = dict(re.findall(r"^(#blocked\d*) = (.*)$", ir, re.MULTILINE))
    blocks = re.findall(r'"tt\.reduce".*?\}\) : \(tensor<[^#]*(#blocked\d*)>', ir, re.DOTALL)
    return [layouts[name] for name in blocks]


def products(kernel: Any) -> list[tuple[str, ...]]:
    """How a compiled Triton kernel multiplies, product by product: the matrix unit's version, over how many warps a
    row's columns are dealt, the unit's shape, and how many neighbours of the inner dimension a thread hands it (where
    it hands any). Equal ones add in equal order, over however many warps the rows are dealt."""
    ir = kernel.asm["ttgir"]
    layouts = dict(re.findall(r"^(#mma\d*) = (.*)$", ir, re.MULTILINE))
    dots = re.findall(r" = (?:tt\.dot|ttng\.warp_group_dot) [^:]*: (.*)$", ir, re.MULTILINE)
    found = []
    for types in dots:
        layout = layouts[re.findall(r"#mma\d*", types)[-1]]
        parts = re.search(r"versionMajor = (\d+), .*warpsPerCTA = \[\d+, (\d+)\], instrShape = \[(.*?)\]", layout)
        width = re.search(r"opIdx = 0, parent = #mma\d*, kWidth = (\d+)", types)
        found.append((*parts.groups(), width[1] if width else ""))  # type: ignore[union-attr]
    return found


def cuda_kernels(arch: int) -> list[Compiled]:
    """The W4A16 products' variants, compiled for sm_`arch` by NVRTC."""
    from soloist.ops import delta_cuda, linear_cuda
    from soloist.ops.cuda import nvrtc

    out = []
    for key_heads, value_heads, dim in ((16, 48, 128), (2, 4, 32)):
        for state, fold in ((0, 0), (1, 0), (1, 1), (2, 1)):
            macros = {"HK": key_heads, "HV": value_heads, "DK": dim, "DV": dim, "STATE": state, "FOLD": fold}
            macros |= {"SIGMOID": 0, "PDL": int(arch >= 90 and not fold)}
            _, log = nvrtc.compile_cubin(nvrtc.source("delta"), arch, macros, verbose=True)
            name = f"delta ({'fold' if fold else 'walk'}, {value_heads} heads of {dim}, states {state})"
            out.append(_from_log(name, arch, log, 0, delta_cuda.THREADS // 32))
    for zeros in (0, 1):
        for row_tile in linear_cuda.ROW_TILES:
            ring = linear_cuda.plan_ring(row_tile, bool(zeros), SHARED_LIMIT[arch])
            if ring is None:
                continue
            macros = {"MT": row_tile, "U": ring.units, "STAGES": ring.stages, "HAS_ZEROS": zeros, "SCALE_BF16": 0}
            macros |= {"PDL": int(arch >= 90), "WM": linear_cuda.m_tiles_per_warp(row_tile)}
            _, log = nvrtc.compile_cubin(nvrtc.source("w4a16"), arch, macros, verbose=True)
            label = f"w4a16 ({row_tile} rows{', zeros' if zeros else ''})"
            out.append(_from_log(label, arch, log, ring.shared, linear_cuda.threads(row_tile) // 32))
        source, shared, stages = linear_cuda.plan_prefill(bool(zeros), SHARED_LIMIT[arch], arch)
        macros = {"STAGES": stages, "HAS_ZEROS": zeros, "SCALE_BF16": 0}
        _, log = nvrtc.compile_cubin(nvrtc.source(source), arch, macros, verbose=True)
        out.append(_from_log(f"{source}{' (zeros)' if zeros else ''}", arch, log, shared, 8))
    return out


def _from_log(name: str, arch: int, log: str, shared: int, warps: int) -> Compiled:
    registers = int(re.search(r"Used (\d+) registers", log).group(1))  # type: ignore[union-attr]
    spills = sum(map(int, re.findall(r"(\d+) bytes spill stores", log)))
    static = re.search(r"(\d+) bytes smem", log)
    return Compiled(name, arch, registers, spills, shared + (int(static.group(1)) if static else 0), warps)


def step_calls(
    hidden: int, ffn: int, heads: int, kv: int, dim: int, rope: int, hk: int, hv: int, dk: int, state: torch.dtype
) -> dict[str, Callable[[], object]]:
    """The Triton launches of a verify step at one shape, on empty CPU tensors of 16-bit activations."""
    from soloist.ops import top
    from soloist.ops.linear_cuda import Squares, parts_of
    from soloist.ops.stored_rows import StoredRows
    from soloist.ops.triton import attention, delta, delta_prefill, gates, prefill, rows
    from soloist.ops.triton.conv import causal_conv
    from soloist.ops.triton.dense import DenseProduct
    from soloist.ops.triton.norms import norm
    from soloist.ops.triton.top import RowTop
    from soloist.ops.triton.wide import wide

    t, r, pages, taps = 16, 2, 8, 4

    channels = 2 * hk * dk + hv * dk
    record = (full(t, hk, dk), full(t, hk, dk), full(t, hv, dk), full(t, hv), full(t, hv))
    layered = (record[0], record[1][None], record[2][None], record[3][None], record[4][None])
    u, ba = half(t, channels + hv * dk), half(t, 2 * hv)
    states = torch.zeros(2, hv, dk, dk, dtype=state)
    qkv = half(t, 2 * (heads + kv) * dim)
    keys = half(pages * 64 * r, kv, dim)
    table = {n: index(r) for n in ("starts", "counts", "settled", "slots")}
    table |= {n: index(t) for n in ("request", "positions", "parts")}
    table |= {"page_table": index(r, pages), "lanes": index(t, 32)}
    partials = attention.Partials.allocate(64, heads, dim, torch.device("cpu"))
    q, k_rows, prompt = half(t, heads, dim), half(t, kv, dim), full(128, hv, dk)
    return {
        "add_norm": lambda: rows.add_norm(half(t, hidden), half(t, hidden), full(hidden), 1e-6, half(t, hidden)),
        "silu_mul": lambda: rows.silu_mul(half(t, 2 * ffn), half(t, ffn)),
        "qk_prepare": lambda: rows.qk_prepare(
            qkv, full(heads + kv, dim), table["positions"], full(rope // 2), 1e-6, q, k_rows, k_rows.clone()
        ),
        "verify_attention": lambda: attention.verify_attention(
            q, k_rows, k_rows, keys, keys, table, partials, qkv, half(t, heads * dim), dim**-0.5
        ),
        "settle_kv": lambda: attention.settle_kv(
            (StoredRows(k_rows[None]),) * 2, (StoredRows(keys[None]),) * 2, index(r, 32), index(r), index(r),
            index(r, pages),
        ),
        "prepare": lambda: delta.prepare(
            u, ba, half(2, taps - 1, channels), index(t, taps), index(t), index(r), full(taps, channels), full(hv),
            full(hv), record,
        ),
        "prepare_gates": lambda: gates.prepare_gates(
            half(t, hidden), Squares(full(t, parts_of(hidden)), hidden, 1e-6), DenseProduct(half(2 * hv, hidden)), u,
            half(2, taps - 1, channels), index(t, taps), index(t), index(r), full(taps, channels), full(hv), full(hv),
            record,
        ),
        "walk": lambda: delta.walk(
            states, record, full(t, hv, dk), full(2, hv, dk, dk), index(r), index(r), index(r), index(t), index(t)
        ),
        "fold": lambda: delta.fold(
            states[None], half(1, 2, taps - 1, channels), layered, u[None], index(t, taps), index(r, 32), index(r),
            index(r),
        ),
        "gated_norm": lambda: delta.gated_norm(
            full(t, hv, dk), u[:, channels:], full(dk), 1e-6, "silu", half(t, hv * dk)
        ),
        "chunk_scan": lambda: delta_prefill.chunk_scan(
            full(hv, dk, dk), prompt, prompt, prompt, full(128, hv), full(128, hv), state
        ),
        "prefill_attention": lambda: prefill.prefill_attention(
            half(128, heads, dim), half(128, kv, dim), half(128, kv, dim), 0, 64, 0.1
        ),
        "norm": lambda: norm(half(t, heads, dim), full(heads, dim), 1e-6, gate=half(t, heads, dim)),
        "causal_conv": lambda: causal_conv(u[:, :channels], half(taps - 1, channels), full(taps, channels)),
        "dense": lambda: DenseProduct(half(2 * hv, hidden))(half(t, hidden)),
        "top": lambda: RowTop(t, 248320, 128, torch.device("cpu"))(half(t, 248320), index(t, top.width(128))),
        "wide": lambda: wide(half(t, hidden), half(ffn, hidden), None, half(t, ffn)),
    }  # fmt: skip


def format_calls(heads: int, kv: int, dim: int, rope: int, name: str) -> dict[str, Callable[[], object]]:
    """The launches that know a KV format, at one shape; `name` as in `FORMATS`."""
    from soloist.ops.stored_rows import StoredRows
    from soloist.ops.triton import attention, prefill, rows
    from soloist.ops.triton.kv import write

    t, r, pages = 16, 2, 8
    kind = FORMATS[name]

    def stored(*shape: int) -> tuple[StoredRows, StoredRows]:
        """Keys and values of `shape` rows; int8 rows carry a scale per head."""
        scale = torch.zeros(*shape, kv) if kind == torch.int8 else None
        part = StoredRows(torch.zeros(*shape, kv, dim, dtype=kind), scale)
        return part, part

    settled, mine = stored(r * pages * 64), stored(t)

    qkv, q = half(t, 2 * (heads + kv) * dim), half(t, heads, dim)
    table = {n: index(r) for n in ("starts", "counts", "settled")}
    table |= {n: index(t) for n in ("request", "positions", "parts")}
    table |= {"page_table": index(r, pages), "lanes": index(t, 32)}
    partials = attention.Partials.allocate(64, heads, dim, torch.device("cpu"))
    return {
        "qk_prepare": lambda: rows.qk_prepare(
            qkv, torch.zeros(heads + kv, dim), table["positions"], torch.zeros(rope // 2), 1e-6, q,
            *mine,
        ),
        "verify_attention": lambda: attention.verify_attention(
            q, *mine, *settled, table, partials, qkv, half(t, heads * dim), dim**-0.5
        ),
        "settle_kv": lambda: attention.settle_kv(
            stored(1, t), stored(1, r * pages * 64), index(r, 32), index(r), index(r), index(r, pages)
        ),
        "write": lambda: write(half(t, kv, dim), index(t, dtype=torch.int64), settled[0]),
        "prefill_attention": lambda: prefill.prefill_attention(
            half(128, heads, dim), *settled, 0, 64, 0.1, index(128, dtype=torch.int64)
        ),
    }  # fmt: skip


def draft_calls(heads: int, kv: int, dim: int) -> dict[str, Callable[[], object]]:
    """The Triton launches of the levels of an MTP draft at one shape."""
    from soloist.ops import top
    from soloist.ops.triton import draft
    from soloist.ops.triton.top import RowTop

    cpu = torch.device("cpu")
    t, r, pages = 16, 2, 8

    table = {n: index(r) for n in ("starts", "counts")} | {n: index(t) for n in ("sees", "parts", "mask", "request")}
    table["page_table"] = index(r, pages)
    planes = half(pages * 64, kv, dim), half(pages * 64, kv, dim)
    partials = torch.zeros(64, heads, dim), torch.zeros(64, heads), torch.zeros(64, heads)
    level = {n: index(t) for n in ("tokens", "sources", "rotary", "mask")} | {"alive": torch.zeros(t)}
    ids = torch.zeros(100, dtype=torch.int64)

    def attend(beam: int) -> None:
        rows = r * max(1, beam)
        own = (half(16 // beam, rows, kv, dim),) * 2 if beam else None
        qkv, out = half(rows, 2 * (heads + kv) * dim), half(rows, heads * dim)
        draft.attend(half(rows, heads, dim), planes, own, beam, table, partials, qkv, out, 0.1)

    def choose(paths: int, beam: int) -> None:
        packed = index(r * paths, top.width(64))
        draft.choose(packed, ids, index(r, 8), torch.zeros(r, 4), level, level, 0, index(r * beam, 2), beam, 64)

    return {
        "settled rows": lambda: attend(0),
        "chain rows": lambda: attend(1),
        "tree rows": lambda: attend(2),
        "store": lambda: draft.store(half(t, kv, dim), half(t, kv, dim), planes, table),
        "move_rows": lambda: draft.move_rows(half(t, heads * dim), index(r), half(t, heads * dim), index(r)),
        "choose a chain": lambda: choose(1, 1),
        "choose a tree": lambda: choose(2, 2),
        "top 64": lambda: RowTop(t, 40960, 64, cpu, stats=False)(half(t, 40960), index(t, top.width(64))),
    }


def all_calls() -> dict[str, Callable[[], object]]:
    """The launches at 27B and demo shapes, states in fp16 and fp32."""
    shapes = {
        "27B, fp16": (5120, 17408, 24, 4, 256, 64, 16, 48, 128, torch.float16),
        "27B, fp32": (5120, 17408, 24, 4, 256, 64, 16, 48, 128, torch.float32),
        "demo": (256, 768, 4, 2, 64, 16, 2, 4, 32, torch.float32),
    }
    calls = {f"{op}, {at}": call for at, shape in shapes.items() for op, call in step_calls(*shape).items()}
    calls |= {f"{op}, 27B": call for op, call in draft_calls(24, 4, 256).items()}
    for at, drafter in {"27B": (5120, 32, 8, 128, 2, 256, 248320, 8), "demo": (384, 6, 2, 64, 4, 64, 16384, 0)}.items():
        calls |= {f"{op}, {at} block": call for op, call in block_calls(*drafter).items()}
    for name in FORMATS:
        for at, shape in {"27B": (24, 4, 256, 64), "demo": (4, 2, 64, 16)}.items():
            calls |= {f"{op}, {at}, {name}": call for op, call in format_calls(*shape, name).items()}
    for at, heads in {"27B": (24, 4, 256), "demo": (4, 2, 64)}.items():
        calls |= {f"{op}, {at}, kvarn": call for op, call in kvarn_calls(*heads).items()}
    return calls


def main(archs: list[int]) -> int:
    """Compile for every card, print the table, return the number of kernels that do not fit."""
    failures = 0
    for arch in archs:
        for kernel in (*triton_kernels(arch, all_calls()), *cuda_kernels(arch)):
            reason = kernel.excess()
            failures += reason is not None
            print(
                f"sm_{arch:<4}{kernel.name:45s} {kernel.registers:4d} registers {kernel.spills:5d} B local "
                f"{kernel.shared:7d} B shared  {reason or 'fits'}"
            )
    return failures


if __name__ == "__main__":
    sys.exit(main([int(a) for a in sys.argv[1:]] or list(SHARED_LIMIT)))
