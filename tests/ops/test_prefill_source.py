"""The prefill products' sources, run on the CPU with late copies and warps in any order, against the exact product."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from functools import cache
from pathlib import Path

import pytest
import torch

from products_on_host import BEFORE, CUDA, HEADER, OPTIONS, holds_in_child, on_host
from soloist.ops.linear import QuantizedWeight
from soloist.ops.linear_cuda import PackedW4, pack

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")

SOURCES = sorted(p.stem for p in CUDA.glob("w4a16_prefill*.cu"))
SHARED = 232448
# What each source must not do without: (text, what stands in its place).
FAULTS = {
    "w4a16_prefill": [
        ("if (more) barrier_wait(full + after * 8, after_turn);", ""),
        ("if (k > 0) barrier_wait(empty + before * 8, slot == 0 ? turn ^ 1 : turn);", ""),
        ("(thread % 8 ^ thread / 8 % 8) * 16", "thread % 8 * 16"),
    ],
    "w4a16_prefill_wgmma": [
        ("            barrier_wait(full + after * 8, after_turn);\n", ""),
        ("if (k >= STAGES - AHEAD) barrier_wait(empty + fill * 8, fill_turn);", ""),
        ("(thread % 8 ^ thread / 8 % 8) * 16", "thread % 8 * 16"),
    ],
}
LAUNCH = """
extern "C" bool launch(const u8* w, const u8* scales, const u8* zeros, const u8* x, u16* y, int rows, int n_out,
                       int x_stride, int y_stride, int m_tiles, int per_tile, int group_units, int paired, int grid,
                       int shared, int seed) {
    host::add(grid, 256, shared, false, [=] {
        w4a16_prefill(w, scales, zeros, x, y, rows, n_out, x_stride, y_stride, m_tiles, per_tile, group_units, paired);
    });
    return host::run(seed);
}
"""


def compile_source(code: str, macros: dict[str, int], directory: Path) -> ctypes.CDLL:
    text, library = directory / "kernel.cpp", directory / "kernel.so"
    text.write_text(f'#include "{HEADER}"\n{BEFORE}\n{on_host(code)}{LAUNCH}', encoding="utf-8")
    defines = [f"-D{name}={value}" for name, value in macros.items()]
    subprocess.run(["g++", *OPTIONS, *defines, str(text), "-o", str(library)], check=True)
    return ctypes.CDLL(str(library.resolve()))


@cache
def library(source: str, zeros: bool, bf16: bool, stages: int, directory: Path) -> ctypes.CDLL:
    macros = {"HAS_ZEROS": int(zeros), "SCALE_BF16": int(bf16), "STAGES": stages}
    directory /= f"{source}-{zeros}-{bf16}-{stages}"
    directory.mkdir()
    return compile_source((CUDA / f"{source}.cu").read_text(), macros, directory)


def quantized(n: int, k: int, group: int, zeros: bool, scale: torch.dtype) -> QuantizedWeight:
    """Random codes; some groups, one whole column and one column's first group have a scale of zero."""
    g = torch.Generator().manual_seed(n + k)
    words = torch.randint(-(2**31), 2**31 - 1, (n, k // 8), dtype=torch.int32, generator=g)
    scales = torch.randn(n, k // group, generator=g).to(scale)
    scales[5:70:3, ::2] = scales[7] = scales[11, 0] = 0
    z = torch.randint(0, 16, (n, k // group), dtype=torch.uint8, generator=g) if zeros else None
    return QuantizedWeight(words, scales, z, 4, group, (n, k))


def product(kernel: ctypes.CDLL, w: PackedW4, x: torch.Tensor, seed: int) -> torch.Tensor | None:
    """None if some thread waits for what never comes."""
    (n, k), rows = w.shape, x.shape[0]
    y = torch.full((rows, n), float("nan"), dtype=torch.bfloat16)
    m_tiles = -(-rows // 128)
    pointers = [0 if v is None else v.data_ptr() for v in (w.words, w.scales, w.zeros, x, y)]
    numbers = [rows, n, x.stride(0), n, m_tiles, k // 64, w.group_units, int(w.paired), m_tiles * w.words.shape[0]]
    kernel.launch.restype = ctypes.c_bool
    return y if kernel.launch(*map(ctypes.c_void_p, pointers), *numbers, SHARED, seed) else None


def error(y: torch.Tensor, truth: torch.Tensor) -> float:
    return float((y.double() - truth).norm() / truth.norm())


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("prefill")


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize(
    ("n", "k", "group", "zeros", "scale", "paired", "stages", "rows"),
    [
        (256, 640, 128, False, torch.float16, False, 4, 40),
        (256, 64, 64, False, torch.float16, False, 4, 3),
        (320, 512, 256, False, torch.float16, False, 4, 130),
        (600, 512, 128, True, torch.bfloat16, True, 3, 20),
        (296, 640, 64, True, torch.bfloat16, False, 3, 9),
    ],
)
def test_right_and_the_same_in_company(
    source: str,
    n: int,
    k: int,
    group: int,
    zeros: bool,
    scale: torch.dtype,
    paired: bool,
    stages: int,
    rows: int,
    built: Path,
) -> None:
    weight = quantized(n, k, group, zeros, scale)
    kernel, packed = library(source, zeros, scale is torch.bfloat16, stages, built), pack(weight, paired)
    x = torch.randn(rows, k + 8).bfloat16()[:, :k]
    y = product(kernel, packed, x, seed=1)
    assert y is not None and torch.isfinite(y).all()
    assert error(y, x.double() @ weight.dequantize(torch.float64).T) < 2.5e-3
    again, alone = product(kernel, packed, x, seed=2), product(kernel, packed, x[rows - 1 :], seed=3)
    assert again is not None and torch.equal(again, y)
    assert alone is not None and torch.equal(alone[0], y[rows - 1])


@pytest.mark.slow
@pytest.mark.parametrize(("source", "text", "instead"), [(s, *f) for s in SOURCES for f in [("", ""), *FAULTS[s]]])
def test_a_missing_wait_shows(source: str, text: str, instead: str, tmp_path: Path) -> None:
    """What the test above rests on: that the host is as careless as a card."""
    code = (CUDA / f"{source}.cu").read_text()
    assert not text or code.count(text) == 1
    kernel = compile_source(
        code.replace(text, instead) if text else code, {"HAS_ZEROS": 0, "SCALE_BF16": 0, "STAGES": 4}, tmp_path
    )
    weight = quantized(256, 1024, 128, False, torch.float16)
    packed, x = pack(weight), torch.randn(9, 1024).bfloat16()
    truth = x.double() @ weight.dequantize(torch.float64).T

    def right() -> bool:
        outs = [product(kernel, packed, x, seed) for seed in (1, 2)]
        return all(y is not None and error(y, truth) < 2.5e-3 for y in outs)

    assert holds_in_child(right) == (not text)
