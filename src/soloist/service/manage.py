"""Installing, switching and removing the service.

Profiles are environment files in the configuration directory; `current.env` links to the one in use. Switching
relinks and restarts the one unit: the old process ends, the card is waited for, the new one starts.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from soloist.errors import SettingError
from soloist.service.unit import NAME, command, render
from soloist.settings import resolve

PROFILE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
CURRENT = "current"

Systemctl = Callable[[Sequence[str]], str]


def systemctl(arguments: Sequence[str]) -> str:
    """Run `systemctl --user`; returns its output. Raises SettingError with its message when it fails."""
    if shutil.which("systemctl") is None:
        raise SettingError("systemctl is not installed here.", "Use docker compose (deploy/), or run `soloist serve`.")
    done = subprocess.run(["systemctl", "--user", *arguments], capture_output=True, text=True, timeout=120)
    if done.returncode != 0:
        raise SettingError(
            f"systemctl --user {' '.join(arguments)}: {done.stderr.strip() or done.stdout.strip()}",
            "`journalctl --user -u soloist -n 50` shows the service's own words.",
        )
    return done.stdout


def config_home(environ: Mapping[str, str] = os.environ) -> Path:
    """XDG_CONFIG_HOME, or ~/.config."""
    given = environ.get("XDG_CONFIG_HOME", "")
    return Path(given) if given else Path(environ.get("HOME", "~")).expanduser() / ".config"


@dataclass(frozen=True)
class Service:
    """The service of one user. `run` calls systemctl."""

    home: Path = field(default_factory=config_home)
    run: Systemctl = systemctl

    @property
    def directory(self) -> Path:
        return self.home / "soloist"

    @property
    def unit_file(self) -> Path:
        return self.home / "systemd" / "user" / NAME

    @property
    def link(self) -> Path:
        return self.directory / f"{CURRENT}.env"

    def profiles(self) -> list[str]:
        return sorted(p.stem for p in self.directory.glob("*.env") if p.stem != CURRENT)

    def current(self) -> str | None:
        """The profile in use; None when there is none."""
        return Path(os.readlink(self.link)).stem if self.link.is_symlink() else None

    def write_profile(self, name: str, knobs: Mapping[str, str]) -> Path:
        """Check the knobs and write them as `NAME.env`, readable by the owner alone (it may hold keys)."""
        if not PROFILE.fullmatch(name) or name == CURRENT:
            raise SettingError(f"{name!r} is not a profile name.", "Use letters, digits, dots and dashes.")
        resolve({}, {}, knobs)
        for key, value in knobs.items():
            if "\n" in value:
                raise SettingError(f"{key} holds a line break.", "Write it in one line.")
        self.directory.mkdir(parents=True, exist_ok=True)
        path = self.directory / f"{name}.env"
        part = path.with_name(path.name + ".part")
        with open(part, "w", encoding="utf-8", opener=lambda p, flags: os.open(p, flags, 0o600)) as file:
            file.writelines(f'{key}="{_escaped(value)}"\n' for key, value in knobs.items())
        part.replace(path)
        return path

    def install(self, profile: str, knobs: Mapping[str, str], *, start: bool = True) -> list[str]:
        """Write profile and unit, enable and start. Returns what was done, one sentence each."""
        done = [f"wrote {self.write_profile(profile, knobs)}"]
        self._relink(profile)
        self.unit_file.parent.mkdir(parents=True, exist_ok=True)
        self.unit_file.write_text(render(command(), self.directory), encoding="utf-8")
        done.append(f"wrote {self.unit_file}")
        self.run(["daemon-reload"])
        self.run(["enable", NAME])
        if start:
            self.run(["restart", NAME])
        done.append(f"the service is enabled{' and started' if start else ''} with profile {profile}")
        return done

    def use(self, profile: str, *, restart: bool = True) -> None:
        """Switch to a profile. Raises SettingError for one that does not exist or whose knobs are wrong."""
        path = self.directory / f"{profile}.env"
        if profile == CURRENT or not path.is_file():
            known = ", ".join(self.profiles()) or "none yet"
            raise SettingError(
                f"There is no profile {profile!r} in {self.directory} (known: {known}).",
                f"Write {path} with one KNOB=value per line, or use `soloist service install --profile {profile}`.",
            )
        resolve({}, {}, read_profile(path))
        self._relink(profile)
        if restart:
            self.run(["restart", NAME])

    def status(self) -> dict[str, str]:
        """Profile and systemd's view: ActiveState, SubState, MainPID, NRestarts, Result."""
        if not self.unit_file.is_file():
            raise SettingError("The service is not installed.", "Run `soloist service install`.")
        names = ("ActiveState", "SubState", "MainPID", "NRestarts", "Result")
        shown = self.run(["show", NAME, "--property", ",".join(names)])
        pairs = dict(line.split("=", 1) for line in shown.splitlines() if "=" in line)
        return {"profile": self.current() or "none", **{n: pairs.get(n, "?") for n in names}}

    def uninstall(self) -> list[str]:
        """Stop, disable and remove the unit; profiles stay."""
        if not self.unit_file.is_file():
            raise SettingError("The service is not installed.", "There is nothing to remove.")
        self.run(["disable", "--now", NAME])
        self.unit_file.unlink()
        self.run(["daemon-reload"])
        return [f"removed {self.unit_file}", f"kept the profiles in {self.directory}"]

    def _relink(self, profile: str) -> None:
        part = self.directory / f".{CURRENT}.part"
        part.unlink(missing_ok=True)
        part.symlink_to(f"{profile}.env")
        part.replace(self.link)


def read_profile(path: Path) -> dict[str, str | None]:
    """The knobs of a profile file."""
    from soloist.settings import read_dotenv

    return read_dotenv(path)


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"')
