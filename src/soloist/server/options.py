"""What the server needs to know from the settings, as plain values."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from soloist.server.pictures import PictureRules


@dataclass(frozen=True)
class ServerOptions:
    """Resolved once at start-up.

    `names` are the model's aliases, the first is the one reported. `defaults` are sampling values for silent
    requests (from `generation_config.json`). Times are in seconds, sizes in bytes. `cache_unit` is the page size in
    tokens, below which nothing is reused. `pictures` None: vision is off.
    """

    names: tuple[str, ...] = ("demo",)
    root: str = ""
    api_keys: tuple[str, ...] = ()
    max_body: int = 32 << 20
    cors_origins: tuple[str, ...] = ("*",)
    request_metrics: bool = True
    reasoning_fields: tuple[str, ...] = ("reasoning", "reasoning_content")
    force_usage: bool = False
    keepalive_s: float = 15.0
    stuck_s: float = 120.0
    pictures: PictureRules | None = None
    cache_unit: int = 64
    fingerprint: str = ""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    created: int = field(default_factory=lambda: int(time.time()))
