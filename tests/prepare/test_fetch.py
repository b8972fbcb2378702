"""Fetching from a mirror: complete or absent, resumed, sized, refused with numbers; the Hub's client is faked once."""

from __future__ import annotations

import shlex
from collections import namedtuple
from pathlib import Path
from types import SimpleNamespace
from typing import BinaryIO

import pytest
from typer.testing import CliRunner

from soloist.checkpoint.reader import open_checkpoint
from soloist.cli import app
from soloist.errors import CapacityError, CheckpointError, UserError
from soloist.prepare import fetch as room
from soloist.prepare.fetch import Hub, Item, Mirror, RemoteFile, fetch, partial, plan, resolve
from tiny import build_tiny, build_tiny_drafter


@pytest.fixture
def mirror(tmp_path: Path) -> Path:
    for repo in ("dbirks/Qwen3.8-27B-W4A16-AutoRound", "incoai/Qwen3.8-27B-DFlash2"):
        directory = tmp_path / "mirror" / repo
        directory.mkdir(parents=True)
        (directory / "config.json").write_text("{}")
        (directory / "model.safetensors").write_bytes(bytes(range(256)) * 40)
        (directory / "pytorch_model.bin").write_bytes(b"x" * 99)
        (directory / ".gitattributes").write_text("x")
    return tmp_path / "mirror"


def _items(mirror: Path, into: Path) -> list[Item]:
    return plan(resolve("qwen3.8-27b", None, True), Mirror(mirror), into)


def test_everything_wanted_arrives_and_nothing_else(mirror: Path, tmp_path: Path) -> None:
    into = tmp_path / "models"
    items = _items(mirror, into)
    assert [item.bytes_missing for item in items] == [10242, 10242]
    directories = fetch(items, Mirror(mirror), into)
    for directory in directories:
        assert sorted(path.name for path in directory.iterdir()) == ["config.json", "model.safetensors"]
        assert (directory / "model.safetensors").read_bytes() == bytes(range(256)) * 40
        assert not partial(directory).exists()
    assert all(not item.missing for item in _items(mirror, into))


