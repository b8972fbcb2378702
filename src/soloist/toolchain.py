"""What Triton needs of a machine with a card before its first launch: a C compiler and Python's headers.

No CUDA toolkit is needed. Triton compiles the stubs that launch its kernels once and keeps them; without the two it
fails at the first launch, which is after the weights have been read.
"""

from __future__ import annotations

import os
import shutil
import sysconfig
from collections.abc import Mapping
from pathlib import Path

REMEDY = "On Debian and Ubuntu: apt install gcc python3-dev (with the version of Python in use, as in python3.12-dev)."


def missing(environ: Mapping[str, str] = os.environ, include: str | None = None) -> str | None:
    """What Triton would not find, in words, or None. `include` is Python's own header directory unless given."""
    if not environ.get("CC") and not any(shutil.which(cc, path=environ.get("PATH")) for cc in ("gcc", "clang")):
        return "a C compiler (gcc or clang, or the one that CC names)"
    # Debian's own scheme points below /usr/local, where the headers are not; Triton looks where they are, too.
    scheme = sysconfig.get_default_scheme()
    paths = sysconfig.get_paths("posix_prefix" if scheme == "posix_local" else scheme)
    header = Path(include or paths["include"]) / "Python.h"
    return None if header.is_file() else f"Python's headers ({header})"
