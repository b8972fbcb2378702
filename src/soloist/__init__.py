"""Soloist serves one person from one card, exactly. `from soloist import Engine` uses it without a server."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from soloist.offline import Engine

__all__ = ["Engine"]


def __getattr__(name: str) -> Any:
    """`Engine` on first use: importing the package must not pay for torch."""
    if name == "Engine":
        from soloist.offline import Engine

        return Engine
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
