"""The launches of a draft block for `ops/aot.py`, at one shape."""

from __future__ import annotations

from collections.abc import Callable

import torch

from soloist.ops.aot_tensors import full, half, index


def block_calls(
    hidden: int, heads: int, kv: int, dim: int, taps: int, rank: int, vocab: int, codes: int
) -> dict[str, Callable[[], object]]:
    """The Triton launches of a DFlash2 block over its ring and of the look-ups of an MTP draft, 16-bit activations.

    `codes`: bits of the embedding table, whose groups are whole rows; 0: 16-bit rows.
    """
    from soloist.ops import top
    from soloist.ops.triton import embed, grouped_conv, ring, selector
    from soloist.ops.triton.dense import DenseProduct
    from soloist.ops.triton.top import RowTop

    cpu = torch.device("cpu")
    r, block, window, layers, group, top_k = 2, 8, 2048, 5, 16, 16
    t, proposed, columns = r * block, r * (block - 1), 2 * taps * hidden // group

    stored = index(100, hidden * codes // 32) if codes else half(100, hidden)
    scales = torch.zeros(100, 1, dtype=torch.float16)
    table = embed.Table(stored, scales, scales, hidden, codes, False)
    x, h, y = half(t, hidden), half(t, hidden), half(proposed, hidden)
    coefficients, base, factor = half(t, columns), full(2, taps, hidden), full(hidden)
    qkv, q, k = half(t, (heads + 2 * kv) * dim), half(r, block, heads, dim), half(r, block, kv, dim)
    keys, inverse = half(layers, r, kv, window, dim), full(dim // 2)
    v = qkv[:, (heads + kv) * dim :].view(r, block, kv, dim)
    partials = ring.RingPartials.allocate(t, window, heads, dim, cpu)
    packed, hidden_rows, book = index(proposed, top.width(top_k)), half(proposed, rank), half(100, rank)
    ids = torch.zeros(100, dtype=torch.int64)
    found = index(r, block - 1, top_k), full(r, block - 1, top_k, top_k)
    return {
        "embed": lambda: embed.embed(table, index(t), x),
        "embed_block": lambda: embed.embed_block(table, index(r), 7, 1.0, factor, 1e-6, x, h),
        "embed_pair": lambda: embed.embed_pair(table, index(t), h, index(t), full(2, hidden), 1e-6, half(t, 2, hidden)),
        "convolve_in": lambda: grouped_conv.convolve_in(
            h, DenseProduct(half(columns, hidden)), base, taps, block, coefficients, x
        ),
        "convolve": lambda: grouped_conv.convolve(h, coefficients, base, taps, block, x),
        "convolve_out": lambda: grouped_conv.convolve_out(h, coefficients, base, taps, block, x, factor, 1e-6, h),
        "convolve_out, proposed": lambda: grouped_conv.convolve_out(
            h, coefficients, base, taps, block, x, factor, 1e-6, y
        ),
        "enter": lambda: ring.enter(
            half(t, 2 * layers * kv * dim), full(layers * kv, dim), inverse, 1e-6, index(t), index(t), keys, keys
        ),
        "turn": lambda: ring.turn(qkv, full(heads + kv, dim), inverse, 1e-6, index(r), q, k),
        "ring": lambda: ring.ring_attention(
            q, k, v, keys[0], keys[0], index(r), index(r), index(r), partials, False, half(t, heads * dim)
        ),
        "pair_scores": lambda: selector.pair_scores(
            packed, ids, index(r), hidden_rows, (book, book), 1.0, 30.0, *found
        ),
        "top 16": lambda: RowTop(proposed, vocab, top_k, cpu, stats=False)(half(proposed, vocab), packed),
    }  # fmt: skip
