"""Prompts with pictures through the engine: the contracts hold, caches tell pictures apart, drafters see them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import soloist.engine.build
from cache.arms import Answer, Arm
from soloist.checkpoint.processor import read_processor
from soloist.errors import CheckpointError, RequestError
from soloist.models.mtp import MTPModule
from soloist.models.pictures import Picture
from soloist.server.pictures import PictureRules, decode_data_url, rasterise
from tiny import build_tiny, build_tiny_drafter
from tiny_vision import build_tiny_vision, data_url, picture

EOS, PAD = 258, 268
BEFORE = 70  # a message of 66 tokens ends inside, so that the text before the picture has a snapshot of its own
KNOBS = {"vision": "1", "max_len": "1024", "max_seqs": "3", "verify_rows": "8"}
PLAIN = {"spec": "none", "lookup": "0"}


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_vision(tmp_path_factory.mktemp("vision"))


@pytest.fixture(autouse=True)
def unchecked(monkeypatch: pytest.MonkeyPatch) -> None:
    """The start-up check of the numerics contracts costs seconds per checkpoint and has tests of its own."""
    monkeypatch.setattr(soloist.engine.build, "cached_check", lambda key, run: [])


def _ids(count: int, seed: int) -> list[int]:
    return torch.randint(0, 256, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def _prompt(directory: Path, *images: int, after: int = 60) -> tuple[list[int], tuple[Picture, ...]]:
    """Text, then pictures of 64 rows each (by their seeds) with text behind every one."""
    rules = PictureRules(read_processor(directory))
    ids = _ids(BEFORE, 0)
    ids[65] = EOS
    placed = []
    for seed in images:
        raster = rasterise(decode_data_url(data_url(picture(seed, 128, 128)), "here"), rules, "here")
        placed.append(Picture(raster.pixels, raster.rows, raster.columns, len(ids), raster.digest))
        ids += [PAD] * raster.tokens + _ids(after, 5)
    return ids, tuple(placed)


def _ask(arm: Arm, prompt: tuple[list[int], tuple[Picture, ...]], tokens: int = 12, **fields: Any) -> Answer:
    return arm.ask(prompt[0], tokens, pictures=prompt[1], **fields)


@pytest.fixture(scope="module")
def cold(directory: Path) -> Iterator[Arm]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(soloist.engine.build, "cached_check", lambda key, run: [])
        with Arm(directory, **KNOBS, **PLAIN, prefix_cache="0") as arm:
            yield arm


def test_two_pictures_never_share_and_the_same_one_hits(directory: Path, cold: Arm) -> None:
    a, b, both = (_prompt(directory, *seeds) for seeds in ((1,), (2,), (1, 2)))
    assert a[0] == b[0]
    bits = [_ask(cold, prompt).bits for prompt in (a, b, both)]
    assert bits[0] != bits[1]
    with Arm(directory, **KNOBS, **PLAIN, settle="0") as arm:
        first = _ask(arm, a)
        assert first.cached == 0 and first.bits == bits[0]
        other = _ask(arm, b)
        assert other.cached == 64 and other.bits == bits[1], "text before a picture is shared, the picture is not"
        again = _ask(arm, a)
        assert again.cached >= BEFORE + 64 and again.bits == bits[0]
        longer = _ask(arm, both)
        assert longer.cached >= BEFORE + 64 and longer.bits == bits[2]
        words = arm.ask(a[0])
        assert words.cached == 64, "placeholders without a picture are another prompt too"


@pytest.mark.parametrize(
    "knobs",
    [{"spec": "mtp"}, {"spec": "mtp", "tree": "0", "draft_sample": "0"}, {"spec": "dflash2"}, {"spec": "none"}],
    ids=lambda knobs: "-".join(knobs.values()),
)
def test_every_way_to_speculate_gives_the_same_bits(
    directory: Path, cold: Arm, tmp_path: Path, knobs: dict[str, str]
) -> None:
    if knobs["spec"] == "dflash2":
        knobs = {**knobs, "drafter": str(build_tiny_drafter(tmp_path / "drafter", directory))}
    prompts = [_prompt(directory, 1), _prompt(directory, 2, 3), (_ids(150, 8), ())]
    alone = [_ask(cold, prompt, 32).bits for prompt in prompts]
    with Arm(directory, **KNOBS, **knobs, block_rule="saturated", settle="0") as arm:
        for _ in range(2):  # cold, then from the cache
            running = [arm.start(p[0], 32, pictures=p[1]) for p in prompts]
            assert [pending.answer().bits for pending in running] == alone
        arm.quiet()


def test_a_turn_with_a_picture_settles_and_goes_on_exactly(directory: Path, cold: Arm) -> None:
    prompt, pictures = _prompt(directory, 1)
    with Arm(directory, **KNOBS, spec="mtp") as arm:
        answer = arm.ask(prompt, 80, pictures=pictures)
        arm.quiet()
        following = [*prompt, *answer.tokens, *_ids(20, 9)]
        warm = arm.ask(following, pictures=pictures)
        assert warm.cached == (len(prompt) + 80 - 1) // 64 * 64
        assert warm.bits == cold.ask(following, pictures=pictures).bits
        other = _prompt(directory, 2)[1]
        assert arm.ask(following, pictures=other).bits == cold.ask(following, pictures=other).bits


def test_pictures_are_warm_after_a_restart(directory: Path, cold: Arm, tmp_path: Path) -> None:
    prompt, (seen,) = _prompt(directory, 1)
    other = _prompt(directory, 2)
    for reused in (0, (len(prompt) - 1) // 64 * 64):
        with Arm(directory, **KNOBS, **PLAIN, session_dir=str(tmp_path)) as arm:
            assert arm.engine.tower is not None
            answer = arm.ask(prompt, pictures=(seen,))
            assert answer.cached == reused and answer.bits == cold.ask(prompt, pictures=(seen,)).bits
            assert _ask(arm, other).cached == (64 if reused == 0 else reused)
            arm.quiet()


def test_a_request_that_made_way_goes_on_behind_its_picture(directory: Path, cold: Arm) -> None:
    """A pool for one and a half: the younger request is parked or starts over, with its pictures."""
    prompts = [_prompt(directory, seed) for seed in (1, 2)]
    alone = [_ask(cold, prompt, 150).bits for prompt in prompts]
    with Arm(directory, **{**KNOBS, "max_len": "384"}, **PLAIN, pool_tokens="576", reserve_tokens="64") as arm:
        running = [arm.start(p[0], 150, pictures=p[1]) for p in prompts]
        assert [pending.answer().bits for pending in running] == alone
        assert arm.engine.counters["preemptions"] > 0


def test_offloaded_tower_gives_the_same_bits(directory: Path, cold: Arm) -> None:
    prompt = _prompt(directory, 1, 2)
    with Arm(directory, **KNOBS, **PLAIN, vision_offload="1") as arm:
        assert arm.engine.tower is not None and arm.engine.tower.offload
        assert _ask(arm, prompt).bits == _ask(cold, prompt).bits


def test_the_mtp_module_sees_pictures_and_turns_by_their_axes(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every row of a picture enters the module once, as the tower gave it; draft rows turn by the offset position."""
    entered: list[torch.Tensor] = []
    turns: list[torch.Tensor] = []
    forward = MTPModule.forward

    def spy(self, tokens, hidden, positions, attend, seen=None):
        turns.append(positions)
        if seen is not None:
            assert (tokens[seen[0]] == PAD).all()
            entered.append(seen[1])
        return forward(self, tokens, hidden, positions, attend, seen)

    monkeypatch.setattr(MTPModule, "forward", spy)
    prompt, (placed,) = _prompt(directory, 1)
    with Arm(directory, **KNOBS, spec="mtp", tree="0", lookup="0", block_rule="saturated", settle="0") as arm:
        turns.clear()
        arm.ask(prompt, 6, pictures=(placed,))
        assert arm.engine.tower is not None
        assert torch.equal(torch.cat(entered), arm.engine.tower.encode(placed))
    drafts = [int(t[0]) for t in turns if t.dim() == 1 and t.numel() == 1]
    end = len(prompt) + max(placed.rows, placed.columns) - placed.tokens
    assert end + 1 in drafts and len(prompt) + 1 not in drafts


def test_vision_off_or_absent(directory: Path, tmp_path: Path) -> None:
    prompt, pictures = _prompt(directory, 1)
    with Arm(directory, **PLAIN, max_len="1024") as arm, pytest.raises(RequestError, match="VISION=1"):
        arm.ask(prompt, pictures=pictures)
    with pytest.raises(CheckpointError, match=r"VISION=1.*no vision tower"):
        Arm(build_tiny(tmp_path / "text"), vision="1")
    (tmp_path / "copy").mkdir()
    for file in directory.iterdir():
        if file.name != "preprocessor_config.json":
            (tmp_path / "copy" / file.name).symlink_to(file)
    with pytest.raises(CheckpointError, match=r"preprocessor_config\.json"):
        Arm(tmp_path / "copy", vision="1")


def test_pictures_must_lie_in_the_prompt(directory: Path, cold: Arm) -> None:
    prompt, pictures = _prompt(directory, 1, 2)
    with pytest.raises(RequestError, match="do not lie"):
        cold.ask(prompt[:150], pictures=pictures)
    with pytest.raises(RequestError, match="do not lie"):
        cold.ask(prompt, pictures=pictures[::-1])
