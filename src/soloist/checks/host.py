"""Around the model: knobs, port, keys, disk, sessions, file limits."""

from __future__ import annotations

import errno
import ipaddress
import os
import resource
import shutil
import socket
import tempfile
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

from soloist.checks.base import Subject, Verdict, check, fail, ok, verdict, warn
from soloist.checks.model import size_text

SCARCE = 2 * 2**30
NONE_LEFT = 64 * 2**20
FEWEST_FILES = 1024


@check(
    "settings",
    "Knobs",
    "Knobs come from flags, the environment and `.env`; a name or value that is not known is refused with the nearest "
    "valid one, and so are combinations that exclude each other.",
    fine=ok("{given} of {all} knobs are set ({names})"),
    defaults=ok("all {all} knobs have their defaults"),
    broken=fail("{message}", "{remedy}"),
    note=warn("{message}", "Correct the name, or ignore this if another program needs it."),
)
def settings(subject: Subject) -> Iterator[Verdict]:
    fault = subject.settings_fault
    if fault is not None:
        yield verdict("broken", message=fault.message, remedy=fault.remedy or "`soloist knobs` lists the knobs.")
        return
    from soloist.settings import KNOBS

    given = [k.env for k in KNOBS.values() if subject.settings.given(k.name)]
    yield verdict("fine" if given else "defaults", given=len(given), all=len(KNOBS), names=", ".join(given))
    for note in subject.settings.notes:
        yield verdict("note", message=note)


@check(
    "port",
    "Port",
    "The server listens on HOST and PORT; another program on that port keeps it from starting.",
    free=ok("{host}:{port} is free"),
    soloist=ok("a Soloist server answers on {host}:{port}; `soloist doctor --server` looks at it"),
    taken=fail("Port {port} on {host} is taken by another program.", "Stop it (`ss -ltnp`), or choose another PORT."),
    address=fail("Cannot listen on {host}:{port} ({reason}).", "Choose another HOST or PORT."),
)
def port(subject: Subject) -> Iterator[Verdict]:
    host, number = subject.settings.host, subject.settings.port
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as trial:
        trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            trial.bind((host, number))
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                yield verdict("address", host=host, port=number, reason=error.strerror)
                return
            ours = _is_soloist("127.0.0.1" if host in ("0.0.0.0", "::") else host, number)
            yield verdict("soloist" if ours else "taken", host=host, port=number)
            return
    yield verdict("free", host=host, port=number)


def _is_soloist(host: str, number: int) -> bool:
    """Does a server of ours answer there? `/ready` is a path of ours alone."""
    shown = f"[{host}]" if ":" in host else host
    try:
        with urllib.request.urlopen(f"http://{shown}:{number}/ready", timeout=2) as reply:
            return b'"ready"' in reply.read(4096)
    except urllib.error.HTTPError as error:
        return error.code == 503 and b'"ready"' in error.read(4096)
    except (OSError, ValueError):
        return False


@check(
    "keys",
    "API key",
    "Without API_KEY anyone who reaches the port can use the model.",
    fine=ok("{text}"),
    open=warn("HOST={host} is reachable from other machines and no API_KEY is set.", "Set API_KEY, or HOST=127.0.0.1."),
)
def keys(subject: Subject) -> Iterator[Verdict]:
    settings = subject.settings
    if settings.api_key:
        yield verdict("fine", text=f"{len(settings.api_key)} set")
    elif _loopback(settings.host):
        yield verdict("fine", text="none needed on a loopback address")
    else:
        yield verdict("open", host=settings.host)


def _loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


@check(
    "sessions",
    "Session directory",
    "Prefix snapshots of conversations are kept on disk, so that a conversation is warm after a restart.",
    fine=ok("{directory}, {free} free"),
    off=ok("sessions are not kept"),
    unwritable=fail(
        "The session directory {directory} cannot be written ({reason}).", "Fix its permissions, or SESSION_DIR."
    ),
    scarce=warn(
        "{free} free at {directory}, less than SESSION_CACHE_GB={cap:g}.", "Free space, or lower SESSION_CACHE_GB."
    ),
    full=fail("No space is left at {directory} ({free} free).", "Free space, or choose another SESSION_DIR."),
)
def sessions(subject: Subject) -> Iterator[Verdict]:
    directory = session_directory(subject)
    if directory is None:
        yield verdict("off")
        return
    there = nearest(directory)
    reason = unwritable(there)
    if reason == os.strerror(errno.ENOSPC):
        yield verdict("full", directory=directory, free=size_text(0))
        return
    if reason:
        yield verdict("unwritable", directory=directory, reason=reason)
        return
    free, cap = shutil.disk_usage(there).free, float(subject.settings.session_cache_gb)
    outcome = "full" if free < NONE_LEFT else "scarce" if free < cap * 2**30 else "fine"
    yield verdict(outcome, directory=directory, free=size_text(free), cap=cap)


def session_directory(subject: Subject) -> Path | None:
    """Where the engine would keep sessions, or None when they are off."""
    from soloist.engine.caching import session_directory as chosen

    return chosen(subject.settings)


def nearest(path: Path) -> Path:
    """The path, or its nearest parent that exists."""
    while not path.exists() and path != path.parent:
        path = path.parent
    return path


def unwritable(directory: Path) -> str | None:
    """Why a file cannot be written there, or None. Tries with a file of one block."""
    if not directory.is_dir():
        return "it is not a directory"
    try:
        with tempfile.TemporaryFile(dir=directory) as trial:
            trial.write(bytes(4096))
            trial.flush()
    except OSError as error:
        return error.strerror or str(error)
    return None


@check(
    "disk",
    "Disk of the model",
    "Preparing a checkpoint writes a second one beside it; a full disk ends that, and logs, with half-written files.",
    fine=ok("{free} free at {directory}"),
    scarce=warn("Only {free} free at {directory}.", "Free space before `soloist quantize` or `soloist fetch`."),
    full=fail("The disk of {directory} is full ({free} free).", "Free space: nothing can be written there."),
)
def disk(subject: Subject) -> Iterator[Verdict]:
    directory = nearest(subject.model_directory)
    free = shutil.disk_usage(directory).free
    outcome = "full" if free < NONE_LEFT else "scarce" if free < SCARCE else "fine"
    yield verdict(outcome, free=size_text(free), directory=directory)


@check(
    "files",
    "Open files",
    "Each connection is an open file.",
    fine=ok("limit {limit}"),
    few=warn("Only {limit} open files are allowed.", "Raise the limit: ulimit -n 4096."),
)
def files(_: Subject) -> Iterator[Verdict]:
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    few = limit != resource.RLIM_INFINITY and limit < FEWEST_FILES
    yield verdict("few" if few else "fine", limit=limit)
