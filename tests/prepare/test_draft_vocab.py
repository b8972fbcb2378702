"""The draft vocabulary: counted, chosen by coverage, and written so that rows and ids agree."""

from __future__ import annotations

import json
from collections import Counter
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from soloist.checkpoint.reader import open_checkpoint
from soloist.checkpoint.shards import BESIDE, INDEX_NAME, read_directory
from soloist.cli import app
from soloist.errors import CheckpointError, UserError
from soloist.prepare.draft_vocab import choose, control_ids, coverage, curve, size_for, write
from soloist.prepare.quantize import quantize
from soloist.prepare.recipe import TOKENS, PartRecipe
from tiny import SPECIALS, build_tiny

COUNTS = Counter({5: 100, 9: 50, 7: 50, 300: 10, 2: 1})
INT4, INT8 = PartRecipe(4, group=32), PartRecipe(8, group=32)


def test_choice() -> None:
    assert choose(COUNTS, {258}, 4, 320).tolist() == [5, 7, 9, 258]
    assert choose(COUNTS, {258}, 8, 320).tolist() == [0, 1, 2, 5, 7, 9, 258, 300]  # unseen tokens fill up from below
    assert coverage(COUNTS, choose(COUNTS, set(), 2, 320)) == pytest.approx(150 / 211)
    assert size_for(COUNTS, {258}, 0.9, 320, multiple=1) == 4
    assert size_for(COUNTS, {258}, 0.9, 320) == 64
    assert size_for(COUNTS, {258}, 1.0, 320, multiple=1) == 6
    with pytest.raises(UserError, match="does not hold the 3 control tokens"):
        choose(COUNTS, {1, 2, 3}, 2, 320)
    points = curve(COUNTS, {258}, 320)
    assert points[-1].size == 320 and points[-1].coverage == 1
    assert all(a.coverage <= b.coverage for a, b in pairwise(points))


def test_control_tokens_are_always_there() -> None:
    vocabulary = {text: 256 + i for i, text in enumerate(SPECIALS)}
    always = control_ids(vocabulary, (258, 256))
    assert always == set(range(256, 266)) - {259}  # all but <|mask|>


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("form", ["dense", "int4", "int8 under an int4 module"])
def test_rows_and_ids_agree(tmp_path: Path, form: str, tied: bool) -> None:
    directory = build_tiny(tmp_path / "m", pattern="LF", tied=tied, dtype=torch.bfloat16)
    if form != "dense":
        head = {"embed": INT8} if tied else {"lm_head": INT4 if form == "int4" else INT8}
        quantize(open_checkpoint(directory), {**head, "mtp": INT4}, tmp_path / "q")  # type: ignore[arg-type]
        directory = tmp_path / "q"
    before = open_checkpoint(directory)
    ids = choose(COUNTS, {258}, 64, 320)
    write(directory, ids)
    for _ in range(2):  # writing again replaces
        after = open_checkpoint(directory)
        assert after.has_draft_head and after.notes == ()
        assert torch.equal(after.draft_vocab(), ids)
        draft = after.weight("mtp.draft_lm_head")
        assert type(draft) is type(before.weight("lm_head"))
        assert torch.equal(draft.dequantize(), before.weight("lm_head").dequantize()[ids])
        assert not any("draft" in name for name in read_directory(directory))  # other readers do not meet it
        assert after.config.quantization == before.config.quantization
        for name in before.modules:
            assert torch.equal(after.weight(name).dequantize(), before.weight(name).dequantize())
        ids = choose(COUNTS, {258}, 128, 320)
        write(directory, ids)
    assert json.loads((directory / "draft_vocab_ids.json").read_text()) == ids.tolist()


def test_quantising_afterwards_keeps_the_draft_head(tmp_path: Path) -> None:
    directory = build_tiny(tmp_path / "m", pattern="LF")
    ids = choose(COUNTS, {258}, 64, 320)
    write(directory, ids)
    quantize(open_checkpoint(directory), {"mtp": INT4}, tmp_path / "q")
    after = open_checkpoint(tmp_path / "q")
    assert torch.equal(after.draft_vocab(), ids) and after.modules["mtp.draft_lm_head"].dense
    assert after.notes == ()


