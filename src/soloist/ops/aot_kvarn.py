"""The launches of KVarN's kernels, for `ops/aot.py`: one verify step, its settling, and a prompt's slice."""

from __future__ import annotations

from collections.abc import Callable

import torch

from soloist.ops.aot_tensors import half, index


def kvarn_calls(heads: int, kv: int, dim: int) -> dict[str, Callable[[], object]]:
    """The launches at one shape, on empty CPU tensors of 16-bit activations."""
    from soloist.ops.kvarn import TILE, WINDOW, StoredTiles, record_bytes
    from soloist.ops.triton import attention, kvarn, kvarn_attention

    t, r, pages, slots = 16, 2, 16, 2

    records = torch.zeros(1, r * pages * 64, kv * record_bytes(dim) // TILE, dtype=torch.uint8)
    window = half(1, slots, WINDOW, kv, dim)
    every = StoredTiles(records, window, window.clone())
    layer = StoredTiles(every.records[0], every.window_k[0], every.window_v[0])
    table = {n: index(r) for n in ("starts", "counts", "settled", "slots")}
    table |= {n: index(t) for n in ("request", "positions", "parts")}
    table |= {"page_table": index(r, pages), "lanes": index(t, 32)}
    partials = attention.Partials.allocate(64, heads, dim, torch.device("cpu"))
    q, rows, qkv = half(t, heads, dim), half(t, kv, dim), half(t, 2 * (heads + kv) * dim)
    places, prompt = index(128, dtype=torch.int64), half(128, kv, dim)
    return {
        "verify_attention": lambda: kvarn_attention.verify_attention(
            q, rows, rows.clone(), layer, table, partials, qkv, half(t, heads * dim), 0.1
        ),
        "settle": lambda: kvarn.settle(
            rows[None], rows[None], every, index(r, 32), index(r), index(r), index(r), index(r, pages)
        ),
        "pack_prompt": lambda: kvarn.pack_prompt(prompt, prompt, layer, 128, 128, 0, places),
        "prompt_attention": lambda: kvarn_attention.prompt_attention(
            half(128, heads, dim), prompt, prompt, layer, 0, 0, places, 0.1
        ),
    }
