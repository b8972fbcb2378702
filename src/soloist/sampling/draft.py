"""Drawing drafts: the law q of a draft row, and tokens from it.

Any q is legal as long as it is the one handed to `verify`, so truncating q to the request's top-k, top-p and
min-p (on q's own logits) only raises acceptance. In rejection mode a draft draws from the DRAFT stream, which nothing
else uses; in coupled mode it uses the target's own noise, which makes it the likeliest guess; greedy takes the argmax.
"""

from __future__ import annotations

import numpy as np

from soloist.drafting.proposal import Law
from soloist.sampling.params import SamplingParams
from soloist.sampling.processors import TargetLaw, best_places, truncated
from soloist.sampling.rng import Noise, Stream
from soloist.sampling.verify import Mode


def draft_law(
    logits: np.ndarray, params: SamplingParams, ids: np.ndarray | None = None, truncate: bool = True
) -> TargetLaw:
    """q = softmax(logits / T), restricted to the request's top-k, min-p and top-p if `truncate`, and renormalised.

    logits fp32 [n] of token ids `ids` int64 [n] (None: 0..n-1), in any order. A greedy request gets softmax(logits),
    of which `draw` takes the best.
    """
    if ids is not None:
        order = np.argsort(ids, kind="stable")
        ids, logits = ids[order], logits[order]
    if params.greedy or not truncate:
        return truncated(ids, logits, params.temperature or 1.0, 0, 1.0, 0.0)
    return truncated(ids, logits, params.temperature, params.top_k, params.top_p, params.min_p)


def draw(law: TargetLaw, seed: int, position: int, mode: Mode, count: int = 1) -> list[tuple[int, Law | None]]:
    """Draw up to `count` distinct tokens without replacement for absolute `position`, likeliest trial first.

    Returns (token, law it was drawn from given the earlier ones); the law is None where the mode does not need it.
    The n-th best perturbed score is exactly the n-th draw without replacement (Gumbel top-n), so siblings of a tree
    carry their conditional laws.
    """
    if mode == "greedy":
        return [(int(law.ids[i]), None) for i in best_places(law.scores, count)]
    noise = Noise.at(seed, Stream.TARGET if mode == "coupled" else Stream.DRAFT, position)
    if count == 1:
        tokens = [law.sample(noise)]
    else:
        tokens = [int(law.ids[i]) for i in best_places(law.scores + noise.gumbel(law.ids), count)]
    if mode == "coupled":
        return [(token, None) for token in tokens]
    out: list[tuple[int, Law | None]] = []
    left, probs = law.ids, law.probs
    for n, token in enumerate(tokens, 1):
        out.append((token, Law(tuple(left.tolist()), tuple(probs.tolist()))))
        if n == len(tokens):
            break
        keep = left != token
        left = left[keep]
        rest = law.probs[np.searchsorted(law.ids, left)]
        probs = rest / rest.sum() if len(rest) else rest
    return out
