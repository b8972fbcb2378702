"""Every kernel compiles for every card users have, without one, and fits its registers and shared memory."""

import os
import subprocess
import sys

import pytest

from soloist.ops.aot import SHARED_LIMIT


@pytest.mark.parametrize("arch", sorted(SHARED_LIMIT))
def test_kernels_fit(arch: int) -> None:
    # A process of its own: these tests run the interpreter, the compiler must not.
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join(p for p in sys.path if p)
    command = [sys.executable, "-m", "soloist.ops.aot", str(arch)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    assert done.stdout.count(f"sm_{arch}") >= 40