@pytest.mark.parametrize("by", ["draft-vocab", "quantize"])
def test_a_head_that_the_index_names_is_read_and_moved(tmp_path: Path, by: str) -> None:
    """Published recipes keep it among the indexed tensors, where vLLM's MTP loader ends at a name it does not know."""
    directory = build_tiny(tmp_path / "m", pattern="LF")
    ids = choose(COUNTS, {258}, 64, 320)
    write(directory, ids)
    head = load_file(directory / BESIDE)
    (directory / BESIDE).unlink()
    save_file(head, directory / "model_extra_tensors.safetensors", {"format": "pt"})
    index = json.loads((directory / INDEX_NAME).read_text())
    index["weight_map"] |= dict.fromkeys(head, "model_extra_tensors.safetensors")
    (directory / INDEX_NAME).write_text(json.dumps(index))
    assert torch.equal(open_checkpoint(directory).draft_vocab(), ids)
    if by == "draft-vocab":
        ids = choose(COUNTS, {258}, 128, 320)
        write(directory, ids)
    else:
        quantize(open_checkpoint(directory), {"mtp": INT4}, tmp_path / "q")
        directory = tmp_path / "q"
    after = open_checkpoint(directory)
    assert torch.equal(after.draft_vocab(), ids) and after.modules["mtp.draft_lm_head"].beside
    assert not any("draft" in name for name in read_directory(directory)) and after.notes == ()


def _list(directory: Path, ids: list[int]) -> None:
    path = directory / BESIDE
    tensors = load_file(path)
    tensors["mtp.draft_vocab_ids"] = torch.tensor(ids)
    save_file(tensors, path, {"format": "pt"})


@pytest.mark.parametrize("ids", [list(range(63)), [*range(63), 62], [*range(63), 320], [*range(62), 63, 62]])
def test_lists_that_do_not_fit_are_refused(tmp_path: Path, ids: list[int]) -> None:
    directory = build_tiny(tmp_path / "m", pattern="LF")
    write(directory, choose(COUNTS, {258}, 64, 320))
    _list(directory, ids)
    with pytest.raises(CheckpointError, match="64 ascending token ids below 320"):
        open_checkpoint(directory)


def test_a_pickled_list_is_read_without_running_it(tmp_path: Path) -> None:
    directory = build_tiny(tmp_path / "m", pattern="LF")
    ids = choose(COUNTS, {258}, 64, 320)
    write(directory, ids)
    (directory / "draft_vocab_ids.json").unlink()
    tensors = load_file(directory / BESIDE)
    del tensors["mtp.draft_vocab_ids"]
    save_file(tensors, directory / BESIDE, {"format": "pt"})
    with pytest.raises(CheckpointError, match="no id list"):
        open_checkpoint(directory)
    torch.save(ids, directory / "mtp_draft_vocab_ids.pt")
    assert torch.equal(open_checkpoint(directory).draft_vocab(), ids)


def test_without_mtp_there_is_nothing_to_draft_with(tmp_path: Path) -> None:
    directory = build_tiny(tmp_path / "m", pattern="LF", mtp=False)
    with pytest.raises(CheckpointError, match="no MTP module"):
        write(directory, choose(COUNTS, {258}, 64, 320))


def test_command(tmp_path: Path) -> None:
    directory = build_tiny(tmp_path / "m", pattern="LF")
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / TOKENS).write_text(json.dumps({str(token): n for token, n in COUNTS.items()}))
    args = ["draft-vocab", str(directory), "--capture", str(tmp_path / "c"), "--coverage", "0.9"]
    dry = CliRunner().invoke(app, [*args, "--dry-run", "--plot", str(tmp_path / "curve.png")])
    assert dry.exit_code == 0 and "chosen: 64 tokens" in dry.output
    assert (tmp_path / "curve.png").stat().st_size > 1000
    assert not open_checkpoint(directory).has_draft_head
    assert CliRunner().invoke(app, args).exit_code == 0
    assert len(open_checkpoint(directory).draft_vocab()) == 64
    (tmp_path / "t.txt").write_text("hello hello")
    text = CliRunner().invoke(app, ["draft-vocab", str(directory), "--text", str(tmp_path / "t.txt"), "--dry-run"])
    assert text.exit_code == 0 and "11 tokens" in text.output
    assert CliRunner().invoke(app, ["draft-vocab", str(directory)]).exit_code == 2
