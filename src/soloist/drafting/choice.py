"""From a drafter's scored candidates to the tokens it proposes, by the request's way of drawing.

Greedy takes the best. Sampling draws from the law softmax(scores / T), truncated as the request truncates: by the draft
stream in rejection mode (the law goes along), by the target's own noise in coupled mode. Alternatives for a tree are
ranked by probability; in coupled mode by the score that the known noise leaves, which is what the target will do.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from soloist.drafting.drafter import Ask
from soloist.drafting.proposal import Law
from soloist.sampling.draft import draft_law, draw
from soloist.sampling.rng import Noise, Stream


def pick(ids: np.ndarray, scores: np.ndarray, ask: Ask, position: int) -> tuple[int, Law | None, float]:
    """The draft for `position`: its index in `ids`, the law it was drawn from (None = chosen), its probability.

    ids int64 [n] token ids, any order; scores fp32 [n].
    """
    if ask.mode == "greedy" or not ask.sample:
        best = int(scores.argmax())
        return best, None, float(1.0 / np.exp(scores - scores[best]).sum())
    law = draft_law(scores, ask.params, ids)
    token, given = draw(law, ask.seed, position, ask.mode)[0]
    return int(np.flatnonzero(ids == token)[0]), given, law.prob(token)


def rank(
    ids: np.ndarray, scores: np.ndarray, ask: Ask, positions: Sequence[int], width: int
) -> tuple[np.ndarray, np.ndarray]:
    """Order of the `width` best candidates and their probabilities, along the last dim.

    ids int64 [P, ..., n] are candidates for positions[i]; scores fp32 [P, ..., n], or with further dims before the last
    that share the ids. Returns indices and fp32 probabilities [..., width] in the shape of scores, descending.
    """
    if ask.mode != "greedy":
        scores = scores / ask.params.temperature
    if ask.mode == "coupled":
        noise = np.stack(
            [
                Noise.at(ask.seed, Stream.TARGET, p).gumbel(row.reshape(-1)).reshape(row.shape)
                for p, row in zip(positions, ids, strict=True)
            ]
        )
        shared = scores.ndim - noise.ndim
        scores = scores + noise.reshape(*noise.shape[:-1], *[1] * shared, noise.shape[-1])
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    order = np.argsort(-weights, axis=-1, kind="stable")[..., :width]
    return order, np.take_along_axis(weights, order, -1)
