"""Counts what a card would launch: kernels of torch, of Triton (interpreted here) and of the products' doubles."""

from __future__ import annotations

from collections import Counter
from typing import Any
from unittest.mock import patch

from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime.interpreter import InterpretedFunction

from host_products import HostW4

# Operations that make or name memory and launch nothing.
SILENT = ("empty", "new_empty", "detach", "lift_fresh", "_unsafe_view", "set_", "resize_", "is_pinned")


class Launches(TorchDispatchMode):
    """Inside, `names` counts launches by name; `total` is their number."""

    def __init__(self) -> None:
        super().__init__()
        self.names: Counter[str] = Counter()
        self._inside = 0

    @property
    def total(self) -> int:
        return sum(self.names.values())

    def __enter__(self) -> Launches:
        counter = self
        run, launch = InterpretedFunction.run, HostW4.launch

        def triton_kernel(function: Any, *args: Any, **kwargs: Any) -> Any:
            return counter._one(function.fn.__name__, run, function, *args, **kwargs)

        def product(linear: Any, *args: Any, **kwargs: Any) -> Any:
            return counter._one("w4a16", launch, linear, *args, **kwargs)

        self._patches = [
            patch.object(InterpretedFunction, "run", triton_kernel),
            patch.object(HostW4, "launch", product),
        ]
        for each in self._patches:
            each.start()
        return super().__enter__()

    def __exit__(self, *args: Any) -> None:
        super().__exit__(*args)
        for each in self._patches:
            each.stop()

    def _one(self, name: str, work: Any, *args: Any, **kwargs: Any) -> Any:
        self.names[name] += self._inside == 0
        self._inside += 1
        try:
            return work(*args, **kwargs)
        finally:
            self._inside -= 1

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._inside == 0 and not self._silent(func):
            self.names[f"torch.{func.overloadpacket.__name__}"] += 1
        return func(*args, **(kwargs or {}))

    @staticmethod
    def _silent(func: Any) -> bool:
        name = func.overloadpacket.__name__
        return func.is_view or any(name.startswith(s) for s in SILENT)
