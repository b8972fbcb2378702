"""A row's attention has the same bits however many rows and requests run beside it, and wherever its step begins."""

import pytest
import torch

from soloist.cache.pages import PAGE
from soloist.models.card import CardShapes, Tables
from soloist.models.step import RequestRows, token_rows, verify_step
from soloist.ops import attention as reference
from soloist.ops.triton import attention, pdl

HEADS, KV, DIM, LENGTH = 12, 2, 16, 640
SCALE = 0.25


@pytest.fixture(params=[False, True], ids=["16-row products", "warp groups"])
def warp_groups(request: pytest.FixtureRequest, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Both forms in the interpreter; on a card the one it has."""
    asked: bool = request.param
    if device.type == "cuda":
        if pdl.warp_groups(torch.empty(0, device=device)) != asked:
            pytest.skip("this card has the other form")
    else:
        monkeypatch.setattr(pdl, "warp_groups", lambda x: asked)
    return asked


class Text:
    """One sequence whose keys and values lie in scattered pages, and the queries of every position."""

    def __init__(self, device: torch.device) -> None:
        torch.manual_seed(3)

        def make(heads: int, bound: int) -> torch.Tensor:
            # The interpreter multiplies as the host does, tile by tile: sums of small whole numbers are exact there.
            drawn = (
                torch.randn(LENGTH, heads, DIM)
                if device.type == "cuda"
                else torch.randint(-bound, bound + 1, (LENGTH, heads, DIM)).float()
            )
            return drawn.to(torch.bfloat16 if device.type == "cuda" else torch.float16)

        self.device = device
        self.q, self.k, self.v = make(HEADS, 1), make(KV, 1), make(KV, 8)
        self.pages = torch.randperm(3 * LENGTH // PAGE).tolist()
        planes = torch.full((2, 3 * LENGTH, KV, DIM), float("nan"), dtype=self.q.dtype)
        # Two requests of one text have pages of their own.
        for pages in self.owned():
            planes[0, token_rows(pages, LENGTH)] = self.k
            planes[1, token_rows(pages, LENGTH)] = self.v
        self.keys, self.values = planes.to(device)

    def owned(self) -> list[list[int]]:
        each = LENGTH // PAGE
        return [self.pages[i * each : (i + 1) * each] for i in range(3)]

    def run(self, *requests: tuple[int, int], padding: int = 0) -> list[torch.Tensor]:
        """Chains of (settled, rows), each a request of this text -> [rows, H * D] per request."""
        batch = [
            RequestRows([1] * count, list(range(-1, count - 1)), settled, r, self.owned()[r])
            for r, (settled, count) in enumerate(requests)
        ]
        step = verify_step(batch, 4)
        bucket = step.rows + padding
        tables = Tables(CardShapes(bucket, 3, LENGTH // PAGE, 8, 200, depth=32), 4, self.device)
        tables.fill(step, bucket)
        per_row = ("positions", "request", "parts", "lanes")
        table = {n: t[:bucket] if n in per_row else t for n, t in tables.card.items()}
        at = [settled + i for settled, count in requests for i in range(count)] + [0] * padding
        partials = attention.Partials.allocate(200, HEADS, DIM, self.device)
        for part in (partials.acc, partials.top, partials.total):
            part.fill_(float("nan"))
        q, k, v = (x[at].to(self.device) for x in (self.q, self.k, self.v))
        qkv = torch.zeros(bucket, 2 * (HEADS + KV) * DIM, dtype=q.dtype, device=self.device)  # gates of one half
        out = torch.full((bucket, HEADS * DIM), float("nan"), dtype=q.dtype, device=self.device)
        attention.verify_attention(q, k, v, self.keys, self.values, table, partials, qkv, out, SCALE)
        return list(out[: step.rows].cpu().split([count for _, count in requests]))

    def truth(self, settled: int, count: int) -> torch.Tensor:
        step = verify_step([RequestRows([1] * count, list(range(-1, count - 1)), settled, 0, [])], 4)
        mine = slice(settled, settled + count)
        past = [(self.k[:settled].float(), self.v[:settled].float())]
        parts = (x[mine].float() for x in (self.q, self.k, self.v))
        return reference.verify_attention(*parts, past, step.attention, SCALE).view(count, -1) / 2


SLOW = pytest.mark.slow  # interpreted: ten seconds each, and the others are of their kind


@pytest.mark.parametrize(
    ("settled", "count"),
    [(0, 3), (250, 16), *(pytest.param(*case, marks=SLOW) for case in ((95, 16), (512, 16), (610, 20)))],
)
def test_a_rows_bits_are_its_own(device: torch.device, warp_groups: bool, settled: int, count: int) -> None:
    """One row, 16 rows, in company: steps whose rows fill one tile or several, begin in any block and cross splits."""
    text = Text(device)
    (together,) = text.run((settled, count))
    near = (together.float() - text.truth(settled, count)).norm() / text.truth(settled, count).norm()
    assert near < (1e-2 if device.type == "cuda" else 1e-3)
    for row in {0, count // 2, count - 1}:
        (alone,) = text.run((settled + row, 1))
        assert torch.equal(alone[0], together[row]), row
    (late,) = text.run((settled + count // 2, count - count // 2), padding=3)
    assert torch.equal(late, together[count // 2 :])
    first, middle, _ = text.run((300, 9), (settled, count), (70, 2))
    assert torch.equal(middle, together)
    (others,) = text.run((300, 9))
    assert torch.equal(first, others)


def test_how_splits_are_dealt_is_no_part_of_the_bits(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    if device.type != "cuda":
        monkeypatch.setattr(pdl, "warp_groups", lambda x: True)
    text, found = Text(device), []
    for count in (1, 2, 4, 5, 132):
        monkeypatch.setattr(pdl, "multiprocessors", lambda x, count=count: count)
        found.append(torch.cat(text.run((600, 16), (40, 1), (300, 5))))
    assert all(torch.equal(found[0], other) for other in found)
