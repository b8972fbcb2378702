"""Whole directories through `quantize`: loadable elsewhere, resumable, never half-written, exact about what it did."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from foreign import make_foreign
from oracle.target import load_target, states
from soloist.checkpoint.formats import resolve
from soloist.checkpoint.reader import open_checkpoint
from soloist.checkpoint.shards import BESIDE, INDEX_NAME, read_directory
from soloist.checkpoint.writer import JOURNAL
from soloist.errors import CheckpointError, SettingError
from soloist.prepare import quantize as room
from soloist.prepare.draft_vocab import write
from soloist.prepare.gptq import Hessian
from soloist.prepare.hessians import Captured, Streamed, save_hessians
from soloist.prepare.quantize import REPORT, Gptq, quantize
from soloist.prepare.recipe import PartRecipe, parse_part
from tiny import build_tiny, build_tiny_drafter

INT4, INT8 = PartRecipe(4, group=32), PartRecipe(8, group=32)
TEXTS = [list(range(i, i + 80)) for i in (0, 40, 90)]


def logits(directory: Path) -> torch.Tensor:
    return states(load_target(directory), TEXTS[1]).logits


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny(tmp_path_factory.mktemp("dense") / "m", pattern="LLF", shards=3, dtype=torch.bfloat16)


def test_transformers_reads_what_is_written(dense: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    out = tmp_path / "out"
    quantize(open_checkpoint(dense), {"body": INT4, "lm_head": INT8, "mtp": INT4}, out)
    model = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32, attn_implementation="eager")
    with torch.no_grad():
        theirs = model(torch.tensor([TEXTS[1]])).logits[0]
    torch.testing.assert_close(theirs, logits(out), rtol=0, atol=1e-5 * float(theirs.abs().max()))


@pytest.mark.parametrize("nested, compact", [(False, False), (True, True), (True, False)])
def test_parts_forms_and_config_agree(tmp_path: Path, nested: bool, compact: bool) -> None:
    source = build_tiny(tmp_path / "m", pattern="LF", nested=nested, shards=2)
    out = tmp_path / "out"
    parts = {"body": INT4, "lm_head": INT8, "embed": INT8, "mtp": INT8}
    reports = quantize(open_checkpoint(source), parts, out, compact=compact)  # type: ignore[arg-type]
    after, before = open_checkpoint(out), open_checkpoint(source)
    assert after.notes == ()
    for name, stored in after.modules.items():
        small = name.endswith(("in_proj_a", "in_proj_b"))
        bits = None if small else 4 if name.startswith("layers") else 8
        assert (None if stored.dense else stored.bits) == bits, name
        told = None if stored.beside else bits
        assert stored.beside == (name == "embed_tokens" and not compact)
        assert resolve.predict(after.config.quantization or {}, name) == told, name
        if small:
            assert torch.equal(after.tensor(f"{name}.weight"), before.tensor(f"{name}.weight"))
    for name in before.layout.tensors:
        assert torch.equal(after.tensor(name), before.tensor(name))
    report = {entry.module: entry for entry in reports}
    weight = before.tensor("lm_head.weight").float()
    error = (after.weight("lm_head").dequantize() - weight).norm() / weight.norm()
    assert report["lm_head"].error == pytest.approx(float(error), rel=1e-5)
    assert report["lm_head"].bytes_after == after.modules["lm_head"].nbytes
    assert json.loads((out / REPORT).read_text())["modules"][0]["module"] == reports[0].module


def test_a_tied_head_is_split_off(tmp_path: Path) -> None:
    source = build_tiny(tmp_path / "m", pattern="LF", tied=True)
    out = tmp_path / "out"
    quantize(open_checkpoint(source), {"lm_head": INT4, "embed": INT8}, out)
    after = open_checkpoint(out)
    assert not after.config.tied
    assert (after.modules["lm_head"].bits, after.modules["embed_tokens"].bits) == (4, 8)
    both = tmp_path / "tied"
    quantize(open_checkpoint(source), {"embed": INT8}, both)
    assert open_checkpoint(both).config.tied and open_checkpoint(both).notes == ()


def test_other_readers_keep_the_dense_embedding(dense: Path, tmp_path: Path) -> None:
    """What only Soloist reads is in a file no index names; the rest is the source's embedding, byte for byte."""
    from transformers import AutoModelForCausalLM

    out = tmp_path / "out"
    quantize(open_checkpoint(dense), {"body": INT4, "lm_head": INT4, "embed": INT8, "mtp": INT4}, out)
    ours, theirs = open_checkpoint(out), open_checkpoint(out, beside=False)
    assert ours.modules["embed_tokens"].bits == 8 and theirs.modules["embed_tokens"].dense
    assert torch.equal(theirs.tensor("embed_tokens.weight"), open_checkpoint(dense).tensor("embed_tokens.weight"))
    index = json.loads((out / INDEX_NAME).read_text())
    assert BESIDE not in index["weight_map"].values() and (out / BESIDE).exists()
    assert index["metadata"]["total_size"] == sum(info.nbytes for info in read_directory(out).values())
    model = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32, attn_implementation="eager")
    assert torch.equal(model.get_input_embeddings().weight, theirs.tensor("embed_tokens.weight").float())
    with torch.no_grad():
        logits_there = model(torch.tensor([TEXTS[1]])).logits[0]
    moved = (logits_there - logits(out)).abs().max() / logits_there.abs().max()
    assert 0 < float(moved) < 0.05


