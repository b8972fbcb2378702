"""What a start compiles side by side: all that real steps ask for, found by the launch, and no start ends for it."""

from __future__ import annotations

import gc
import json
import logging
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
import torch

pytest.importorskip("triton")

from soloist.checkpoint.reader import open_checkpoint
from soloist.engine.compile_ahead import CompileAhead, _all_there, _key
from soloist.engine.rehearsal import kinds_of_layers
from soloist.ops.aot import SHARED_LIMIT
from soloist.ops.rehearsal import Card
from soloist.settings import resolve
from tiny import build_tiny, build_tiny_drafter

TESTS = Path(__file__).parent.parent
CARD = Card("a card", 86, 82, SHARED_LIMIT[86], 24 << 30)


@pytest.fixture(scope="module")
def half(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("half")
    build_tiny(directory, dtype=torch.bfloat16)
    build_tiny_drafter(directory / "dflash2", directory, dtype=torch.bfloat16)
    return directory


def compiling(*command: str, **more: str) -> subprocess.CompletedProcess[str]:
    """In a process of its own: these tests run the interpreter, the compiler must not."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | more
    environment["PYTHONPATH"] = os.pathsep.join([str(TESTS), *(p for p in sys.path if p)])
    return subprocess.run([sys.executable, *command], capture_output=True, text=True, env=environment, timeout=600)


@pytest.mark.parametrize(
    ("arch", "knobs"),
    [
        (86, ("max_seqs=3",)),
        (90, ("max_seqs=3", "spec=dflash2")),
        pytest.param(90, ("max_seqs=5", "kv_format=fp8", "kv_format_v=int8", "tree=0"), marks=pytest.mark.slow),
        pytest.param(120, ("max_seqs=2", "kv_format=kvarn"), marks=pytest.mark.slow),
    ],
)
def test_a_rehearsal_asks_for_all_that_real_steps_ask_for(half: Path, arch: int, knobs: tuple[str, ...]) -> None:
    done = compiling(str(TESTS / "engine/asked.py"), str(half), str(arch), *knobs)
    assert done.returncode == 0, done.stderr[-3000:]
    *missing, last = [line for line in done.stdout.splitlines() if line]
    assert missing == []
    asked, rehearsed = (int(n) for n in re.findall(r"\d+", last))
    assert 30 < asked <= rehearsed


FOUR_BITS = """
import json, sys
from dataclasses import replace
from pathlib import Path
from soloist.bench.kernels import card
from soloist.bench.synthetic import dflash2_27b, qwen38_27b
from soloist.bench.synthetic_dir import write_synthetic
from soloist.engine.rehearsal import rehearse
from soloist.ops.rehearsal import CudaJob
from soloist.settings import resolve

small = replace(qwen38_27b(8), hidden_size=512, intermediate_size=512, vocab_size=4096, eos_ids=(4090,))
write_synthetic(Path(sys.argv[1]), small, replace(dflash2_27b(small), num_layers=1), hollow=True)
settings = resolve({"model": sys.argv[1], "device": "cuda", "spec": "dflash2", "max_seqs": "2"}, {}, {})
jobs = rehearse(settings, card(90)).jobs.values()
print(json.dumps([[job.source, job.arch, dict(job.macros)] for job in jobs if isinstance(job, CudaJob)]))
"""


def test_a_rehearsal_of_a_prepared_directory_asks_for_the_cuda_kernels(tmp_path: Path) -> None:
    """From headers alone: the files have no bytes."""
    done = compiling("-c", FOUR_BITS, str(tmp_path / "model"))
    assert done.returncode == 0, done.stderr[-3000:]
    jobs = json.loads(done.stdout.splitlines()[-1])
    assert {arch for _, arch, _ in jobs} == {90}
    assert {m["MT"] for name, _, m in jobs if name == "w4a16"} == {8, 16, 32}
    assert len([1 for name, *_ in jobs if name == "w4a16_prefill_wgmma"]) == 1
    # fp32 states: the default.
    assert {(m["FOLD"], m["STATE"], m["PDL"]) for name, _, m in jobs if name == "delta"} == {(0, 0, 1), (1, 0, 0)}


COMPILED = """
import json, sys
from pathlib import Path
from soloist.engine.rehearsal import rehearse
from soloist.ops import rehearsal
from soloist.ops.aot import SHARED_LIMIT, compiling
from soloist.ops.rehearsal import Card, CudaJob, TritonJob, compile_all
from soloist.settings import resolve

class Broken(CudaJob):
    def compile(self, directory):
        raise ValueError("as it may happen")

class Deadly(CudaJob):
    def compile(self, directory):
        import os
        os._exit(9)

settings = resolve({"model": sys.argv[1], "device": "cuda", "spec": "none", "max_seqs": "1"}, {}, {})
wanted = rehearse(settings, Card("a card", 86, 82, SHARED_LIMIT[86], 24 << 30))
few = [j for j in wanted.jobs.values() if j.name in ("rows._silu_mul", "norms._norm")]
out = Path(sys.argv[2])
first = compile_all([*few, Broken("broken", 86, ())], 2, out)
again = compile_all(few, 2, out)
deadly = compile_all([Deadly("deadly", 86, ()), *few], 2, out)

import torch
from soloist.bench.compilations import Compilations
from soloist.ops.triton import rows
seen = Compilations()
seen.watch()
reports = []
for width in (192, 200):  # a multiple of 16 and none
    half = torch.zeros(3, 2 * width, dtype=torch.bfloat16)
    with compiling(86, []):
        rows.silu_mul(half, half[:, :width].contiguous())
    reports.append(seen.report())
print(json.dumps({"first": [vars(o) for o in first], "again": [o.known for o in again], "reports": reports,
                  "deadly": [(o.name, o.error, o.known) for o in deadly], "jobs": len(few)}))
"""


def test_what_is_compiled_side_by_side_is_found_by_the_launch(half: Path, tmp_path: Path) -> None:
    done = compiling("-c", COMPILED, str(half), str(tmp_path / "cubins"), TRITON_CACHE_DIR=str(tmp_path / "triton"))
    assert done.returncode == 0, done.stderr[-3000:]
    said = json.loads(done.stdout.splitlines()[-1])
    good = [o for o in said["first"] if not o["error"]]
    assert len(good) == said["jobs"] >= 3
    assert all(not o["known"] and o["files"] and all(map(os.path.exists, o["files"])) for o in good)
    assert [o["error"] for o in said["first"] if o["name"] == "broken"] == ["ValueError: as it may happen"]
    assert all(said["again"])
    # The engine's width is found; another one is compiled at its launch, and said to be.
    found, late = said["reports"]
    assert (found["triton_known"], found["compiled"]) == (1, 0)
    assert (late["triton_known"], late["compiled"]) == (1, 1) and late["late"][0]["kernel"] == "_silu_mul"
    # One that takes its process with it is the only one that is not compiled.
    (_, error, _), *others = said["deadly"]
    assert "killed" in error and len(others) == said["jobs"] and all(known for *_, known in others)


SLOW = """
import os, sys, time
from pathlib import Path
from soloist.ops.rehearsal import CudaJob, compile_all

class Slow(CudaJob):
    def compile(self, directory):
        (directory / f"{os.getpid()}-{self.arch}").touch()
        time.sleep(4)
        return [], False

compile_all([Slow("slow", i, ()) for i in range(30)], 2, Path(sys.argv[1]))
"""


@pytest.mark.parametrize("end", ["Ctrl-C", "killed"])
def test_nothing_is_left_at_work(tmp_path: Path, end: str) -> None:
    """Neither all that was still to be compiled, nor processes that wait for more for ever."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    command = [sys.executable, "-c", SLOW, str(tmp_path)]
    with subprocess.Popen(command, env=environment, start_new_session=True, stderr=subprocess.PIPE) as process:
        try:
            until(lambda: len(list(tmp_path.iterdir())) >= 2, 100)
            os.killpg(process.pid, signal.SIGINT) if end == "Ctrl-C" else process.kill()
            assert process.wait(30) != 0  # all of it takes a minute
            workers = {int(path.name.partition("-")[0]) for path in tmp_path.iterdir()}
            until(lambda: not any(map(running, workers)), 30)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def until(true: Callable[[], bool], seconds: float) -> None:
    begun = time.monotonic()
    while not true():
        assert time.monotonic() - begun < seconds
        time.sleep(0.05)


def running(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_a_start_that_fails_leaves_no_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "python"
    script.write_text(f'#!/bin/sh\necho "$@" > {tmp_path}/arguments\nexec sleep 100\n')
    script.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(script))
    ahead = CompileAhead(resolve({"model": "demo"}, {}, {}), CARD, tmp_path / "note.json")
    process, arguments = ahead._process, tmp_path / "arguments"
    until(lambda: arguments.exists() and arguments.read_text().endswith("\n"), 30)
    # What happens to lie in the working directory is not imported.
    assert arguments.read_text().split() == ["-P", "-m", "soloist.engine.rehearsal"]
    assert process is not None and process.poll() is None
    del ahead
    gc.collect()
    assert process.wait(30) == -signal.SIGKILL


def test_no_place_for_temporary_files_costs_no_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("tempfile.TemporaryFile", mock.Mock(side_effect=FileNotFoundError("no usable directory")))
    CompileAhead(resolve({"model": "demo"}, {}, {}), CARD, tmp_path / "note.json").wait()
    assert "no usable directory" in caplog.text


def test_what_fails_for_all_is_not_said_for_each(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    kernels = [{"name": f"k{i}", "known": False, "files": [], "error": "read-only"} for i in range(70)]
    script = tmp_path / "python"
    script.write_text(f"#!/bin/sh\ncat > /dev/null\necho '{json.dumps({'kernels': kernels})}'\n")
    script.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(script))
    CompileAhead(resolve({"model": "demo"}, {}, {}), CARD, tmp_path / "note.json").wait()
    assert caplog.text.count("read-only") == 5 and "65 more" in caplog.text
    assert not (tmp_path / "note.json").exists()


def test_a_note_counts_while_its_files_are_there(tmp_path: Path) -> None:
    note, cubin = tmp_path / "note.json", tmp_path / "a.cubin"
    cubin.touch()
    assert not _all_there(note)
    note.write_text(json.dumps([str(cubin)]))
    assert _all_there(note)
    cubin.unlink()
    assert not _all_there(note)
    note.write_text("[")
    assert not _all_there(note)
    note.write_text("[]")
    assert not _all_there(note)


def test_a_note_is_of_one_card_one_model_and_the_knobs_that_decide(half: Path) -> None:
    checkpoint = open_checkpoint(half)

    def key(card: Card = CARD, **knobs: str) -> str:
        return _key(resolve({"model": str(half), **knobs}, {}, {}), checkpoint, card)

    assert key() == key(port="1234", max_queue="3", prefix_cache="0", lookup="0")
    others = [key(spec="none"), key(max_seqs="3"), key(kv_format="fp8"), key(replace(CARD, arch=90)), key()]
    assert len(set(others)) == len(others)


@pytest.mark.parametrize("program", ["/bin/false", "/bin/true", "/bin/echo", "/nowhere/python"])
def test_a_start_goes_on_where_nothing_could_be_compiled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, program: str
) -> None:
    monkeypatch.setattr(sys, "executable", program)
    settings = resolve({"model": "demo"}, {}, {})
    with caplog.at_level(logging.WARNING):
        CompileAhead(settings, CARD, tmp_path / "note.json").wait()
    assert "kernels" in caplog.text and not (tmp_path / "note.json").exists()


