"""The text side of a checkpoint and the server's options, read from settings before any weight is."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from soloist.errors import SettingError
from soloist.server.options import ServerOptions
from soloist.settings import Settings

if TYPE_CHECKING:
    from soloist.server.pictures import PictureRules

_SAMPLING_KEYS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
_REASONING_FIELDS = {
    "both": ("reasoning", "reasoning_content"),
    "reasoning": ("reasoning",),
    "reasoning_content": ("reasoning_content",),
}


def sampling_defaults(directory: Path) -> dict[str, Any]:
    """Sampling values of `generation_config.json`; empty when there is none."""
    path = directory / "generation_config.json"
    if not path.is_file():
        return {}
    table = json.loads(path.read_text(encoding="utf-8"))
    return {key: table[key] for key in _SAMPLING_KEYS if table.get(key) is not None}


def server_options(settings: Settings, directory: Path) -> ServerOptions:
    """The options that a Settings stands for; `directory` is where the model lives."""
    return ServerOptions(
        names=settings.served_name or (settings.model if settings.model == "demo" else directory.resolve().name,),
        root=settings.model,
        api_keys=settings.api_key,
        max_body=settings.max_body_mb << 20,
        cors_origins=settings.cors_origins,
        request_metrics=settings.req_metrics,
        force_usage=settings.force_usage,
        reasoning_fields=_REASONING_FIELDS[settings.reasoning_fields],
        defaults=sampling_defaults(directory) if settings.generation_defaults else {},
        pictures=picture_rules(settings, directory) if settings.vision else None,
    )


def picture_rules(settings: Settings, directory: Path) -> PictureRules:
    """How pictures are taken with VISION=1. Raises CheckpointError for a directory without a preprocessor config."""
    from soloist.engine.vision import read_processor
    from soloist.server.pictures import PictureRules

    if find_spec("PIL") is None:
        raise SettingError("VISION=1 needs pillow.", "Run `pip install 'soloist[vision]'`, or set VISION=0.")
    return PictureRules(
        processor=read_processor(directory),
        limit=settings.vision_max_images,
        max_pixels=settings.vision_max_pixels,
        fetch=settings.vision_urls,
        max_bytes=settings.max_body_mb << 20,
    )
