"""docs/clients.md: what it tells people to paste is well-formed, and the addresses and names in it are answered."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import httpx
import pytest

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "clients.md").read_text()
ADDRESS = "http://127.0.0.1:18020"
NAME = re.search(r"SERVED_NAME=(\w+) soloist serve", PAGE)[1]


def blocks(kind: str) -> list[str]:
    return re.findall(rf"```{kind}\n(.*?)```", PAGE, re.DOTALL)


@pytest.fixture
def live(say):
    return say("Red, green, blue.", names=(NAME,))


def hello(path: str) -> dict:
    if path == "/responses":
        return {"model": NAME, "input": "Hello"}
    return {"model": NAME, "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 20}


def answered(live, base: str, path: str) -> None:
    assert base.startswith(ADDRESS), base
    reply = httpx.post(base.replace(ADDRESS, live.url) + path, json=hello(path), timeout=30)
    assert reply.status_code == 200, reply.text


def test_claude_code(live) -> None:
    (env,) = [found["env"] for found in map(json.loads, blocks("json")) if "env" in found]
    answered(live, env["ANTHROPIC_BASE_URL"], "/v1/messages")
    assert {value for key, value in env.items() if key.endswith("_MODEL")} == {NAME}


def test_codex(live) -> None:
    (found,) = map(tomllib.loads, blocks("toml"))
    provider = found["model_providers"][found["model_provider"]]
    assert (found["model"], provider["wire_api"]) == (NAME, "responses")
    answered(live, provider["base_url"], "/responses")


def test_opencode(live) -> None:
    (found,) = [found for found in map(json.loads, blocks("json")) if "provider" in found]
    ((key, provider),) = found["provider"].items()
    assert (
        {found["model"], found["small_model"]} == {f"{key}/{name}" for name in provider["models"]} == {f"{key}/{NAME}"}
    )
    answered(live, provider["options"]["baseURL"], "/chat/completions")


def test_cline_and_open_webui(live) -> None:
    fields = dict(re.findall(r"^\| ([\w ]+) \| `(.*?)` \|$", PAGE, re.MULTILINE))
    assert fields["Model ID"] == NAME
    (command,) = blocks("sh")
    for base in (fields["Base URL"], re.search(r"OPENAI_API_BASE_URL=(\S+)", command)[1]):
        answered(live, base, "/chat/completions")
        models = httpx.get(base.replace(ADDRESS, live.url) + "/models").json()["data"]
        assert [model["id"] for model in models] == [NAME] and "max_model_len" in models[0]


def test_the_python_example(live) -> None:
    (example,) = blocks("python")
    done = subprocess.run(
        [sys.executable, "-c", example.replace(ADDRESS, live.url)], capture_output=True, text=True, timeout=60
    )
    assert done.stdout.strip() == "Red, green, blue.", done.stderr


def test_other_names_are_refused_by_listing_the_right_ones(live) -> None:
    reply = httpx.post(live.url + "/v1/chat/completions", json=hello("") | {"model": "gpt-5"})
    assert reply.status_code == 404 and NAME in reply.json()["error"]["message"]
