"""Where a card's memory went, by name: bytes by the place that asked for them, and what nobody uses.

Names come from the allocator's own record of every live block, so recording must begin before the first allocation
(`record`); it costs some microseconds an allocation.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch

BOOT, LATER = 1_000, 200_000  # events of the allocator's history that are kept; older ones are forgotten


def record(entries: int = BOOT) -> None:
    """Keep the Python stack of every allocation from now on, and the last `entries` events. A start makes hundreds of
    thousands, of which only the live blocks matter."""
    torch.cuda.memory._record_memory_history(context="alloc", stacks="python", max_entries=entries)


def held(device: torch.device) -> dict[str, int]:
    """Bytes: asked for, in use (rounding included) and from the driver by torch; how often torch asked; and what the
    card holds beside that: contexts, loaded kernels, other programs."""
    stats = torch.cuda.memory_stats(device)
    free, total = torch.cuda.mem_get_info(device)
    reserved = stats["reserved_bytes.all.current"]
    return {
        "requested": stats["requested_bytes.all.current"],
        "allocated": stats["allocated_bytes.all.current"],
        "peak": stats["allocated_bytes.all.peak"],
        "reserved": reserved,
        "segments": stats["segment.all.allocated"],
        "outside": total - free - reserved,
    }


def place(frames: list[Mapping[str, Any]], deep: int = 1) -> str:
    """The innermost `deep` places of this program in a stack, as file:function."""
    own = [f for f in frames if "/soloist/" in f["filename"]]
    names = [f"{f['filename'].rsplit('/soloist/', 1)[1]}:{f['name']}" for f in own[:deep]]
    return " < ".join(names) or "not from here"


def named(snapshot: Mapping[str, Any]) -> dict[str, int]:
    """Every byte that torch holds, by the place that asked for it; largest first. Blocks of graphs, rounding, and what
    nobody uses have names of their own."""
    found: Counter[str] = Counter()
    for segment in snapshot["segments"]:
        graphs = tuple(segment.get("segment_pool_id", (0, 0))) != (0, 0)
        mapped = 0
        for block in segment["blocks"]:
            size, asked = block["size"], block.get("requested_size", block["size"])
            mapped += size
            if block["state"] == "inactive":
                found["unused, graphs" if graphs else "unused"] += size
                continue
            name = place(block.get("frames", []), 2)
            found[f"graphs: {name}" if graphs else name] += asked
            found["rounding"] += size - asked
        found["unused, at segments' ends"] += segment["total_size"] - mapped
    return {name: size for name, size in found.most_common() if size}


def latest(snapshot: Mapping[str, Any]) -> int:
    """When the last event of the history was: `fetched` counts from there."""
    return max((event["time_us"] for trace in snapshot["device_traces"] for event in trace), default=0)


def fetched(snapshot: Mapping[str, Any], since: int) -> list[str]:
    """Places that made the allocator ask the driver for memory after `since`, with bytes."""
    found: Counter[str] = Counter()
    for trace in snapshot["device_traces"]:
        for event in trace:
            if event["action"] in ("segment_alloc", "segment_map") and event["time_us"] > since:
                found[place(event.get("frames", []), 3)] += event["size"]
    return [f"{size} B: {name}" for name, size in found.most_common()]