def test_a_second_run_keeps_what_is_beside(dense: Path, tmp_path: Path) -> None:
    quantize(open_checkpoint(dense), {"embed": INT8}, tmp_path / "a")
    write(tmp_path / "a", torch.arange(0, 320, 5))
    quantize(open_checkpoint(tmp_path / "a"), {"body": INT4, "mtp": INT8}, tmp_path / "b")
    a, b = open_checkpoint(tmp_path / "a"), open_checkpoint(tmp_path / "b")
    for name in ("embed_tokens", "mtp.draft_lm_head"):
        assert b.modules[name].beside
        assert torch.equal(a.weight(name).dequantize(), b.weight(name).dequantize())
    assert torch.equal(a.draft_vocab(), b.draft_vocab())
    assert b.notes == () and (b.modules["layers.0.mlp.up_proj"].bits, b.modules["mtp.fc"].bits) == (4, 8)
    with pytest.raises(CheckpointError, match="embed_tokens is int8 already"):
        quantize(b, {"embed": INT4}, tmp_path / "c")


def test_the_embedding_of_another_checkpoint_is_refused(dense: Path, tmp_path: Path) -> None:
    quantize(open_checkpoint(dense), {"embed": INT8}, tmp_path / "a")
    other = build_tiny(tmp_path / "m", pattern="LLF", dtype=torch.bfloat16, seed=7)
    shutil.copy(tmp_path / "a" / BESIDE, other / BESIDE)
    with pytest.raises(CheckpointError, match="the embedding of another checkpoint"):
        open_checkpoint(other)
    assert open_checkpoint(other, beside=False).modules["embed_tokens"].dense


@pytest.mark.parametrize("form", ["gptq", "gptq_v2", "awq", "auto-round"])
def test_other_formats_are_converted_without_loss(dense: Path, tmp_path: Path, form: str) -> None:
    source = tmp_path / "q"
    expected = make_foreign(dense, source, form, symmetric=form == "gptq")
    out = tmp_path / "out"
    quantize(open_checkpoint(source), {"lm_head": INT8}, out)
    after = open_checkpoint(out)
    for name, weight in expected.items():
        stored = after.modules[name.removeprefix("model.")]
        assert stored.form == "pack-quantized"
        assert torch.equal(after.weight(stored.name).dequantize(), weight)
    assert [note for note in after.notes if "mtp" not in note] == []


def test_unchanged_files_are_linked_and_sources_untouched(dense: Path, tmp_path: Path) -> None:
    before = {path.name: path.read_bytes() for path in dense.iterdir()}
    out = tmp_path / "out"
    quantize(open_checkpoint(dense), {"lm_head": INT8}, out)
    shared = [p.name for p in out.glob("*.safetensors") if p.stat().st_ino == (dense / p.name).stat().st_ino]
    assert len(shared) == 2
    for path in out.glob("*.safetensors"):
        assert "lm_head.weight" not in load_file(path)
    assert {path.name: path.read_bytes() for path in dense.iterdir()} == before


