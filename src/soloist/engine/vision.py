"""From settings to eyes: how pictures are to be prepared, and the tower that reads them."""

from __future__ import annotations

import logging

import torch

from soloist.checkpoint.processor import Processor, read_processor
from soloist.checkpoint.reader import Checkpoint
from soloist.errors import CheckpointError
from soloist.models.vision import VisionTower
from soloist.settings import Settings

__all__ = ["Processor", "build_tower", "read_processor"]

log = logging.getLogger("soloist.engine")


def build_tower(
    settings: Settings, checkpoint: Checkpoint, device: torch.device, dtype: torch.dtype
) -> VisionTower | None:
    """The tower, None with VISION=0. Raises CheckpointError for a checkpoint without one."""
    if not settings.vision:
        return None
    config = checkpoint.config
    if not config.vision or not checkpoint.visual:
        raise CheckpointError(
            f"VISION=1, but {checkpoint.directory} has no vision tower (model.visual.* tensors).",
            "Use the original checkpoint, or set VISION=0.",
        )
    processor = read_processor(checkpoint.directory)
    tower = VisionTower(
        config.vision, checkpoint.visual, processor, config.hidden_size, device, dtype, settings.vision_offload
    )
    log.info("vision tower loaded, %.1f MiB on %s", tower.nbytes / 2**20, device)
    return tower
