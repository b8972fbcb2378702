"""Schemathesis draws requests from the OpenAPI document; no operation may answer 5xx or log a fault.

Skipped where it is not installed: `pip install 'soloist[clients]'`.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
def test_every_operation_of_the_document(say_once, caplog):
    pytest.importorskip("schemathesis")
    program = Path(sys.executable).with_name("schemathesis")
    command = [program, "run", say_once.url + "/openapi.json", "--checks", "not_a_server_error", "--no-color"]
    command += ["--max-examples", "30", "--phases", "coverage,fuzzing", "--request-timeout", "60", "--seed", "1"]
    command += ["--exclude-path-regex", "^/(sleep|wake)"]  # 501 from the scripted engine
    done = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0 and "Tested: 20" in " ".join(done.stdout.split()), done.stdout[-6000:]
    assert not [r.getMessage() for r in caplog.records if r.levelname in ("ERROR", "CRITICAL")]
