"""A first start finds every kernel compiled by the time it launches it; a second one compiles nothing at all."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from soloist import demo

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

START = """
import json, logging, sys, time
logging.basicConfig(level="INFO")
began = time.perf_counter()
import torch
from cache.arms import Pending, text
from soloist.bench.compilations import Compilations
from soloist.engine.build import build_engine
from soloist.sampling.params import SamplingParams
from soloist.settings import resolve

seen = Compilations()
seen.watch()
knobs = dict(pair.split("=") for pair in sys.argv[2:])
settings = resolve({"model": sys.argv[1], "device": "cuda", "pool_tokens": "16384", **knobs}, {}, {})
engine = build_engine(settings)
started = time.perf_counter() - began
segments = torch.cuda.memory._snapshot()["segments"]
expandable = sum(s["total_size"] for s in segments if s.get("is_expandable"))
sampled = SamplingParams(max_tokens=24, temperature=0.8, top_k=20)
greedy = SamplingParams(max_tokens=24, temperature=0.0, logprobs=0)
for params in (greedy, sampled):
    for n in (5, 64, 300, 700):
        Pending(engine, text(n, engine.vocab_size - 64, seed=n), params).answer()
together = [Pending(engine, text(n, engine.vocab_size - 64, seed=n), greedy) for n in (30, 65, 130)]
for one in together:
    one.answer()
engine.close()
print(json.dumps({"seconds": started, "expandable": expandable, **seen.report()}))
"""

ARMS = {
    "bf16, mtp": ("demo", {"spec": "mtp"}),
    "W4A16, dflash2, fp8": ("W4A16", {"spec": "dflash2", "kv_format": "fp8"}),
}


@pytest.mark.parametrize("name", ARMS)
def test_no_kernel_is_compiled_late(name: str, tmp_path: Path) -> None:
    form, knobs = ARMS[name]
    model = demo.path()
    if form == "W4A16":
        from gpu.w4 import demo_in_w4

        model = demo_in_w4(tmp_path / "demo")
    caches = {"XDG_CACHE_HOME": str(tmp_path / "cache"), "TRITON_CACHE_DIR": str(tmp_path / "triton")}
    environment = os.environ | caches | {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    command = [sys.executable, "-c", START, str(model), *(f"{k}={v}" for k, v in knobs.items())]
    said = []
    for _ in ("cold", "warm"):
        done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=400)
        assert done.returncode == 0, done.stderr[-3000:]
        said.append(json.loads(done.stdout.splitlines()[-1]))
        print(done.stderr[-1500:], said[-1])
    cold, warm = said
    assert "kernels: all known" in done.stderr
    assert cold["late"] == [] and warm["late"] == []
    assert cold["triton_known"] > 20
    if "whole pieces" not in done.stderr:
        assert warm["expandable"] > 0