def test_what_was_compiled_is_noted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cubin = tmp_path / "a.cubin"
    cubin.touch()
    kernel = {"name": "a", "seconds": 1.0, "known": False, "files": [str(cubin)], "error": ""}
    script = tmp_path / "python"
    script.write_text(f"#!/bin/sh\ncat > /dev/null\necho '{json.dumps({'kernels': [kernel]})}'\n")
    script.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(script))
    settings, note = resolve({"model": "demo"}, {}, {}), tmp_path / "note.json"
    CompileAhead(settings, CARD, note).wait()
    assert _all_there(note)
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    again = CompileAhead(settings, CARD, note)
    assert again._process is None
    again.wait()


FEW = """
import soloist.engine.rehearsal as rehearsal
every = rehearsal.compile_all
rehearsal.compile_all = lambda jobs, workers, kernels: every(jobs[:3], workers, kernels)
raise SystemExit(rehearsal.main())
"""


def test_the_process_beside_a_start(
    half: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As a start runs it, except that it compiles three kernels only."""
    script = tmp_path / "python"
    script.write_text(f"#!/bin/sh\nexec {sys.executable} -c '{FEW}'\n")
    script.chmod(0o755)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(p for p in sys.path if p))
    monkeypatch.setattr(sys, "executable", str(script))
    settings = resolve({"model": str(half), "device": "cuda", "spec": "none", "max_seqs": "1"}, {}, {})
    note = tmp_path / "note.json"
    with caplog.at_level(logging.INFO):
        CompileAhead(settings, CARD, note).wait()
    assert "3 variants, 3 compiled" in caplog.text, caplog.text
    assert _all_there(note) and all(str(tmp_path) in file for file in json.loads(note.read_text()))


def test_the_first_layers_hold_every_pair_of_neighbours(half: Path) -> None:
    # LLLFLLLF: two linear ones, linear before full, full before linear.
    assert kinds_of_layers(open_checkpoint(half)) == 5
