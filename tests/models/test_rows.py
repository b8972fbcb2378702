"""Rows that know their parent: every node of a tree equals, bit for bit, its path decoded token by token."""

from __future__ import annotations

import random

import pytest
import torch

from models.rig import Rig
from soloist import demo
from soloist.ops import attention
from soloist.ops.gated_delta import DeltaInputs, fold, walk
from tiny import build_tiny

PROMPT = 100


@pytest.fixture(scope="module", params=["tiny", "demo"])
def rig(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Rig:
    if request.param == "demo":
        return Rig(demo.path(), slots=4)
    directory = tmp_path_factory.mktemp("tiny")
    build_tiny(directory, pattern="LLFLLF", value_heads=6)
    return Rig(directory, slots=4)


def _tokens(rig: Rig, count: int, seed: int = 1) -> list[int]:
    return torch.randint(0, rig.config.vocab_size, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def _plain(rig: Rig, ids: list[int], slot: int = 0) -> torch.Tensor:
    """Logits of ids[PROMPT:], one token at a time."""
    rig.prefill(ids[:PROMPT], slot=slot)
    return torch.cat([rig.decode(ids[p], p, slot) for p in range(PROMPT, len(ids))])


def _random_tree(rng: random.Random, path: list[int], nodes: int, vocab: int) -> tuple[list[int], list[int], list[int]]:
    """A tree that contains `path` from its root and random wrong turns: tokens, parents, rows of the path."""
    tokens, parents, true = [path[0]], [-1], [0]
    while len(tokens) < nodes:
        if len(true) < len(path) and rng.random() < 0.4:
            parents.append(true[-1])
            tokens.append(path[len(true)])
            true.append(len(tokens) - 1)
        else:
            parents.append(rng.randrange(len(tokens)))
            tokens.append(rng.randrange(vocab))
    return tokens, parents, true


def test_chains_of_any_length(rig: Rig) -> None:
    rig.fresh()
    ids = _tokens(rig, PROMPT + 120)
    plain = _plain(rig, ids)
    rig.fresh()
    rig.prefill(ids[:PROMPT])
    rng, at = random.Random(2), PROMPT
    while at < len(ids):
        part = ids[at : at + rng.randint(1, 16)]
        step, features, logits = rig.verify(rig.rows(part, at))
        assert torch.equal(logits, plain[at - PROMPT : at - PROMPT + len(part)])
        keep = rng.randint(1, len(part))  # the rest is rejected and must leave no trace
        rig.settle(step, features, at, range(keep))
        at += keep


def test_every_node_of_random_trees(rig: Rig) -> None:
    """Each node is compared with a chain of its own path, run in a slot of its own."""
    rng = random.Random(4)
    rig.fresh()
    ids = _tokens(rig, PROMPT + 40)
    for slot in (0, 1):
        rig.prefill(ids[:PROMPT], slot=slot)
    for at in range(PROMPT, PROMPT + 36, 6):
        tokens, parents, true = _random_tree(rng, ids[at : at + 6], 16, rig.config.vocab_size)
        step, features, logits = rig.verify(rig.rows(tokens, at, parents))
        for node in range(len(tokens)):
            path, above = [], node
            while above >= 0:
                path.insert(0, above)
                above = parents[above]
            _, _, chain = rig.verify(rig.rows([tokens[i] for i in path], at, slot=1))
            assert torch.equal(logits[node], chain[-1]), f"node {node} at {at}"
        keep = true[: rng.randint(1, len(true))] if len(true) > 1 else true
        rig.settle(step, features, at, keep)
        step, features, _ = rig.verify(rig.rows([tokens[i] for i in keep], at, slot=1))
        rig.settle(step, features, at, range(len(keep)), slot=1)
        for p in range(at + len(keep), at + 6):
            assert torch.equal(rig.decode(ids[p], p, 0), rig.decode(ids[p], p, 1))


def test_rows_in_company(rig: Rig) -> None:
    """Requests of different lengths and shapes in one step get the bits each gets alone."""
    rng = random.Random(6)
    rig.fresh()
    batch = []
    for slot, length in enumerate((30, 64, 127, 250)):
        ids = _tokens(rig, length, seed=slot)
        rig.prefill(ids, slot=slot)
        tokens, parents, _ = _random_tree(rng, _tokens(rig, 4, seed=9), 1 + 5 * slot, rig.config.vocab_size)
        batch.append(rig.rows(tokens, length, parents, slot))
    for _ in range(4):
        rng.shuffle(batch)
        step, _, together = rig.verify(*batch)
        for rows, part in zip(batch, step.attention, strict=True):
            _, _, alone = rig.verify(rows)
            assert torch.equal(together[part.start : part.stop], alone)


@pytest.mark.parametrize("fault", ["fold", "ancestor", "tap"])
def test_the_instrument_sees_one_wrong_piece(rig: Rig, fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A settled state not moved, a sibling seen, a tap taken from the wrong row: each must break equality."""
    ids = _tokens(rig, PROMPT + 4)
    rig.fresh()
    plain = _plain(rig, ids)
    rig.fresh()
    rig.prefill(ids[:PROMPT])
    # Row 1 is a wrong sibling, rows 2 and 3 the true path.
    tokens, parents = [ids[PROMPT], 7, ids[PROMPT + 1], ids[PROMPT + 2]], [-1, 0, 0, 2]
    if fault == "ancestor":
        true_lanes = attention._attend_tree

        def blind(q, k, v, past_k, past_v, rows, scale):
            rows.lanes[2:, 1] = 1
            return true_lanes(q, k, v, past_k, past_v, rows, scale)

        monkeypatch.setattr(attention, "_attend_tree", blind)
    step, features, logits = rig.verify(rig.rows(tokens, PROMPT, parents))
    if fault == "tap":
        from soloist.models.step import verify_step

        step = verify_step([rig.rows(tokens, PROMPT, parents)], rig.config.conv_kernel)
        step.taps[3, -2] = step.taps[1, -1]
        logits = rig.model.logits(rig.model.forward(step, rig.caches).hidden)
    same = torch.equal(logits[[0, 2, 3]], plain[:3])
    if fault == "fold":
        assert same
        before = [s.clone() for s in rig.caches.state.states]
        rig.settle(step, features, PROMPT, [0, 2, 3])
        rig.caches.state.states[0].copy_(before[0])
        same = torch.equal(rig.decode(ids[PROMPT + 3], PROMPT + 3), plain[3:4])
    assert not same


@pytest.mark.parametrize("state_dtype", [torch.float32, torch.float16])
def test_fold_is_walk(state_dtype: torch.dtype) -> None:
    """Replaying a record's accepted rows gives the walk's states, bit for bit, also when rounded to 16 bits."""
    from soloist.models.step import RequestRows, verify_step

    generator = torch.Generator().manual_seed(0)

    def rand(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    parents = [-1, 0, 1, 0, 3, 4, 2, 1]
    rows = RequestRows([0] * len(parents), parents, 10, 0, [0])
    step = verify_step([rows], 4)
    n = len(parents)
    record = DeltaInputs(rand(n, 6, 32), rand(n, 6, 32) / 6, rand(n, 6, 16), rand(n, 6).sigmoid(), rand(n, 6).sigmoid())
    start = rand(1, 6, 32, 16).to(state_dtype).float()
    _, after = walk(start.clone(), record, step.levels, state_dtype)
    for node in range(n):
        path, above = [], node
        while above >= 0:
            path.insert(0, above)
            above = parents[above]
        level, i = step.level_of[node]
        assert torch.equal(fold(start.clone(), record, path, state_dtype)[0], after[level][i])
        if state_dtype == torch.float16:
            assert torch.equal(after[level][i], after[level][i].half().float())
