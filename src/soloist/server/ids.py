"""Identifiers of replies, calls and items."""

from __future__ import annotations

import secrets


def new_id(prefix: str) -> str:
    """`prefix` and 16 hexadecimal digits."""
    return prefix + secrets.token_hex(8)
