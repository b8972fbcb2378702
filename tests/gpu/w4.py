"""The bundled demo with a 4-bit body, head kept as it is."""

from __future__ import annotations

import shutil
from pathlib import Path

from soloist import demo
from soloist.checkpoint.reader import open_checkpoint
from soloist.prepare.quantize import quantize
from soloist.prepare.recipe import PartRecipe


def demo_in_w4(out: Path) -> Path:
    """Round-to-nearest int4 of body and MTP module; the drafter comes along."""
    quantize(open_checkpoint(demo.path()), {"body": PartRecipe(4), "mtp": PartRecipe(4)}, out)
    shutil.copytree(demo.drafter_path(), out / "dflash2")
    return out
