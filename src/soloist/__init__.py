"""Soloist serves one person from one card, exactly. `from soloist import Engine` uses it without a server."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

# Before torch loads its OpenMP: workers that spin long at a barrier lose nearly all their speed the moment another
# program wants a core (measured on two cores: 4 tok/s instead of 160); a short spin keeps most of both.
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "10000")

if TYPE_CHECKING:
    from soloist.offline import Engine

__all__ = ["Engine"]


def __getattr__(name: str) -> Any:
    """`Engine` on first use: importing the package must not pay for torch."""
    if name == "Engine":
        from soloist.offline import Engine

        return Engine
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
