"""Python, the packages Soloist needs, and whether torch fits this machine."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from importlib import metadata, util

from soloist import toolchain
from soloist.checks.base import Subject, Verdict, check, fail, ok, verdict, warn
from soloist.checks.card import cards

NEWEST_UNSUPPORTED = (3, 10)


@check(
    "python",
    "Python",
    "Soloist needs Python 3.11 or newer.",
    fine=ok("Python {version}"),
    old=fail("Python {version} is too old.", "Use Python 3.11 or newer; `make setup` looks for one."),
)
def python(_: Subject) -> Iterator[Verdict]:
    version = ".".join(map(str, sys.version_info[:3]))
    yield verdict("old" if sys.version_info[:2] <= NEWEST_UNSUPPORTED else "fine", version=version)


@check(
    "packages",
    "Packages",
    "Every package that `pyproject.toml` requires is installed in a version it allows.",
    fine=ok("{count} required packages are there"),
    missing=fail("The package {name} is not installed.", "Run `make setup`, or: pip install '{requirement}'."),
    old=fail("{name} is {version}; {requirement} is required.", "Run `make setup`, or: pip install '{requirement}'."),
    source=warn(
        "Soloist runs from a source tree that is not installed; its requirements cannot be checked.",
        "Run `make setup`.",
    ),
)
def packages(_: Subject) -> Iterator[Verdict]:
    try:
        required = metadata.requires("soloist") or []
    except metadata.PackageNotFoundError:
        yield verdict("source")
        return
    bad = list(_unmet([r for r in required if "extra ==" not in r]))
    yield from bad or [verdict("fine", count=sum("extra ==" not in r for r in required))]


def _unmet(required: list[str]) -> Iterator[Verdict]:
    for text in required:
        plain = text.split(";")[0].strip()
        name = re.split(r"[<>=!~ \[(]", plain, maxsplit=1)[0]
        try:
            version = metadata.version(name)
        except metadata.PackageNotFoundError:
            yield verdict("missing", name=name, requirement=plain)
            continue
        least = re.search(r">=\s*([0-9][0-9.]*)", plain)
        if least and _numbers(version) < _numbers(least[1]):
            yield verdict("old", name=name, version=version, requirement=plain)


def _numbers(version: str) -> tuple[int, ...]:
    """The leading numbers of a version; `2.13.0+cpu` is (2, 13, 0)."""
    found = re.match(r"\d+(?:\.\d+)*", version)
    return tuple(int(n) for n in found[0].split(".")) if found else ()


@check(
    "torch",
    "torch and triton",
    "On a machine with an NVIDIA card torch must be a CUDA build whose CUDA the driver can run, with triton beside it.",
    cpu=ok("torch {version} for the CPU; this machine shows no NVIDIA card"),
    cuda=ok("torch {version} for CUDA {cuda}, triton {triton}"),
    missing=fail("torch is not installed.", "Run `make setup`."),
    cpu_build=warn(
        "torch {version} is a CPU build, but this machine has an NVIDIA card; the card will not be used.",
        "Install a CUDA build of torch, then: pip install 'soloist[gpu]'.",
    ),
    no_triton=fail("torch {version} is a CUDA build; triton is missing.", "Install it: pip install 'soloist[gpu]'."),
    no_device=fail(
        "torch {version} (CUDA {cuda}) sees no card although the driver lists one.",
        "Update the driver so that it supports CUDA {cuda}, or install torch for an older CUDA.",
    ),
)
def torch_build(subject: Subject) -> Iterator[Verdict]:
    if util.find_spec("torch") is None:
        yield verdict("missing")
        return
    import torch

    card = subject.run_tool(["nvidia-smi", "-L"])
    triton = metadata.version("triton") if util.find_spec("triton") else None
    values = {"version": torch.__version__, "cuda": torch.version.cuda, "triton": triton}
    if not card:
        yield verdict("cpu", **values)
    elif torch.version.cuda is None:
        yield verdict("cpu_build", **values)
    elif triton is None:
        yield verdict("no_triton", **values)
    else:
        yield verdict("cuda" if torch.cuda.is_available() else "no_device", **values)


@check(
    "compiler",
    "C compiler",
    "Triton compiles the stubs that launch its kernels with the machine's C compiler, once, and keeps them. No CUDA "
    "toolkit is needed.",
    fine=ok("a C compiler and Python's headers are there"),
    none=ok("no card, so none is needed"),
    missing=fail("Triton needs {what}, and this machine has none.", toolchain.REMEDY),
)
def compiler(subject: Subject) -> Iterator[Verdict]:
    what = toolchain.missing(subject.environ)
    yield verdict("none" if not cards(subject) else "missing" if what else "fine", what=what)
