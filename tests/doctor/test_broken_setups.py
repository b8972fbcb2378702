"""Broken set-ups: the doctor names each one and its remedy, and nothing else fails beside it."""

from __future__ import annotations

import json
import os
import shutil
import socket
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from types import SimpleNamespace

import pytest

from soloist import toolchain
from soloist.checks import host
from soloist.checks.base import Finding, Status, Subject
from soloist.demo import path as demo_path
from soloist.doctor import CHECKS, examine, exit_code
from tiny import build_tiny

CARD = "0, NVIDIA GeForce RTX 3090, 570.10, 8.6, 24576, {free}, 350.00, 350.00"
OLD_CARD = "0, Tesla T4, 570.10, 7.5, 15360, 15000, 70.00, 70.00"
MISSING = toolchain.missing


def tools(card: str | None = None, holders: str = "") -> Callable[[list[str]], str | None]:
    """nvidia-smi as a machine with (or without) such a card answers."""

    def run(arguments: list[str]) -> str | None:
        if card is None or arguments[0] != "nvidia-smi":
            return None
        if "-L" in arguments:
            return "GPU 0: a card\n"
        return holders if any("compute-apps" in a for a in arguments) else card + "\n"

    return run


@pytest.fixture(autouse=True)
def compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """What this machine has to compile with is not what is examined here."""
    monkeypatch.setattr(toolchain, "missing", lambda environ: None)


@pytest.fixture
def free_port() -> str:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return str(s.getsockname()[1])


@pytest.fixture
def model(tmp_path) -> Path:
    """A copy of the demo, weights linked, to be broken."""
    target = tmp_path / "model"
    shutil.copytree(
        demo_path(),
        target,
        copy_function=lambda a, b: os.link(a, b) if a.endswith(".safetensors") else shutil.copy(a, b),
    )
    return target


@pytest.fixture
def subject(tmp_path, free_port) -> Callable[..., Subject]:
    def make(model: Path | str = "demo", environ: dict[str, str] | None = None, **more) -> Subject:
        flags = {"model": str(model), "port": free_port, **more.pop("flags", {})}
        environ = {"SESSION_DIR": "none", **(environ or {})}
        return Subject(flags, environ, tmp_path, more.pop("run_tool", tools()), **more)

    return make


def failures(subject: Subject) -> list[Finding]:
    return [f for f in examine(subject, CHECKS) if f.status is Status.FAIL]


def warnings(subject: Subject) -> list[Finding]:
    return [f for f in examine(subject, CHECKS) if f.status is Status.WARN]


def only(findings: list[Finding], check: str, words: str, remedy: str) -> None:
    assert [f.check for f in findings] == [check], findings
    assert words in findings[0].summary, findings[0]
    assert remedy in findings[0].remedy, findings[0]


def edit(path: Path, change: Callable[[dict], None]) -> None:
    data = json.loads(path.read_text())
    change(data)
    path.write_text(json.dumps(data))


def test_a_sound_setup_passes(subject):
    findings = examine(subject(), CHECKS)
    assert [f.check for f in findings if f.status is not Status.PASS] == [] and exit_code(findings) == 0
    assert {f.check for f in findings} == {c.name for c in CHECKS}


def test_missing_tokenizer(subject, model):
    (model / "tokenizer.json").unlink()
    only(failures(subject(model)), "model", "tokenizer.json", "Copy it")


def test_missing_config(subject, model):
    (model / "config.json").unlink()
    only(failures(subject(model)), "model", "config.json", "Point MODEL")


def test_model_directory_that_does_not_exist(subject, tmp_path):
    only(failures(subject(tmp_path / "nowhere")), "model", "is not a directory", "Point MODEL")


def test_truncated_shard(subject, model):
    shard = model / "model.safetensors"
    data = shard.read_bytes()[:-1000]
    shard.unlink()
    shard.write_bytes(data)
    only(failures(subject(model)), "model", "model.safetensors", "Download")


def test_foreign_architecture(subject, model):
    edit(model / "config.json", lambda c: c.update(model_type="llama"))
    only(failures(subject(model)), "model", "llama", "Qwen3.5")


def test_missing_chat_template(subject, model):
    (model / "chat_template.jinja").unlink()
    only(failures(subject(model)), "model", "chat_template.jinja", "Copy chat_template.jinja")


def test_drafter_of_another_model(subject, model):
    edit(model / "dflash2/config.json", lambda c: c.update(hidden_size=512))
    found = failures(subject(model, flags={"spec": "dflash2"}))
    only(found, "drafter", "hidden size 512, the model has 384", "DRAFTER")


def test_drafter_taps_a_layer_that_is_not_there(subject, model):
    edit(model / "dflash2/config.json", lambda c: c["dflash_config"].update(target_layer_ids=[2, 40]))
    only(failures(subject(model, flags={"spec": "dflash2"})), "drafter", "taps layer 40", "DRAFTER")


def test_drafter_directory_missing(subject, tmp_path):
    found = failures(subject(flags={"spec": "dflash2", "drafter": str(tmp_path / "none")}))
    only(found, "drafter", "needs a drafter directory", "DRAFTER")


def test_unprepared_model_on_a_card(subject, tmp_path):
    directory = build_tiny(tmp_path / "tiny", mtp=True)
    made = subject(directory, flags={"spec": "none"}, run_tool=tools(CARD.format(free=24000)))
    found = [f for f in examine(made, CHECKS) if f.check == "fast-path"]
    assert {f.status for f in found} == {Status.WARN}
    commands = "\n".join(f.remedy for f in found)
    for part in ("embed=int8", "mtp=int4", "body=int4"):
        assert f"soloist quantize {directory} --part {part}" in commands
    assert not [f for f in examine(subject(directory, flags={"spec": "none"}), CHECKS) if f.status is Status.WARN]


