"""soloist sessions: what is kept on disk, and whether it is whole."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from soloist.errors import CheckpointError, SettingError
from soloist.settings import from_process

if TYPE_CHECKING:
    from soloist.cache.segments import Segment

app = typer.Typer(add_completion=False, no_args_is_help=True, help="List, remove and verify saved sessions.")

Directory = Annotated[Path | None, typer.Option("--session-dir", help="Default: the SESSION_DIR knob.")]


def _directory(given: Path | None) -> Path:
    if given is not None:
        return given.expanduser()
    from soloist.engine.caching import DEFAULT_DIRECTORY, session_directory

    return session_directory(from_process()) or DEFAULT_DIRECTORY.expanduser()


def _read(directory: Path) -> tuple[list[Segment], list[str]]:
    """Readable files of any model, and one line per file that is not."""
    from soloist.cache.prefix import SessionError
    from soloist.cache.segments import SUFFIX, open_segment

    segments, faults = [], []
    for path in sorted(directory.glob(f"*{SUFFIX}")):
        try:
            segments.append(open_segment(path, None))
        except SessionError as error:
            faults.append(str(error))
    return segments, faults


def _leaves(segments: list[Segment]) -> list[Segment]:
    """Files no other file continues: one per saved conversation, newest first."""
    parents = {segment.parent for segment in segments}
    ends = [s for s in segments if not parents & set(s.digests)]
    return sorted(ends, key=lambda segment: -segment.used)


def _name(segment: Segment) -> str:
    return segment.path.name[:12]


@app.command("ls")
def list_(session_dir: Directory = None) -> None:
    """Conversations on disk, newest first."""
    from rich.console import Console
    from rich.table import Table

    directory = _directory(session_dir)
    segments, faults = _read(directory)
    table = Table("session", "tokens", "own MiB", "last used", box=None, pad_edge=False, header_style="bold")
    for leaf in _leaves(segments):
        used = time.strftime("%Y-%m-%d %H:%M", time.localtime(leaf.used))
        table.add_row(_name(leaf), f"{leaf.end:,}", f"{leaf.nbytes / 2**20:.1f}", used)
    console = Console()
    console.print(table)
    total = sum(segment.nbytes for segment in segments)
    console.print(f"{len(segments)} files, {total / 2**30:.2f} GiB in {directory}")
    for fault in faults:
        console.print(fault)


@app.command()
def rm(
    names: Annotated[list[str] | None, typer.Argument(help="Sessions as `ls` prints them.")] = None,
    everything: Annotated[bool, typer.Option("--all", help="Remove every session, unreadable files too.")] = False,
    session_dir: Directory = None,
) -> None:
    """Remove conversations; what other conversations share with them stays."""
    from soloist.cache.segments import SUFFIX

    directory = _directory(session_dir)
    if everything == bool(names):
        raise SettingError("`soloist sessions rm` needs sessions to remove.", "Name some from `ls`, or pass --all.")
    if everything:
        doomed = list(directory.glob(f"*{SUFFIX}"))
    else:
        doomed = _chains(directory, names or [])
    for path in doomed:
        path.unlink(missing_ok=True)
    print(f"{len(doomed)} files removed from {directory}")


def _chains(directory: Path, names: list[str]) -> list[Path]:
    """Files of the named conversations that no other conversation needs."""
    segments, _ = _read(directory)
    leaves = {_name(leaf): leaf for leaf in _leaves(segments)}
    unknown = [name for name in names if name not in leaves]
    if unknown:
        raise SettingError(f"There is no session {unknown[0]} in {directory}.", "`soloist sessions ls` lists them.")
    gone: list[Segment] = []
    wanted = [leaves[name] for name in names]
    while wanted:
        segment = wanted.pop()
        gone.append(segment)
        left = [s for s in segments if s not in gone]
        needed = {s.parent for s in left}
        wanted += [s for s in left if segment.parent in s.digests and not needed & set(s.digests)]
    return [segment.path for segment in gone]


@app.command()
def verify(session_dir: Directory = None) -> None:
    """Read every byte of every file and check it; exit code 2 if a file is damaged."""
    from soloist.cache.prefix import SessionError
    from soloist.cache.segments import SUFFIX, verify_segment

    directory = _directory(session_dir)
    faults = 0
    paths = sorted(directory.glob(f"*{SUFFIX}"))
    for path in paths:
        try:
            verify_segment(path)
        except SessionError as error:
            faults += 1
            print(error)
    print(f"{len(paths) - faults} of {len(paths)} session files in {directory} are whole")
    if faults:
        raise CheckpointError(f"{faults} session files are damaged.", "Remove them: soloist sessions rm --all.")
