"""Compile a card's kernels side by side while its weights are read.

Kernels are compiled at their first launch, one after the other, which is most of a first start. So a process beside
this one plays the start on a card that is not there (`rehearsal.py`) and compiles what was asked for on all cores, into
the caches where the launches look. What it made is noted; where every file of the note is still there, the next start
needs no such process.

What can go wrong is said in the log and costs time only: a kernel that is not there is compiled at its first launch.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import pickle
import subprocess
import sys
import tempfile
import time
import weakref
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from soloist.checkpoint.reader import Checkpoint
from soloist.cores import usable_cores
from soloist.engine.capacity import host_room
from soloist.engine.selfcheck import user_cache
from soloist.ops.numerics import code_digest
from soloist.ops.rehearsal import Card
from soloist.settings import KNOBS, Settings

log = logging.getLogger("soloist.kernels")

PATIENCE_S = 240.0
SAID = 5  # kernels of which the log says what went wrong: often it is the same for all
WORKER_BYTES = 1 << 30  # of host memory that a compiler may take; the weights are read through the same memory
# Knobs that decide which kernels there are; where one were missing, its kernels would be compiled at their launch.
DECISIVE = (
    "ctx", "dflash_tokens", "draft_tokens", "drafter", "dtype", "kv_format", "kv_format_v", "linear", "max_seqs",
    "mtp_draft_vocab", "spec", "state_dtype", "tree", "verify_rows", "vision",
)  # fmt: skip


@dataclass(frozen=True)
class Order:
    """What a rehearsal (`rehearsal.py`) is told: the engine, the card, and where CUDA C++ kernels are kept."""

    settings: Settings
    card: Card
    workers: int
    kernels: Path
    parent: int  # process id of the start, with which a rehearsal ends


def cubins() -> Path:
    """Where compiled CUDA C++ kernels are kept; Triton keeps its own."""
    return user_cache() / "kernels"


def compile_ahead(settings: Settings, checkpoint: Checkpoint, device: torch.device) -> CompileAhead:
    """Begin; the first launch should wait for the end."""
    card = Card.of(device)
    note = user_cache() / f"kernels-{_key(settings, checkpoint, card)}.json"
    return CompileAhead(settings, card, note)


def _key(settings: Settings, checkpoint: Checkpoint, card: Card) -> str:
    import triton

    knobs = {name: KNOBS[name].show(getattr(settings, name)) for name in DECISIVE}
    variables = {n: v for n, v in os.environ.items() if n.startswith("TRITON")}
    everything = [
        code_digest(), torch.__version__, triton.__version__, repr(card), checkpoint.fingerprint(), knobs, variables,
        str(cubins()),
    ]  # fmt: skip
    return hashlib.sha256(json.dumps(everything, sort_keys=True).encode()).hexdigest()[:16]


class CompileAhead:
    """The process at work, if one was needed."""

    def __init__(self, settings: Settings, card: Card, note: Path) -> None:
        self._note, self._began = note, time.perf_counter()
        self._process: subprocess.Popen[bytes] | None = None
        if _all_there(note):
            log.info("kernels: all known")
            return
        plain = replace(settings, origins=dict(settings.origins))  # the read-only view cannot be sent
        workers = max(1, min(usable_cores(), host_room() // WORKER_BYTES))
        order = Order(plain, card, workers, cubins(), os.getpid())
        # The card is the parent's.
        environment = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
        # -P: like the start itself, import nothing from the directory it was called in.
        command = [sys.executable, "-P", "-m", "soloist.engine.rehearsal"]
        try:
            # Files, not pipes: nobody reads before the end, and a full pipe would be waited for.
            self._said, self._complained = tempfile.TemporaryFile(), tempfile.TemporaryFile()  # noqa: SIM115
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=self._said, stderr=self._complained, env=environment
            )
            # Where the start fails, or goes on without waiting longer, nobody is left to want kernels.
            weakref.finalize(self, self._process.kill)
            assert self._process.stdin is not None
            self._process.stdin.write(pickle.dumps(order))
            self._process.stdin.close()
        except OSError as error:
            log.warning("kernels cannot be compiled side by side: %s", error)

    def wait(self) -> None:
        """Return when the kernels are compiled, or when that is not to be expected any more."""
        if self._process is None:
            return
        with self._said, self._complained:
            self._hear(self._process)

    def _hear(self, process: subprocess.Popen[bytes]) -> None:
        waited = time.perf_counter()
        try:
            code = process.wait(PATIENCE_S)
        except subprocess.TimeoutExpired:
            log.warning("kernels: not compiled in %.0f s; what is missing is compiled as it is launched", PATIENCE_S)
            return
        self._said.seek(0), self._complained.seek(0)
        lines = [x for x in self._said.read().decode(errors="replace").splitlines() if x.startswith("{")]
        if code or not lines:
            complaint = self._complained.read().decode(errors="replace").strip()[-2000:]
            log.warning("kernels: not compiled side by side: %s", complaint or f"exit code {code}")
            return
        said = json.loads(lines[-1])
        kernels = said["kernels"]
        failed = [k for k in kernels if k["error"]]
        now = time.perf_counter()
        log.info(
            "kernels: %d variants, %d compiled in %.1f s beside the weights, of which the start waited %.1f s",
            len(kernels), sum(not k["known"] for k in kernels), now - self._began, now - waited,
        )  # fmt: skip
        for kernel in failed[:SAID]:
            log.warning("kernel %s: %s", kernel["name"], kernel["error"])
        if len(failed) > SAID:
            log.warning("kernels: %d more could not be compiled", len(failed) - SAID)
        if not failed:
            _write(self._note, [file for k in kernels for file in k["files"]])


def _all_there(note: Path) -> bool:
    try:
        files = json.loads(note.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(files, list) and bool(files) and all(os.path.exists(str(file)) for file in files)


def _write(note: Path, files: list[str]) -> None:
    try:
        note.parent.mkdir(parents=True, exist_ok=True)
        note.write_text(json.dumps(files), encoding="utf-8")
    except OSError as error:
        log.info("the list of compiled kernels could not be kept: %s", error)
