"""What a row's bits depend on here: the fingerprint of the numerics, and the check that rows stand alone.

Contracts E1-E3 hold only if a product gives a row the same bits whatever stands beside it. No library
promises that, so it is measured at start-up, once per machine, torch build, thread count and model shape.
"""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Iterable
from functools import cache
from pathlib import Path

import torch

from soloist.ops.attention import ROW_BLOCK, SPLIT
from soloist.ops.gated_delta import CHUNK
from soloist.ops.products import Linear

ROWS = 16
PACKAGE = Path(__file__).resolve().parent.parent
DECISIVE = ("cache", "models", "ops")  # rooms whose code computes or stores what a later turn resumes from


def processor() -> str:
    """The name of the machine's processor, as specific as the system tells."""
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def fingerprint(device: torch.device, dtype: torch.dtype, state_dtype: torch.dtype, product: str) -> dict[str, str]:
    """Everything that can change the last bit of a logit. Two engines with equal fingerprints may share state."""
    card = torch.cuda.get_device_name(device) if device.type == "cuda" else processor()
    triton = multiprocessors = ""
    if device.type == "cuda":
        import triton as package

        triton = package.__version__
        # Products deal their sums among them, and one name can stand for several numbers.
        multiprocessors = str(torch.cuda.get_device_properties(device).multi_processor_count)
    return {
        "code": code_digest(DECISIVE),
        "multiprocessors": multiprocessors,
        "device": card,
        "capability": "" if device.type == "cpu" else ".".join(map(str, torch.cuda.get_device_capability(device))),
        "cpu_features": torch.backends.cpu.get_cpu_capability() if device.type == "cpu" else "",
        "threads": str(torch.get_num_threads()) if device.type == "cpu" else "",
        "torch": torch.__version__,
        "triton": triton,
        "dtype": str(dtype).removeprefix("torch."),
        "state": str(state_dtype).removeprefix("torch."),
        "product": product,
        "tiles": f"split{SPLIT}/rows{ROW_BLOCK}/chunk{CHUNK}",
    }


def digest(print_: dict[str, str]) -> str:
    """Sixteen hex digits for a fingerprint."""
    return hashlib.sha256(json.dumps(print_, sort_keys=True).encode()).hexdigest()[:16]


@cache
def code_digest(rooms: tuple[str, ...] = ("",), package: Path = PACKAGE) -> str:
    """Sixteen hex digits over Soloist's source, or some rooms of it: kernels, and what decides which of them run."""
    found = hashlib.sha256()
    for path in sorted(p for room in rooms for p in (package / room).rglob("*") if p.suffix in (".py", ".cu")):
        found.update(str(path.relative_to(package)).encode() + b"\0" + path.read_bytes())
    return found.hexdigest()[:16]


def varying_products(products: Iterable[Linear], dtype: torch.dtype, device: torch.device) -> list[str]:
    """Names ("NxK") of the products among `products` whose rows change with the number of rows, 1 .. 16.

    Each shape is tried once, on random rows, with and without a residual.
    """
    generator = torch.Generator().manual_seed(0)
    seen: set[tuple[int, int]] = set()
    varying: list[str] = []
    for product in products:
        shape = (product.out_features, product.in_features)
        if shape in seen:
            continue
        seen.add(shape)
        x = torch.randn(ROWS, shape[1], generator=generator).to(device, dtype)
        residual = torch.randn(ROWS, shape[0], generator=generator).to(device, dtype)
        full, added = product(x), product(x, residual)
        for rows in range(1, ROWS):
            tail = ROWS - rows
            alone = torch.equal(product(x[tail:].clone()), full[tail:])
            with_residual = torch.equal(product(x[:rows].clone(), residual[:rows].clone()), added[:rows])
            if not (alone and with_residual):
                varying.append(f"{shape[0]}x{shape[1]}")
                break
    return varying
