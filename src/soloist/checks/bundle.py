"""`soloist doctor --debug-bundle`: one ZIP with which a report can be reproduced, and no secret in it."""

from __future__ import annotations

import json
import os
import re
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from soloist.bench.machine import commit, machine, versions
from soloist.checks.base import Finding, Subject
from soloist.checks.live import fetch, url
from soloist.errors import UserError
from soloist.settings import KNOBS

SECRET = "***"
_SECRET_NAME = re.compile(r"key|token$|secret|password|authorization", re.IGNORECASE)


def write_bundle(subject: Subject, findings: Sequence[Finding], out: Path, request: Path | None) -> list[str]:
    """Write the ZIP; returns the names of its files. `request` is the JSON body of a request that goes wrong."""
    files: dict[str, Any] = {
        "settings.json": knobs(subject),
        "environment.json": {k: v for k, v in subject.environ.items() if k in _knob_variables()} | _masked(subject),
        "versions.json": {"commit": commit(), **versions()},
        "machine.json": machine(),
        "findings.json": [f.as_dict() for f in findings],
        "model.json": _model(subject),
    }
    for name, path in (("metrics.txt", "/metrics"), ("ready.json", "/ready"), ("props.json", "/props")):
        status, text = fetch(subject, path)
        if status in (200, 503):
            files[f"server/{name}"] = text
    if request is not None:
        files["request.json"] = without_secrets(_read(request))
        files["reply.json"] = _replay(subject, _read(request))
    keys = [k for k in subject.settings.api_key if k]
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in files.items():
            text = (
                content if isinstance(content, str) else json.dumps(content, indent=1, ensure_ascii=False, default=str)
            )
            for key in keys:
                text = text.replace(key, SECRET)
            archive.writestr(name, text)
    return list(files)


def knobs(subject: Subject) -> dict[str, dict[str, str]]:
    """Every knob: its text and where it came from; secrets masked."""
    settings = subject.settings
    return {
        name: {
            "value": SECRET if knob.secret and getattr(settings, name) else knob.show(getattr(settings, name)),
            "from": settings.origins.get(name, "default"),
        }
        for name, knob in KNOBS.items()
    }


def _knob_variables() -> set[str]:
    return {k.env for k in KNOBS.values() if not k.secret} | {
        "CUDA_VISIBLE_DEVICES",
        "OMP_NUM_THREADS",
        "PYTORCH_CUDA_ALLOC_CONF",
    }


def _masked(subject: Subject) -> dict[str, str]:
    return {k.env: SECRET for k in KNOBS.values() if k.secret and subject.environ.get(k.env)}


def _model(subject: Subject) -> dict[str, Any]:
    directory = subject.model_directory
    try:
        config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        config = None
    sizes = {f.name: f.stat().st_size for f in sorted(directory.glob("*")) if f.is_file()} if directory.is_dir() else {}
    return {"config": config, "files": sizes}


def without_secrets(value: Any) -> Any:
    """The same JSON with the values of secret-looking names masked."""
    if isinstance(value, dict):
        return {
            k: SECRET if _SECRET_NAME.search(k) and isinstance(v, str) else without_secrets(v) for k, v in value.items()
        }
    return [without_secrets(v) for v in value] if isinstance(value, list) else value


def _read(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}).", "Give the JSON body of the request.") from None
    except ValueError as error:
        raise UserError(f"{path} is not JSON ({error}).", "Give the JSON body of the request.") from None


def _replay(subject: Subject, body: Any) -> dict[str, Any]:
    """Send the request to the running server, as chat or as completion, and keep what comes back."""
    import httpx

    path = "/v1/chat/completions" if isinstance(body, dict) and "messages" in body else "/v1/completions"
    keys = subject.settings.api_key
    headers = {"Authorization": f"Bearer {keys[0]}"} if keys else {}
    try:
        reply = httpx.post(url(subject) + path, json=body, headers=headers, timeout=120)
    except httpx.HTTPError as error:
        return {"path": path, "error": f"{type(error).__name__}: {error}"}
    return {"path": path, "status": reply.status_code, "body": reply.text[:200_000]}


def default_name() -> Path:
    """soloist-debug-PID.zip in the working directory."""
    return Path(f"soloist-debug-{os.getpid()}.zip")
