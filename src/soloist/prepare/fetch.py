"""`soloist fetch`: model and drafter from the Hugging Face Hub or from a local mirror of the same layout.

Files are listed with their sizes first; the disk is checked; what is there already is not fetched again. A
repository is collected in `DIR.partial` and renamed when every size agrees, so a directory that exists is complete.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any, Protocol

from soloist.errors import CapacityError, CheckpointError, UserError
from soloist.progress import Progress, silent

WANTED = (".safetensors", ".json", ".jinja", ".txt", ".md", ".model")
EXACT = ("LICENSE", "NOTICE", "mtp_draft_vocab_ids.pt")
CHUNK = 16 << 20


@dataclass(frozen=True)
class RemoteFile:
    """A file of a repository: its name there, its size in bytes, and its SHA-256 where the origin knows it."""

    name: str
    size: int
    sha256: str | None = None


class Origin(Protocol):
    """Where repositories come from."""

    def list(self, repo: str, revision: str | None) -> Sequence[RemoteFile]:
        """Files with sizes. Raises UserError if there is no such repository."""

    def get(self, repo: str, revision: str | None, file: RemoteFile, into: Path) -> None:
        """Put the file at `into / file.name`, going on with a part that is there."""


@dataclass(frozen=True)
class Mirror:
    """A directory that holds repositories as `OWNER/NAME/`: a disk, a share, an offline cache."""

    root: Path

    def _directory(self, repo: str) -> Path:
        directory = self.root / repo
        if not directory.is_dir():
            raise UserError(f"{self.root} has no {repo}.", "Check --from: repositories lie in it as OWNER/NAME.")
        return directory

    def list(self, repo: str, revision: str | None) -> Sequence[RemoteFile]:
        directory = self._directory(repo)
        return [RemoteFile(path.name, path.stat().st_size) for path in sorted(directory.iterdir()) if path.is_file()]

    def get(self, repo: str, revision: str | None, file: RemoteFile, into: Path) -> None:
        part = into / f"{file.name}.part"
        with (self._directory(repo) / file.name).open("rb") as source, part.open("ab") as target:
            source.seek(target.tell())
            shutil.copyfileobj(source, target, CHUNK)
        part.rename(into / file.name)


@dataclass(frozen=True)
class Hub:
    """The Hugging Face Hub through its own client.

    The client's own download of a file starts afresh after a kill, so its transfer function is given a part to append
    to. A part is continued only where the Hub states the file's hash, and the whole is checked against it.
    """

    def list(self, repo: str, revision: str | None) -> Sequence[RemoteFile]:
        from huggingface_hub import HfApi

        info = self._ask(repo, lambda: HfApi().model_info(repo, revision=revision, files_metadata=True))
        return [
            RemoteFile(file.rfilename, file.size or 0, getattr(getattr(file, "lfs", None), "sha256", None))
            for file in info.siblings or ()
        ]

    def get(self, repo: str, revision: str | None, file: RemoteFile, into: Path) -> None:
        from huggingface_hub import hf_hub_url
        from huggingface_hub.file_download import http_get
        from huggingface_hub.utils import build_hf_headers

        part = into / f"{file.name}.{(file.sha256 or 'whole')[:12]}.part"
        if file.sha256 is None:
            part.unlink(missing_ok=True)
        url = hf_hub_url(repo, file.name, revision=revision)
        with part.open("ab") as target:
            here = target.tell()
            self._ask(
                repo,
                lambda: http_get(
                    url, target, resume_size=here, headers=build_hf_headers(), expected_size=file.size or None
                ),
            )
        if file.sha256 is not None and _sha256(part) != file.sha256:
            part.unlink()
            raise CheckpointError(f"{repo}: {file.name} arrived with another hash.", "Run the same command again.")
        part.rename(into / file.name)

    @staticmethod
    def _ask(repo: str, call: Callable[[], Any]) -> Any:
        from huggingface_hub.errors import HfHubHTTPError

        try:
            return call()
        except HfHubHTTPError as error:
            status = getattr(error.response, "status_code", "with an error")
            remedy = "Check the name and revision; private repositories need `hf auth login`."
            raise UserError(f"The Hub answered {status} for {repo}.", remedy) from None
        except Exception as error:
            # The client's transport errors come from whichever httpx it is built on.
            if not isinstance(error, OSError) and not type(error).__module__.startswith("httpx"):
                raise
            raise UserError(
                f"The Hugging Face Hub cannot be reached for {repo} ({type(error).__name__}).",
                "Check the network, or give --from DIR with a local copy.",
            ) from None


@dataclass(frozen=True)
class Item:
    """One repository to fetch, where to, and what of it is still missing."""

    role: str
    repo: str
    revision: str | None
    directory: Path
    files: tuple[RemoteFile, ...]
    missing: tuple[RemoteFile, ...]

    @property
    def nbytes(self) -> int:
        return sum(file.size for file in self.files)

    @property
    def bytes_missing(self) -> int:
        return sum(file.size for file in self.missing)


def recipes() -> dict[str, dict[str, Any]]:
    """The known recipes by name (prepare/recipes.json)."""
    table: dict[str, dict[str, Any]] = json.loads(
        resources.files("soloist.prepare").joinpath("recipes.json").read_text(encoding="utf-8")
    )
    return table


def resolve(name: str, revision: str | None, drafter: bool) -> dict[str, tuple[str, str | None]]:
    """A recipe's name or OWNER/NAME -> role -> (repository, revision). Raises UserError listing the recipes."""
    known = recipes()
    if name in known:
        roles = {role: known[name][role] for role in ("target", "drafter") if role in known[name]}
        if not drafter and "target" in roles:
            roles.pop("drafter", None)
        return {role: (spec["repo"], revision or spec.get("revision")) for role, spec in roles.items()}
    if name.count("/") == 1 and not name.startswith((".", "/")):
        return {"target": (name, revision)}
    raise UserError(f"{name} is no known recipe.", f"Give OWNER/NAME or one of: {', '.join(known)}.")


