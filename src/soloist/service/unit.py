"""The unit file. Everything a profile may change is in its environment file, so the unit is written once."""

from __future__ import annotations

import sys
from pathlib import Path

from soloist.errors import SettingError

NAME = "soloist.service"
STOP_S = 45  # the server drains for at most 30 s


def command() -> str:
    """The `soloist` command beside this Python, for ExecStart. Raises SettingError when it is not installed."""
    found = Path(sys.executable).with_name("soloist")
    if not found.is_file():
        raise SettingError(
            f"{found} does not exist: Soloist is not installed in this environment.",
            "Run `make setup` and use its soloist.",
        )
    return str(found)


def render(executable: str, directory: Path) -> str:
    """The unit's text. `directory` holds the profiles and the link to the one in use.

    Exit code 2 means that the user has to mend something, so the service stays down then; any other failure, such as
    a device fault, starts it again.
    """
    run = quoted(executable)
    return f"""[Unit]
Description=Soloist, OpenAI-compatible server
After=network-online.target
StartLimitIntervalSec=600
StartLimitBurst=5

[Service]
Type=exec
WorkingDirectory={escaped(str(directory))}
EnvironmentFile={escaped(str(directory / "current.env"))}
ExecStartPre={run} service wait-card
ExecStart={run} serve
Restart=on-failure
RestartSec=3
RestartPreventExitStatus=2
TimeoutStartSec=900
TimeoutStopSec={STOP_S}
StandardOutput=journal
StandardError=journal
SyslogIdentifier=soloist
NoNewPrivileges=yes

[Install]
WantedBy=default.target
"""


def escaped(text: str) -> str:
    """A path for a unit file: `%` starts a specifier there."""
    return text.replace("%", "%%")


def quoted(text: str) -> str:
    """A path for a command line of a unit file."""
    plain = escaped(text).replace("\\", "\\\\").replace('"', '\\"').replace("$", "$$")
    return f'"{plain}"' if plain != text or any(c.isspace() for c in text) else text
