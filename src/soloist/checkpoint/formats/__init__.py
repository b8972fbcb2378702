"""Storage formats of one linear module, decided by which tensors exist, never by the config alone."""

from soloist.checkpoint.formats.stored import StoredModule, detect, load

__all__ = ["StoredModule", "detect", "load"]
