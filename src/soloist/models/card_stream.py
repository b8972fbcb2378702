"""The residual stream of a verify step between two products.

Where the product that ends a sublayer can add to the residual and every product that follows can do without the norm's
root (ops/linear_cuda.py: `Residual`, `Squares`), a norm costs no launch: the first one leaves rows multiplied by the
factor and their sums of squares, the others multiply what they computed by the root. Where one of them cannot (16-bit
weights), and for the last norm of the model, whose rows are an output, the norm is a kernel between them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from soloist.ops.card_products import CardLinear, W4Linear
from soloist.ops.linear_cuda import MAX_PARTS, PART_N, Residual, Squares
from soloist.ops.triton import rows


def why_not_folded(product: object, followers: Sequence[object]) -> str | None:
    """Why the norm between `product` and the products that read it must be a kernel, or None."""
    if not isinstance(product, W4Linear) or not product.adds_residual:
        return f"{getattr(product, 'name', product)} in front does not add to the residual"
    if product.out_features > MAX_PARTS * PART_N:
        return f"rows of {product.out_features} are too wide"
    if not followers:
        return "its rows are an output"
    for follower in followers:
        if not isinstance(follower, CardLinear) or not follower.takes_squares:
            return f"{getattr(follower, 'name', follower)} behind needs normed rows"
    return None


@dataclass
class Stream:
    """x [T, H]: the residual. h [T, H]: its normed rows, up to the root that `squares` gives where that is not None.

    delta [T, H] and sums [>= T, H / 64] fp32 are scratch.
    """

    x: torch.Tensor
    h: torch.Tensor
    delta: torch.Tensor
    sums: torch.Tensor
    eps: float
    squares: Squares | None = None

    def start(self, factor: torch.Tensor) -> None:
        """The first norm; x holds the embeddings."""
        rows.add_norm(self.x, None, factor, self.eps, self.h)

    def add(self, product: object, inner: torch.Tensor, factor: torch.Tensor, followers: Sequence[object]) -> None:
        """x += product(inner); h = the norm with `factor` of x, as the products `followers` will read it."""
        assert isinstance(product, CardLinear)
        if why_not_folded(product, followers) is None:
            assert isinstance(product, W4Linear)
            product.add(inner, self.h, Residual(self.x, factor, self.sums))
            self.squares = Squares(self.sums, self.x.shape[1], self.eps)
            return
        product.decode(inner, self.delta)
        rows.add_norm(self.x, self.delta, factor, self.eps, self.h)
        self.squares = None
