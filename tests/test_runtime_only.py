"""What `make chat` installs is enough: no triton, no test dependency, and a script that ends cleanly."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

SCRIPT = """
import sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("triton", "cuda", "transformers", "matplotlib", "PIL"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Absent())
from soloist import Engine

print(len(Engine("demo").chat("Hello").content) > 0)
"""


def test_the_demo_answers_without_the_extras() -> None:
    source = Path(__file__).parent.parent / "src"
    environment = {**os.environ, "PYTHONPATH": str(source)}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, env=environment, timeout=200, check=False
    )
    assert done.stdout.strip() == "True", done.stderr[-2000:]
    assert done.returncode == 0, done.stderr[-2000:]
