"""The unit file, the profiles, and waiting for the card; systemctl is replaced, systemd-analyze is the real one."""

from __future__ import annotations

import configparser
import os
import shutil
import stat
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from soloist.errors import SettingError
from soloist.service import card
from soloist.service.manage import Service, read_profile
from soloist.service.unit import quoted, render


class Systemctl:
    """Remembers what was asked of it."""

    def __init__(self, answer: str = "") -> None:
        self.calls: list[list[str]] = []
        self.answer = answer

    def __call__(self, arguments: Sequence[str]) -> str:
        self.calls.append(list(arguments))
        return self.answer


@pytest.fixture(autouse=True)
def executable(tmp_path, monkeypatch) -> Path:
    """An environment whose bin/ has python and soloist."""
    folder = tmp_path / "venv" / "bin"
    folder.mkdir(parents=True)
    (folder / "python").symlink_to(sys.executable)
    (folder / "soloist").write_text("#!/bin/sh\nexit 0\n")
    (folder / "soloist").chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(folder / "python"))
    return folder / "soloist"


def test_install_writes_unit_and_profile_and_starts(tmp_path, executable):
    calls = Systemctl()
    service = Service(tmp_path / "config", calls)
    service.install("default", {"MODEL": "/models/a b", "API_KEY": 'k"1'})
    assert calls.calls == [["daemon-reload"], ["enable", "soloist.service"], ["restart", "soloist.service"]]
    profile = service.directory / "default.env"
    assert read_profile(profile) == {"MODEL": "/models/a b", "API_KEY": 'k"1'}
    assert stat.S_IMODE(profile.stat().st_mode) == 0o600
    assert service.current() == "default" and service.link.resolve() == profile.resolve()
    unit = configparser.ConfigParser(interpolation=None)
    unit.optionxform = str  # type: ignore[assignment,method-assign]
    unit.read(service.unit_file)
    assert unit["Service"]["ExecStart"] == f"{executable} serve"
    assert unit["Service"]["ExecStartPre"] == f"{executable} service wait-card"
    assert unit["Service"]["EnvironmentFile"] == str(service.link)
    assert unit["Service"]["RestartPreventExitStatus"] == "2" and unit["Install"]["WantedBy"] == "default.target"


def test_wrong_knobs_are_refused_before_anything_is_written(tmp_path):
    calls = Systemctl()
    service = Service(tmp_path / "config", calls)
    with pytest.raises(SettingError, match="SPEC"):
        service.install("default", {"SPEC": "dflash3"})
    with pytest.raises(SettingError, match="not a profile name"):
        service.install("../x", {})
    assert not calls.calls and not service.unit_file.exists() and not service.profiles()


def test_use_switches_the_one_unit(tmp_path):
    calls = Systemctl()
    service = Service(tmp_path / "config", calls)
    service.install("day", {"CTX": "fast"})
    service.write_profile("night", {"CTX": "long"})
    service.use("night")
    assert calls.calls[-1] == ["restart", "soloist.service"] and service.current() == "night"
    assert service.profiles() == ["day", "night"]
    with pytest.raises(SettingError, match="known: day, night"):
        service.use("noon")
    (service.directory / "broken.env").write_text("CTX=middling\n")
    with pytest.raises(SettingError, match="CTX"):
        service.use("broken")
    assert service.current() == "night" and len(calls.calls) == 4


def test_status_and_uninstall(tmp_path):
    shown = "ActiveState=active\nSubState=running\nMainPID=77\nNRestarts=1\nResult=success\n"
    service = Service(tmp_path / "config", Systemctl(shown))
    with pytest.raises(SettingError, match="not installed"):
        service.status()
    service.install("default", {})
    assert service.status() == {
        "profile": "default",
        "ActiveState": "active",
        "SubState": "running",
        "MainPID": "77",
        "NRestarts": "1",
        "Result": "success",
    }
    service.uninstall()
    assert not service.unit_file.exists() and service.profiles() == ["default"]
    with pytest.raises(SettingError, match="not installed"):
        service.uninstall()


def test_an_environment_without_the_command_is_refused(tmp_path, executable):
    executable.unlink()
    with pytest.raises(SettingError, match="not installed in this environment"):
        Service(tmp_path / "config", Systemctl()).install("default", {})


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed")
@pytest.mark.parametrize("folder", ["plain", "with space", "50%"])
def test_systemd_accepts_the_unit(tmp_path, folder):
    directory = tmp_path / folder / "soloist"
    directory.mkdir(parents=True)
    (directory / "current.env").write_text("")
    program = tmp_path / folder / "bin soloist"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    unit = tmp_path / "soloist.service"
    unit.write_text(render(str(program), directory))
    done = subprocess.run(
        ["systemd-analyze", "verify", "--user", "--man=no", str(unit)],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "XDG_RUNTIME_DIR": str(tmp_path), "HOME": str(tmp_path)},
    )
    assert done.returncode == 0 and "soloist.service" not in done.stderr, done.stderr


def test_systemd_would_refuse_a_broken_unit(tmp_path):
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd-analyze is not installed")
    unit = tmp_path / "soloist.service"
    unit.write_text("[Service]\nExecStart=relative/path\nRestart=sometimes\n")
    done = subprocess.run(
        ["systemd-analyze", "verify", "--user", "--man=no", str(unit)],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "XDG_RUNTIME_DIR": str(tmp_path), "HOME": str(tmp_path)},
    )
    assert done.returncode != 0 or "soloist.service" in done.stderr


def test_quoting():
    assert quoted("/a/b") == "/a/b" and quoted("/a b") == '"/a b"' and quoted("/50%$x") == '"/50%%$$x"'


def waited(readings: list[card.Reading | None], limit: float = 30.0) -> tuple[str, int]:
    """The sentence and how many readings it took, with a clock that only sleeping moves."""
    now, taken = [0.0], []

    def read() -> card.Reading | None:
        taken.append(1)
        return readings[min(len(taken), len(readings)) - 1]

    def sleep(seconds: float) -> None:
        now[0] += seconds

    return card.wait_until_free(limit, read, sleep, lambda: now[0]), len(taken)


def test_waiting_ends_once_memory_stands_still():
    said, taken = waited([(4000.0, []), (9000.0, []), (20000.0, []), (23000.0, [])])
    assert "the card is free: 23000 MiB" in said and taken == 4 + card.STEADY_POLLS


def test_a_soloist_on_the_card_is_waited_for():
    said, taken = waited([(4000.0, ["soloist"])] * 10 + [(23000.0, ["Xorg"])])
    assert "free: 23000" in said and taken > 10
    said, _ = waited([(4000.0, ["soloist"])], limit=5.0)
    assert "gave up" in said and "Soloist still holds it" in said


def test_programs_are_known_by_their_command_line(monkeypatch):
    answers = {"--query-gpu=memory.free": ["100", "[N/A]", "50"], "--query-compute-apps=pid": [str(os.getpid()), "1 x"]}
    monkeypatch.setattr(card, "_query", answers.get)
    reading = card.read_card()
    assert reading is not None and reading[0] == 150.0
    own = Path("/proc/self/cmdline").read_bytes().split(b"\0")[0].decode()
    assert own in reading[1][0] and reading[1][1] == ""


def test_without_a_card_there_is_nothing_to_wait_for(monkeypatch):
    monkeypatch.setattr(card, "_query", lambda _: None)
    assert card.wait_until_free(5.0) == "no card to wait for"