def test_single_file(dense: Path, tmp_path: Path) -> None:
    quantize(open_checkpoint(dense), {"body": INT8}, tmp_path / "one", single_file=True)
    quantize(open_checkpoint(dense), {"body": INT8}, tmp_path / "many")
    assert [p.name for p in (tmp_path / "one").glob("*.safetensors*")] == ["model.safetensors"]
    assert torch.equal(logits(tmp_path / "one"), logits(tmp_path / "many"))


def test_drafter(dense: Path, tmp_path: Path) -> None:
    source = build_tiny_drafter(tmp_path / "d", dense)
    quantize(open_checkpoint(source, "drafter"), {"drafter": INT4}, tmp_path / "out")
    after = open_checkpoint(tmp_path / "out", "drafter")
    packed = {name for name, stored in after.modules.items() if not stored.dense}
    assert len(packed) == 2 * 7 + 1 and "fc" in packed
    assert after.notes == ()
    with pytest.raises(CheckpointError, match="no part body"):
        quantize(open_checkpoint(source, "drafter"), {"body": INT4}, tmp_path / "x")


class Stop(Exception):
    pass


@pytest.mark.parametrize("method", ["rtn", "gptq"])
def test_an_interrupted_run_goes_on(dense: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str) -> None:
    checkpoint = open_checkpoint(dense)
    parts = {"body": PartRecipe(4, method, 32), "lm_head": INT8}

    def calibration() -> Gptq:
        return Gptq([Streamed(checkpoint, TEXTS, torch.device("cpu"), torch.float32)])

    quantize(checkpoint, parts, tmp_path / "straight", gptq=calibration())
    ran: list[str] = []
    original = room._run

    def counted(job: room.Job, *args: object) -> room.ModuleReport:
        if len(ran) == 9 and job.module not in ran:
            raise Stop
        ran.append(job.module)
        return original(job, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(room, "_run", counted)
    out = tmp_path / "out"
    with pytest.raises(Stop):
        quantize(checkpoint, parts, out, gptq=calibration())
    assert not out.exists() and (tmp_path / "out.partial" / JOURNAL).exists()
    with (tmp_path / "out.partial" / JOURNAL).open("a") as journal:
        journal.write('{"done": "layers.2.mlp')  # a line cut short by the kill
    first = list(ran)
    monkeypatch.setattr(room, "_run", lambda job, *args: ran.append(job.module) or original(job, *args))
    reports = quantize(checkpoint, parts, out, gptq=calibration())
    assert len(ran) == len(set(ran)) == len(reports) and ran[:9] == first
    for path in out.glob("*.safetensors"):
        assert path.read_bytes() == (tmp_path / "straight" / path.name).read_bytes()
    assert not (tmp_path / "out.partial").exists()


KILLED = """
import sys
from soloist.checkpoint.reader import open_checkpoint
from soloist.checkpoint.writer import DirectoryWriter
from soloist.prepare.quantize import quantize
from soloist.prepare.recipe import PartRecipe
from pathlib import Path
put = DirectoryWriter.put
def slowly(self, *args):
    put(self, *args)
    print(len(self.done), flush=True)
    sys.stdin.readline()
DirectoryWriter.put = slowly
int4 = PartRecipe(4, group=32)
quantize(open_checkpoint(sys.argv[1]), {"body": int4, "embed": PartRecipe(8, group=32)}, Path(sys.argv[2]))
"""


def test_killed_in_the_middle_of_a_module(dense: Path, tmp_path: Path) -> None:
    """SIGKILL between two writes of one module: nothing at OUT, and the next run ends with a straight run's bytes."""
    parts = {"body": INT4, "embed": INT8}
    quantize(open_checkpoint(dense), parts, tmp_path / "straight")  # type: ignore[arg-type]
    out = tmp_path / "out"
    child = subprocess.Popen(
        [sys.executable, "-c", KILLED, str(dense), str(out)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert child.stdin is not None and child.stdout is not None
    for _ in range(8):  # three writes a module: the codes of the third are written, its scales are not
        done = int(child.stdout.readline())
        child.stdin.write("\n")
        child.stdin.flush()
    child.stdout.readline()
    child.kill()
    child.wait()
    assert done >= 2 and not out.exists()
    kept = len((tmp_path / "out.partial" / JOURNAL).read_text().splitlines())
    assert kept >= done
    quantize(open_checkpoint(dense), parts, out)  # type: ignore[arg-type]
    for path in (tmp_path / "straight").iterdir():
        assert (out / path.name).read_bytes() == path.read_bytes(), path.name
    assert not (tmp_path / "out.partial").exists()


def test_another_plan_starts_over(dense: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint, out = open_checkpoint(dense), tmp_path / "out"

    def stop(*args: object) -> None:
        raise Stop

    with monkeypatch.context() as patch:
        patch.setattr(room, "_run", stop)
        with pytest.raises(Stop):
            quantize(checkpoint, {"lm_head": INT4}, out)
    quantize(checkpoint, {"lm_head": INT8}, out)
    assert open_checkpoint(out).modules["lm_head"].bits == 8


def _nan(directory: Path) -> None:
    for path in directory.glob("*.safetensors"):
        tensors = load_file(path)
        if "lm_head.weight" in tensors:
            tensors["lm_head.weight"][7, 3] = float("nan")
            save_file(tensors, path, {"format": "pt"})


def _exists(directory: Path) -> None:
    (directory.parent / "out").mkdir()


@pytest.mark.parametrize(
    "damage, parts, message",
    [
        (_nan, {"lm_head": INT8}, "lm_head holds NaN"),
        (lambda d: None, {"lm_head": PartRecipe(4, group=100)}, "100 does not divide its 128"),
        (_exists, {"lm_head": INT8}, "exists already"),
        (lambda d: None, {"drafter": INT8}, "no part drafter"),
    ],
)
def test_refusals_leave_nothing(
    dense: Path, tmp_path: Path, damage: Callable[[Path], None], parts: dict[str, PartRecipe], message: str
) -> None:
    directory = Path(shutil.copytree(dense, tmp_path / "m"))
    damage(directory)
    there = (tmp_path / "out").exists()
    with pytest.raises(CheckpointError) as caught:
        quantize(open_checkpoint(directory), parts, tmp_path / "out")  # type: ignore[arg-type]
    assert message in caught.value.message and caught.value.remedy
    assert (tmp_path / "out").exists() == there


def test_requantising_is_refused(dense: Path, tmp_path: Path) -> None:
    quantize(open_checkpoint(dense), {"lm_head": INT4}, tmp_path / "a")
    with pytest.raises(CheckpointError, match="int4 already"):
        quantize(open_checkpoint(tmp_path / "a"), {"lm_head": INT8}, tmp_path / "b")
    quantize(open_checkpoint(tmp_path / "a"), {"mtp": INT8}, tmp_path / "b")
    after = open_checkpoint(tmp_path / "b")
    assert (after.modules["lm_head"].bits, after.modules["mtp.fc"].bits) == (4, 8) and after.notes == ()


def test_gptq_needs_calibration(dense: Path, tmp_path: Path) -> None:
    parts = {"lm_head": PartRecipe(4, "gptq", 32)}
    with pytest.raises(SettingError, match="GPTQ needs calibration"):
        quantize(open_checkpoint(dense), parts, tmp_path / "out")
    save_hessians(tmp_path / "c", {"mtp.fc": Hessian(256)}, {})
    with pytest.raises(CheckpointError, match="no calibration for lm_head"):
        quantize(open_checkpoint(dense), parts, tmp_path / "out", gptq=Gptq([Captured(tmp_path / "c")]))
    assert not (tmp_path / "out").exists()


def test_a_capture_of_another_model_is_refused(dense: Path, tmp_path: Path) -> None:
    hessian = Hessian(64)
    hessian.add(torch.randn(80, 64, generator=torch.Generator().manual_seed(1)))
    save_hessians(tmp_path / "c", {"lm_head": hessian}, {})
    parts = {"lm_head": PartRecipe(4, "gptq", 32)}
    with pytest.raises(CheckpointError, match="lm_head is over 64 inputs, the module has 128"):
        quantize(open_checkpoint(dense), parts, tmp_path / "out", gptq=Gptq([Captured(tmp_path / "c")]))
    assert not (tmp_path / "out").exists()


def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-7])


def _replaced(name: str, tensor: torch.Tensor | None) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        tensors = load_file(path)
        del tensors[name]
        save_file(tensors if tensor is None else {**tensors, name: tensor}, path, {"format": "pt"})

    return change


@pytest.mark.parametrize(
    "damage, message",
    [
        (_cut, "7 bytes are missing"),
        (_replaced("embed_tokens.weight_scale", None), "embed_tokens.weight_scale is missing"),
        (_replaced("embed_tokens.weight_packed", torch.zeros(320, 7, dtype=torch.int32)), "is not int4 or int8"),
        (_replaced("embed_tokens.weight_scale", torch.ones(320, 3)), "does not divide"),
        (_replaced("embed_tokens.weight_scale", torch.full((320, 4), torch.nan)), "of another checkpoint"),
        (_replaced("mtp.draft_lm_head.weight", torch.zeros(64, 128)), "64 ascending token ids"),
    ],
)
def test_damage_beside_is_named(dense: Path, tmp_path: Path, damage: Callable[[Path], None], message: str) -> None:
    quantize(open_checkpoint(dense), {"embed": INT8}, tmp_path / "a")
    write(tmp_path / "a", torch.arange(0, 320, 4))
    damage(tmp_path / "a" / BESIDE)
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(tmp_path / "a")
    assert message in caught.value.message and caught.value.remedy
    assert open_checkpoint(tmp_path / "a", beside=False).notes == ()


def test_captured_hessians_come_back(tmp_path: Path) -> None:
    shared, own = Hessian(16), Hessian(8)
    shared.add(torch.randn(50, 16, generator=torch.Generator().manual_seed(1)))
    own.add(torch.randn(20, 8, generator=torch.Generator().manual_seed(2)))
    save_hessians(tmp_path, {"a": shared, "b": shared, "c": own}, {"prompts": 3})
    captured = Captured(tmp_path)
    a, b, c = (captured.hessian(name) for name in "abc")
    assert a is b and a is not None and c is not None
    assert torch.equal(a.matrix, shared.matrix) and a.rows == 50 and c.rows == 20
    assert captured.hessian("d") is None
    assert len(load_file(tmp_path / "hessians.safetensors")) == 2


def test_streamed_activations_are_the_models_own(dense: Path) -> None:
    checkpoint = open_checkpoint(dense)
    streamed = Streamed(checkpoint, TEXTS, torch.device("cpu"), torch.float32)
    model = load_target(dense)
    seen: dict[str, list[torch.Tensor]] = {}
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear):
            module.register_forward_pre_hook(
                lambda _, args, name=name: seen.setdefault(name.removeprefix("model."), []).append(args[0][0])
            )
    with torch.no_grad():
        for text in TEXTS:
            model(torch.tensor([text]))
    for module in ("layers.0.linear_attn.in_proj_z", "layers.1.mlp.down_proj", "layers.2.self_attn.o_proj", "lm_head"):
        x = torch.cat(seen[module])
        hessian = streamed.hessian(module)
        assert hessian is not None and hessian.rows == 240
        expected = 2 / 240 * x.T @ x
        torch.testing.assert_close(hessian.matrix, expected, rtol=0, atol=2e-4 * float(expected.abs().max()))


def test_part_texts() -> None:
    assert parse_part("lm_head=int4:gptq") == ("lm_head", PartRecipe(4, "gptq", 128))
    assert parse_part("embed=int8", 64) == ("embed", PartRecipe(8, "rtn", 64))
    for wrong in ("head=int4", "body", "body=int3", "body=int4:awq"):
        with pytest.raises(SettingError, match="not a part and a form"):
            parse_part(wrong)
