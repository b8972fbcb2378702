"""Fixtures of the HTTP tests: the demo's tokenizer and template, scripted engines, official clients."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib.resources import files
from pathlib import Path

import pytest

import soloist.engine.build
from fakes import FakeEngine
from live import Live, serving
from script_server import Script, script_servers
from soloist.engine.request import Request
from soloist.server.template import ChatTemplate
from soloist.server.tokenizer import Tokenizer

DEMO = Path(str(files("soloist.demo")))
EOS = 16362


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return Tokenizer.load(DEMO)


@pytest.fixture(scope="session")
def template() -> ChatTemplate:
    return ChatTemplate.load(DEMO)


Say = Callable[..., Live]


@pytest.fixture
def say(tokenizer: Tokenizer, template: ChatTemplate) -> Iterator[Say]:
    """`say(text, block=4)`: a live server whose model answers every request with `text` and EOS."""
    open_servers = []

    def start(
        text: str | Callable[[Request], list[int]],
        *,
        block: int | tuple[int, int] = 1,
        eos: bool = True,
        engine: dict | None = None,
        **options: object,
    ) -> Live:
        if callable(text):
            script = text
        else:
            ids = tokenizer.encode(text) + ([EOS] if eos else [])

            def script(request: Request) -> list[int]:
                return ids

        fake = FakeEngine(script, block=block, **(engine or {}))
        context = serving(fake, tokenizer, template, **options)
        live = context.__enter__()
        open_servers.append((context, fake))
        return live

    yield start
    for context, fake in open_servers:
        context.__exit__(None, None, None)
        fake.close()


@pytest.fixture(scope="module")
def say_once(tokenizer: Tokenizer, template: ChatTemplate) -> Iterator[Live]:
    """One server for a whole module, for tests that need no particular answer."""
    fake = FakeEngine(lambda request: [*tokenizer.encode("ok"), EOS], block=4)
    with serving(fake, tokenizer, template) as live:
        yield live
    fake.close()


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Script]:
    """`script(pieces, pad=2, **knobs)`: a live server on a checkpoint that answers with these pieces."""
    # The start-up check of the numerics contracts costs seconds per checkpoint and has tests of its own.
    monkeypatch.setattr(soloist.engine.build, "cached_check", lambda key, run: [])
    with script_servers(tmp_path) as start:
        yield start