def test_an_interrupted_fetch_goes_on(mirror: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    into = tmp_path / "models"
    whole = Mirror.get

    def cut(self: Mirror, repo: str, revision: str | None, file: RemoteFile, into: Path) -> None:
        if file.name.endswith(".safetensors"):
            data = (self.root / repo / file.name).read_bytes()[:5000]
            (into / f"{file.name}.part").write_bytes(data)
            raise KeyboardInterrupt
        whole(self, repo, revision, file, into)

    monkeypatch.setattr(Mirror, "get", cut)
    with pytest.raises(KeyboardInterrupt):
        fetch(_items(mirror, into), Mirror(mirror), into)
    first = _items(mirror, into)[0]
    assert not first.directory.exists() and [file.name for file in first.missing] == ["model.safetensors"]
    monkeypatch.setattr(Mirror, "get", whole)
    directory = fetch(_items(mirror, into), Mirror(mirror), into)[0]
    assert (directory / "model.safetensors").read_bytes() == bytes(range(256)) * 40


def test_a_wrong_size_is_told(mirror: Path, tmp_path: Path) -> None:
    items = _items(mirror, tmp_path / "models")
    path = mirror / items[0].repo / "model.safetensors"
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(CheckpointError, match="has 100 bytes instead of 10240"):
        fetch(items, Mirror(mirror), tmp_path / "models")
    assert not items[0].directory.exists()


def test_damaged_directories_are_repaired(mirror: Path, tmp_path: Path) -> None:
    into = tmp_path / "models"
    directory = fetch(_items(mirror, into), Mirror(mirror), into)[0]
    (directory / "model.safetensors").write_bytes(b"short")
    (directory / "mine.txt").write_text("kept")
    fetch(_items(mirror, into), Mirror(mirror), into)
    assert (directory / "model.safetensors").stat().st_size == 10240
    assert (directory / "mine.txt").read_text() == "kept"


def test_space_is_checked_first(mirror: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(room.shutil, "disk_usage", lambda path: usage(10, 10, 20000))
    with pytest.raises(CapacityError, match=r"needs 0\.0 GB more"):
        fetch(_items(mirror, tmp_path / "models"), Mirror(mirror), tmp_path / "models")
    assert not (tmp_path / "models").exists()


def test_names() -> None:
    assert resolve("me/mine", "v1", True) == {"target": ("me/mine", "v1")}
    assert set(resolve("qwen3.8-27b", None, False)) == {"target"}
    assert set(resolve("qwen3.8-27b-drafter", None, False)) == {"drafter"}
    for wrong in ("qwen", "./here", "a/b/c"):
        with pytest.raises(UserError, match="known recipe"):
            resolve(wrong, None, True)


def test_recipes_name_only_commands_that_exist() -> None:
    from soloist.cli import Commands

    known = Commands(name="soloist").list_commands(None)
    for recipe in room.recipes().values():
        for line in recipe["then"]:
            assert line.split()[1] in known
            line.format(target="T", drafter="D")


def test_the_steps_after_a_fetch_work_as_they_stand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = room.recipes()["qwen3.8-27b"]
    mirror = tmp_path / "mirror"
    (mirror / "dbirks").mkdir(parents=True)
    target = build_tiny(mirror / recipe["target"]["repo"], pattern="LLLF", hidden=256, ffn=256)
    build_tiny_drafter(mirror / recipe["drafter"]["repo"], target)
    monkeypatch.setattr("soloist.prepare.texts.Reader.prompts", lambda *_, **__: [list(b"A fox"), list(b"Two foxes")])
    monkeypatch.setenv("MAX_LEN", "128")
    monkeypatch.setenv("THREADS", "1")
    monkeypatch.chdir(tmp_path)
    fetched = CliRunner().invoke(app, ["fetch", "qwen3.8-27b", "--from", str(mirror)])
    assert fetched.exit_code == 0, fetched.output
    steps = fetched.output.partition("Next:\n")[2].split("  soloist ")[1:]
    assert len(steps) == len(recipe["then"])
    for step in steps:
        done = CliRunner().invoke(app, shlex.split(step))
        assert done.exit_code == 0, (step, done.output)
    made = open_checkpoint(tmp_path / "models" / f"{recipe['target']['repo']}-fast")
    assert made.has_draft_head and (made.modules["mtp.fc"].bits, made.modules["embed_tokens"].bits) == (4, 8)
    block = open_checkpoint(tmp_path / "models" / f"{recipe['drafter']['repo']}-W4A16", "drafter")
    assert block.modules["fc"].bits == 4


def test_the_hub_is_asked_through_its_client(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    files = {"config.json": b"{}", "a.safetensors": b"12345", "x.bin": b"1"}

    def model_info(self: object, repo: str, revision: str | None, files_metadata: bool) -> SimpleNamespace:
        assert (repo, revision, files_metadata) == ("me/mine", "abc", True)
        return SimpleNamespace(siblings=[SimpleNamespace(rfilename=n, size=len(b)) for n, b in files.items()])

    def transfer(url: str, target: BinaryIO, *, resume_size: int, headers: object, expected_size: int) -> None:
        assert "/me/mine/resolve/abc/" in url and resume_size == 0
        target.write(files[url.rsplit("/", 1)[-1]])

    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", model_info)
    monkeypatch.setattr("huggingface_hub.file_download.http_get", transfer)
    directory = fetch(plan({"target": ("me/mine", "abc")}, Hub(), tmp_path), Hub(), tmp_path)[0]
    assert sorted(path.name for path in directory.iterdir()) == ["a.safetensors", "config.json"]


def test_an_unreachable_hub_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    def refuse(*args: object, **kwargs: object) -> None:
        raise ConnectionError("no route")

    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", refuse)
    with pytest.raises(UserError, match="cannot be reached for me/mine") as caught:
        plan({"target": ("me/mine", None)}, Hub(), tmp_path)
    assert "--from" in caught.value.remedy


def test_command(mirror: Path, tmp_path: Path) -> None:
    run = CliRunner().invoke
    into, origin = str(tmp_path / "models"), str(mirror)
    listed = run(app, ["fetch"])
    assert listed.exit_code == 0 and "qwen3.8-27b-drafter" in listed.output
    dry = run(app, ["fetch", "qwen3.8-27b", "--into", into, "--from", origin, "--dry-run"])
    assert dry.exit_code == 0 and "model.safetensors" in dry.output and not Path(into).exists()
    real = run(app, ["fetch", "qwen3.8-27b", "--into", into, "--from", origin])
    assert real.exit_code == 0 and "soloist capture" in real.output
    missing = run(app, ["fetch", "no/such", "--into", into, "--from", origin])
    assert missing.exit_code == 2