def test_occupied_port(subject, free_port):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", int(free_port)))
        taken.listen()
        only(failures(subject()), "port", f"Port {free_port}", "another PORT")


def test_a_port_held_by_a_soloist_is_no_fault(subject, free_port):
    class Ready(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = b'{"ready": true}'
            self.send_response(200)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", int(free_port)), Ready)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        found = [f for f in examine(subject(), CHECKS) if f.check == "port"]
    finally:
        server.shutdown()
        server.server_close()
    assert found[0].outcome == "soloist" and found[0].status is Status.PASS


def test_unknown_knob_in_dotenv(subject, tmp_path):
    (tmp_path / ".env").write_text("MAX_SEQ=4\n")
    only(failures(subject()), "settings", "MAX_SEQ", "MAX_SEQS")


def test_a_line_of_dotenv_that_is_none(subject, tmp_path):
    (tmp_path / ".env").write_text("PORT=9000\nthis is no setting\n")
    only(failures(subject()), "settings", "line 2", "begin it with #")


def test_misspelt_variable_in_the_environment(subject):
    made = subject(environ={"MAX_LENN": "4096"})
    assert not failures(made)
    only(warnings(made), "settings", "MAX_LENN", "Correct the name")


def test_impossible_value(subject):
    only(failures(subject(environ={"SPEC": "dflash3"})), "settings", "SPEC=dflash3", "dflash2")


def test_open_to_the_network_without_a_key(subject):
    only(warnings(subject(environ={"HOST": "0.0.0.0"})), "keys", "no API_KEY", "Set API_KEY")
    assert not warnings(subject(environ={"HOST": "0.0.0.0", "API_KEY": "k"}))


def test_full_disk(subject, monkeypatch):
    monkeypatch.setattr(host.shutil, "disk_usage", lambda _: SimpleNamespace(total=10**12, used=10**12, free=10**6))
    only(failures(subject()), "disk", "is full", "Free space")


def test_full_disk_of_sessions(subject, tmp_path, monkeypatch):
    sessions = tmp_path / "sessions"
    sessions.mkdir()
    full = os.strerror(28)
    monkeypatch.setattr(host, "unwritable", lambda _: full)
    only(failures(subject(environ={"SESSION_DIR": str(sessions)})), "sessions", "No space is left", "SESSION_DIR")


def test_session_directory_that_is_a_file(subject, tmp_path):
    (tmp_path / "file").write_text("")
    found = failures(subject(environ={"SESSION_DIR": str(tmp_path / "file")}))
    only(found, "sessions", "not a directory", "SESSION_DIR")


def test_card_too_old(subject):
    found = [f for f in failures(subject(run_tool=tools(OLD_CARD))) if f.check == "card"]
    only(found, "card", "7.5", "DEVICE=cpu")


def test_cuda_wanted_without_a_card(subject):
    only(failures(subject(environ={"DEVICE": "cuda"})), "card", "no NVIDIA card", "driver")


def test_card_held_by_another_program(subject):
    made = subject(run_tool=tools(CARD.format(free=9000), "4711, /usr/bin/llama-server, 14000\n"))
    found = [f for f in examine(made, CHECKS) if f.check == "card-memory"]
    only(found, "card-memory", "llama-server (pid 4711, 14000 MiB)", "Stop those programs")


def test_weights_larger_than_the_card(subject, model):
    made = subject(model, run_tool=tools(CARD.format(free=20)))
    found = [f for f in failures(made) if f.check == "memory"]
    only(found, "memory", "The weights need", "smaller")


def test_no_compiler_for_triton(subject, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(toolchain, "missing", MISSING)
    made = subject(environ={"PATH": str(tmp_path)}, run_tool=tools(CARD.format(free=24000)))
    only([f for f in failures(made) if f.check == "compiler"], "compiler", "C compiler", "apt install gcc python3-dev")
    monkeypatch.setattr(toolchain.sysconfig, "get_paths", lambda scheme: {"include": str(tmp_path)})
    made = subject(environ={"CC": "cc"}, run_tool=tools(CARD.format(free=24000)))
    only([f for f in failures(made) if f.check == "compiler"], "compiler", f"{tmp_path}/Python.h", "python3-dev")
    made = subject(environ={"PATH": str(tmp_path)}, run_tool=tools())
    assert not [f for f in failures(made) if f.check == "compiler"]


def test_cpu_torch_beside_a_card(subject):
    import torch

    if torch.version.cuda is not None:
        pytest.skip("this torch is a CUDA build")
    found = [f for f in examine(subject(run_tool=tools(CARD.format(free=24000))), CHECKS) if f.check == "torch"]
    only(found, "torch", "CPU build", "CUDA build")


def test_a_missing_package_is_named(subject, monkeypatch):
    from importlib import metadata

    real = metadata.version

    def version(name: str) -> str:
        if name == "llguidance":
            raise metadata.PackageNotFoundError(name)
        return "0.1" if name == "tokenizers" else real(name)

    monkeypatch.setattr(metadata, "version", version)
    found = [f for f in failures(subject()) if f.check == "packages"]
    assert {f.outcome for f in found} == {"missing", "old"}
    assert any("llguidance" in f.summary and "pip install" in f.remedy for f in found)


def test_a_check_that_breaks_does_not_end_the_report(subject, monkeypatch):
    def broken(_: object) -> None:
        raise RuntimeError("surprise")

    monkeypatch.setattr(host.shutil, "disk_usage", broken)
    findings = examine(subject(), CHECKS)
    assert {f.check for f in findings} == {c.name for c in CHECKS}
    assert any(f.outcome == "broke" and "surprise" in f.summary for f in findings) and exit_code(findings) == 1
