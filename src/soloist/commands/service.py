"""soloist service: run as a systemd user service, with profiles to switch between."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from soloist.errors import SettingError

app = typer.Typer(
    no_args_is_help=True, add_completion=False, help="Run as a systemd user service, with profiles to switch between."
)
LINGER = "To start at boot without logging in: loginctl enable-linger"


@app.command()
def install(
    knobs: Annotated[list[str] | None, typer.Argument(help="Knobs as KNOB=value, such as MODEL=~/models/qwen.")] = None,
    profile: Annotated[str, typer.Option(help="Name of the profile these knobs make.")] = "default",
    env_file: Annotated[Path | None, typer.Option(help="Take knobs from this file too, such as .env.")] = None,
    start: Annotated[bool, typer.Option("--start/--no-start", help="Start it now.")] = True,
) -> None:
    """Write the unit and a profile, enable and start the service."""
    from soloist.service.manage import Service, read_profile

    given: dict[str, str] = {}
    if env_file is not None:
        if not env_file.is_file():
            raise SettingError(f"{env_file} does not exist.", "Give a file of KNOB=value lines.")
        given |= {k: v for k, v in read_profile(env_file).items() if v is not None}
    given |= _pairs(knobs or [])
    for sentence in Service().install(profile, given, start=start):
        print(sentence)
    print(LINGER)


@app.command()
def use(profile: Annotated[str, typer.Argument(help="Name of a profile.")]) -> None:
    """Switch to another profile: the running server ends, the card is waited for, the new one starts."""
    from soloist.service.manage import Service

    Service().use(profile)
    print(f"profile {profile} is in use")


@app.command()
def status() -> None:
    """What runs, with which profile."""
    from soloist.service.manage import Service

    service = Service()
    found = service.status()
    for name, value in found.items():
        print(f"{name:<12} {value}")
    others = [p for p in service.profiles() if p != found["profile"]]
    if others:
        print(f"{'others':<12} {', '.join(others)}")
    raise typer.Exit(0 if found["ActiveState"] == "active" else 3)


@app.command()
def uninstall() -> None:
    """Stop and remove the service; profiles are kept."""
    from soloist.service.manage import Service

    for sentence in Service().uninstall():
        print(sentence)


@app.command()
def ready(
    path: Annotated[str, typer.Option(help="What to ask; /ready is Soloist's, vLLM has /health.")] = "/ready",
) -> None:
    """Exit 0 when the server on PORT admits requests, 1 when not: the containers' health check."""
    import urllib.error
    import urllib.request

    from soloist.settings import from_process

    try:
        urllib.request.urlopen(f"http://127.0.0.1:{from_process().port}{path}", timeout=4).close()
    except (OSError, urllib.error.HTTPError):
        raise typer.Exit(1) from None


@app.command("wait-card", hidden=True)
def wait_card(limit: Annotated[float, typer.Option(help="Give up after this many seconds.")] = 60.0) -> None:
    """Return once the card is really free; the unit runs this before the server."""
    from soloist.service.card import wait_until_free

    print(f"soloist: {wait_until_free(limit)}", file=sys.stderr)


def _pairs(texts: list[str]) -> dict[str, str]:
    pairs = {}
    for text in texts:
        name, sign, value = text.partition("=")
        if not sign or not name:
            raise SettingError(f"{text!r} is not KNOB=value.", "Write it like MODEL=~/models/qwen.")
        pairs[name] = value
    return pairs
