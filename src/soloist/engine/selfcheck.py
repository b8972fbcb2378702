"""Do the contracts hold on this machine? Three small experiments on the loaded model, bit for bit.

E1: a chain of 16 rows against the same tokens one at a time. E2: one row in company against the row alone.
E3: a prompt in one forward against the same prompt grid by grid. On a card with KVarN they run over its tiles. Results
are cached per numerics fingerprint and model shape, so a second start costs nothing.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable
from pathlib import Path

import torch

from soloist.cache.pages import pages_for
from soloist.models.qwen3_5 import Qwen35
from soloist.models.state import AcceptedPath, Caches, Features
from soloist.models.step import GRID, RequestRows, prefill_step, verify_step
from soloist.ops.numerics import code_digest, varying_products

log = logging.getLogger("soloist.numerics")

ROWS = 16
PROMPT = 100  # not on the grid, and a chain of 16 rows from here crosses a grid point and an attention split

MEANING = {
    "E1": "E1 is off: greedy text may change with the number of drafted rows",
    "E2": "E2 is off: a request's text may change with its neighbours",
    "E3": "E3 is off: a resumed prompt may differ from a cold one",
}


def check_contracts(model: Qwen35, fresh: Callable[[int, int], Caches], tile: int = GRID) -> list[str]:
    """The contracts ("E1", "E2", "E3") that do not hold. `fresh(slots, pages)` makes empty caches of the right kind.

    `tile`: tokens that the caches pack together (`KV.tile`). Packed tiles are read from the fourth on, so there the
    experiments go as far: the chain's rows stand on both sides of its edge.
    """
    far = 3 * tile if tile > GRID else 0
    broken = []
    if not _chain_equals_steps(model, fresh, max(PROMPT, far - ROWS // 2)):
        broken.append("E1")
    if not _company_equals_alone(model, fresh, max(20, far)):
        broken.append("E2")
    if not _grid_by_grid_equals_whole(model, fresh, far + 3 * GRID - 7):
        broken.append("E3")
    return broken


def check_products(model: Qwen35) -> list[str]:
    """Shapes whose product does not give a row the same bits at every row count."""
    return varying_products(model.products(), model.dtype, model.device)


def _tokens(model: Qwen35, count: int) -> list[int]:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(0, model.config.vocab_size, (count,), generator=generator).tolist()


def _logits(model: Qwen35, features: Features) -> torch.Tensor:
    return model.logits(features.hidden) if features.logits is None else features.logits.clone()


def _pages(tokens: int) -> list[int]:
    """Enough for so many tokens, in whole tiles of any format."""
    return list(range(pages_for(tokens, 2)))


def _chain_equals_steps(model: Qwen35, fresh: Callable[[int, int], Caches], prompt: int) -> bool:
    tokens, pages = _tokens(model, prompt + 2 * ROWS), _pages(prompt + 2 * ROWS)
    kernel = model.config.conv_kernel
    caches = fresh(1, len(pages))
    model.forward(prefill_step(tokens[:prompt], 0, 0, pages), caches)
    one_by_one = []
    for position in range(prompt, prompt + 2 * ROWS):
        step = verify_step([RequestRows([tokens[position]], [-1], position, 0, pages)], kernel)
        features = model.forward(step, caches)
        one_by_one.append(_logits(model, features))
        assert features.record is not None
        features.record.settle(step, caches, [AcceptedPath(0, [0], pages, position)])
    caches = fresh(1, len(pages))
    model.forward(prefill_step(tokens[:prompt], 0, 0, pages), caches)
    at_once = []
    for start in (prompt, prompt + ROWS):
        rows = RequestRows(tokens[start : start + ROWS], list(range(-1, ROWS - 1)), start, 0, pages)
        step = verify_step([rows], kernel)
        features = model.forward(step, caches)
        at_once.append(_logits(model, features))
        assert features.record is not None
        features.record.settle(step, caches, [AcceptedPath(0, list(range(ROWS)), pages, start)])
    return torch.equal(torch.cat(one_by_one), torch.cat(at_once))


def _company_equals_alone(model: Qwen35, fresh: Callable[[int, int], Caches], shortest: int) -> bool:
    many = 8
    each = len(_pages(shortest + 9 * many))
    caches = fresh(many, many * each)
    tokens = _tokens(model, shortest + 10 * many)
    requests = []
    for i in range(many):
        pages = list(range(each * i, each * (i + 1)))
        prompt = tokens[i : i + shortest + 9 * i]
        model.forward(prefill_step(prompt, 0, i, pages), caches)
        requests.append(RequestRows([tokens[-1 - i]], [-1], len(prompt), i, pages))

    def logits(batch: list[RequestRows]) -> torch.Tensor:
        return _logits(model, model.forward(verify_step(batch, model.config.conv_kernel), caches))

    together = logits(requests)
    alone = torch.cat([logits([request]) for request in requests])
    some = logits(requests[2:7])
    return torch.equal(together, alone) and torch.equal(some, together[2:7])


def _grid_by_grid_equals_whole(model: Qwen35, fresh: Callable[[int, int], Caches], length: int) -> bool:
    tokens, pages = _tokens(model, length), _pages(length)
    whole = model.forward(prefill_step(tokens, 0, 0, pages), fresh(1, len(pages))).hidden[:length]
    caches = fresh(1, len(pages))
    parts = []
    for start in range(0, length, GRID):
        part = tokens[start : start + GRID]
        parts.append(model.forward(prefill_step(part, start, 0, pages), caches).hidden[: len(part)])
    return torch.equal(whole, torch.cat(parts))


def card_prints() -> dict[str, str]:
    """What the contracts on a card depend on beside the numerics: Soloist's own code, kernels included, and the driver.

    The card's outcome is kept under all of these, so that nothing older speaks for a start.
    """
    try:
        driver = Path("/proc/driver/nvidia/version").read_text(encoding="utf-8", errors="replace").splitlines()[0]
    except (OSError, IndexError):
        driver = ""
    return {"code": code_digest(), "cuda": str(torch.version.cuda), "driver": driver}


def user_cache() -> Path:
    """What is kept between starts and may be deleted at any time: outcomes of checks, compiled kernels."""
    # An empty variable counts as none; a user without a home may still have set one.
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "soloist"


def forget_checks(directory: Path | None = None) -> None:
    """Remove every kept outcome: the next start measures again."""
    for path in (directory or user_cache()).glob("contracts-*.json"):
        path.unlink(missing_ok=True)


def cached_check(key: str, run: Callable[[], list[str]], directory: Path | None = None) -> list[str]:
    """`run()` once per key; the outcome is kept in the user's cache directory. An unwritable one is no error."""
    base = directory or user_cache()
    path = base / f"contracts-{key}.json"
    try:
        known = json.loads(path.read_text(encoding="utf-8"))
        if isinstance(known, list):
            return [str(x) for x in known]
    except (OSError, ValueError):
        pass
    outcome = run()
    try:
        base.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(outcome), encoding="utf-8")
    except OSError as error:
        log.info("the outcome of the numerics check could not be kept: %s", error)
    return outcome
