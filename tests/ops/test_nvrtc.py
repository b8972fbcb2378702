"""NVRTC fills the caller's buffers, which must be nobody else's."""

import os
import subprocess
import sys
from pathlib import Path

EMPTY_LOG = """
from soloist.ops.cuda.nvrtc import compile_cubin

cubin, log = compile_cubin('extern "C" __global__ void one(int* p) { *p = 1; }', 90, {})
assert type(cubin) is bytes and cubin.startswith(b"\\x7fELF"), cubin[:8]
assert log == "", log
print(bytes([32])[0])
"""


def test_an_empty_log_overwrites_no_constant(tmp_path: Path) -> None:
    """Bytes of length 1 are one object for the whole interpreter. Modules compiled from source share their constants
    with it, those read from bytecode do not: a process that finds no bytecode shows the fault every time."""
    environment = os.environ | {
        "PYTHONPYCACHEPREFIX": str(tmp_path),
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
    }
    done = subprocess.run(
        [sys.executable, "-c", EMPTY_LOG], capture_output=True, text=True, env=environment, timeout=120
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.split() == ["32"], "b' ' was overwritten"
