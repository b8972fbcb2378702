"""Storage formats of one linear module, decided by which tensors exist, never by the config alone."""

from soloist.checkpoint.formats.stored import StoredModule, check, detect, load

__all__ = ["StoredModule", "check", "detect", "load"]
