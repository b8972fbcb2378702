"""Every kernel compiles for every card users have, without one, and fits its registers and shared memory."""

import ast
import os
import subprocess
import sys

import pytest

from soloist.ops.aot import SHARED_LIMIT

# In a quick run the card with the smallest shared memory stands for the rest; CI compiles for all of them.
QUICK = (86,)


@pytest.mark.parametrize(
    "arch", [a if a in QUICK else pytest.param(a, marks=pytest.mark.slow) for a in sorted(SHARED_LIMIT)]
)
def test_kernels_fit(arch: int) -> None:
    # A process of its own: these tests run the interpreter, the compiler must not.
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join(p for p in sys.path if p)
    command = [sys.executable, "-m", "soloist.ops.aot", str(arch)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    assert done.stdout.count(f"sm_{arch}") >= 40


SUMS = """
from soloist.ops import aot
for name, call in aot.all_calls().items():
    if name.startswith(("walk", "fold")):
        seen = []
        with aot.compiling({arch}, seen):
            call()
        for kernel, compiled in seen:
            if kernel in ("_walk", "_fold"):
                print(name.split(", ", 1)[1], kernel, aot.reductions(compiled), sep="|")
"""


@pytest.mark.parametrize("arch", [86, 90])
def test_fold_adds_in_the_order_of_the_walk(arch: int) -> None:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join(p for p in sys.path if p)
    command = [sys.executable, "-c", SUMS.format(arch=arch)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=600)
    assert done.returncode == 0, done.stderr[-2000:]
    sums: dict[str, dict[str, list[str]]] = {}
    for line in done.stdout.splitlines():
        shape, kernel, layouts = line.split("|")
        sums.setdefault(shape, {})[kernel] = ast.literal_eval(layouts)
    assert len(sums) == 3
    for shape, kernels in sums.items():
        # The walk sums S^T k and S^T q for four rows, the fold S^T k alone. More sums would be a second order.
        assert len(kernels["_walk"]) == 8 and len(kernels["_fold"]) == 1, (shape, kernels)
        assert set(kernels["_walk"]) == set(kernels["_fold"]), (shape, kernels)


PRODUCTS = """
from soloist.ops import aot
for name, call in aot.all_calls().items():
    if name.startswith("verify_attention"):
        seen = []
        with aot.compiling({arch}, seen):
            call()
        for kernel, compiled in seen:
            if kernel in ("_past", "_recent"):
                print(name, kernel, aot.products(compiled), sep="|")
"""


@pytest.mark.parametrize(
    "arch", [a if a in QUICK else pytest.param(a, marks=pytest.mark.slow) for a in sorted(SHARED_LIMIT)]
)
def test_shared_splits_and_a_rows_own_multiply_alike(arch: int) -> None:
    """A split of attention gives a row the same bits whether it is computed for all rows or for one: E1 rests on it."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join(p for p in sys.path if p)
    command = [sys.executable, "-c", PRODUCTS.format(arch=arch)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=600)
    assert done.returncode == 0, done.stderr[-2000:]
    found: dict[str, dict[str, list[tuple[str, str]]]] = {}
    for line in done.stdout.splitlines():
        shape, kernel, layouts = line.split("|")
        found.setdefault(shape, {})[kernel] = ast.literal_eval(layouts)
    assert len(found) >= 9 and any("kvarn" in name for name in found)
    for shape, kernels in found.items():
        assert len(kernels["_past"]) == len(kernels["_recent"]) == 2, (shape, kernels)
        assert kernels["_past"] == kernels["_recent"], (shape, kernels)


FUSED = """
import torch
from soloist.ops import aot
from soloist.ops.triton import attention

def half(*shape):
    return torch.zeros(shape, dtype=torch.bfloat16)

def index(*shape):
    return torch.zeros(shape, dtype=torch.int32)

t, r, pages, heads, kv, dim = 16, 2, 8, 8, 2, 128
table = {{n: index(r) for n in ("starts", "counts", "settled")}}
table |= {{n: index(t) for n in ("request", "positions", "parts")}}
table |= {{"page_table": index(r, pages), "lanes": index(t, 32)}}
partials = attention.Partials.allocate(64, heads, dim, torch.device("cpu"))
rows, keys, seen = half(t, kv, dim), half(pages * 64, kv, dim), []
with aot.compiling({arch}, seen):
    attention.verify_attention(
        half(t, heads, dim), rows, rows, keys, keys, table, partials, half(t, 24 * dim), half(t, heads * dim), dim**-0.5
    )
for kernel, compiled in seen:
    print(kernel, compiled.asm["ptx"].count("fma.rn.f32"))
"""


@pytest.mark.parametrize("arch", [86, pytest.param(90, marks=pytest.mark.slow)])
def test_a_scale_that_rounds_is_fused_nowhere(arch: int) -> None:
    """What is fused is the running total of a row. A shared tile has twice the rows of a row's own heads, but on sm_90,
    where each thread has two rows of either. Where the scale is no power of two a fused score would have other bits
    than a row gets alone."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join(p for p in sys.path if p)
    done = subprocess.run(
        [sys.executable, "-c", FUSED.format(arch=arch)], capture_output=True, text=True, env=environment, timeout=600
    )
    assert done.returncode == 0, done.stderr[-2000:]
    fused = {name: int(count) for name, count in (line.split() for line in done.stdout.splitlines())}
    assert fused["_past"] == (1 if arch == 90 else 2) * fused["_recent"] > 0, fused