def _wanted(file: RemoteFile) -> bool:
    plain = "/" not in file.name and not file.name.startswith(".")
    return plain and (file.name.endswith(WANTED) or file.name in EXACT)


def plan(roles: Mapping[str, tuple[str, str | None]], origin: Origin, into: Path) -> list[Item]:
    """List every repository and compare with what is on disk. Raises UserError for one without weights."""
    items = []
    for role, (repo, revision) in roles.items():
        files = tuple(file for file in origin.list(repo, revision) if _wanted(file))
        if not any(file.name.endswith(".safetensors") for file in files):
            raise UserError(f"{repo} has no safetensors weights.", "Choose a repository in safetensors form.")
        directory = into / repo
        held = directory if directory.is_dir() else partial(directory)
        missing = tuple(file for file in files if not _complete(held / file.name, file))
        items.append(Item(role, repo, revision, directory, files, missing))
    return items


def _sha256(path: Path) -> str:
    with path.open("rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()


def partial(directory: Path) -> Path:
    return directory.with_name(directory.name + ".partial")


def _complete(path: Path, file: RemoteFile) -> bool:
    return path.is_file() and path.stat().st_size == file.size


def check_space(items: Sequence[Item], into: Path) -> None:
    """Raises CapacityError with both numbers if the disk cannot hold what is missing."""
    need = sum(item.bytes_missing for item in items)
    parent = into
    while not parent.exists():
        parent = parent.parent
    free = shutil.disk_usage(parent).free
    if need > free:
        raise CapacityError(
            f"{into} needs {need / 1e9:.1f} GB more, {free / 1e9:.1f} GB are free.", "Free space or choose --into."
        )


def fetch(items: Sequence[Item], origin: Origin, into: Path, progress: Progress = silent) -> list[Path]:
    """Fetch what is missing and return the directories. Raises UserError, CapacityError or CheckpointError."""
    check_space(items, into)
    total = sum(item.bytes_missing for item in items) >> 20
    done = 0
    for item in items:
        if not item.missing:
            if not item.directory.is_dir():
                partial(item.directory).rename(item.directory)
            continue
        repair = item.directory.is_dir()
        work = item.directory if repair else partial(item.directory)
        work.mkdir(parents=True, exist_ok=True)
        for file in item.missing:
            progress(f"{item.repo}: {file.name}", done >> 20, total)
            (work / file.name).unlink(missing_ok=True)
            origin.get(item.repo, item.revision, file, work)
            if not _complete(work / file.name, file):
                size = (work / file.name).stat().st_size
                raise CheckpointError(
                    f"{work / file.name} has {size} bytes instead of {file.size}.", "Run the same command again."
                )
            done += file.size
        for part in work.glob("*.part"):  # of another revision
            part.unlink()
        if not repair:
            work.rename(item.directory)
    progress("complete", total, total)
    return [item.directory for item in items]


def next_steps(name: str, directories: Mapping[str, Path]) -> list[str]:
    """The commands a recipe names after fetching, with the directories filled in."""
    return [line.format(**{role: str(path) for role, path in directories.items()}) for line in recipes()[name]["then"]]
