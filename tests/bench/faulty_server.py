"""`soloist` with one fault planted: a restored recurrent state is one percent too large. For the soak's own test."""

from __future__ import annotations

from soloist.cache.recurrent import RecurrentState
from soloist.cli import main

right = RecurrentState.load


def wrong(self, slot, tensors):
    """Load, scaled."""
    right(self, slot, [t * 1.01 for t in tensors])


RecurrentState.load = wrong

if __name__ == "__main__":
    main()
