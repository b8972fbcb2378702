"""The bundled model, Soloist-Demo: a trained 27M hybrid with its MTP module and a DFlash2 drafter (see README.md).

Weights are 8-bit codes with group scales (compressed-tensors); they are dequantised where the product needs it.
"""

from __future__ import annotations

from pathlib import Path


def path() -> Path:
    """Directory of the target, an ordinary Hugging Face model directory."""
    return Path(__file__).resolve().parent


def drafter_path() -> Path:
    """Directory of its DFlash2 drafter."""
    return path() / "dflash2"
