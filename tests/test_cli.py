"""The command line: flags become settings, errors become exit codes, and nothing heavy is imported to say hello."""

from __future__ import annotations

import subprocess
import sys
import types
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.main import get_command
from typer.testing import CliRunner

from soloist.cli import app
from soloist.errors import CheckpointError, EngineError
from soloist.settings import KNOBS, Settings

ROOT = Path(__file__).resolve().parent.parent
runner = CliRunner()


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[Callable[[Settings], None]], None]:
    """Put a function in the place of the server."""
    monkeypatch.chdir(tmp_path)
    for knob in KNOBS.values():
        monkeypatch.delenv(knob.env, raising=False)

    def install(run: Callable[[Settings], None]) -> None:
        fake = types.ModuleType("soloist.server.main")
        fake.run = lambda settings, progress: run(settings)  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "soloist.server.main", fake)

    return install


def test_flags_environment_and_argument_reach_the_server(serve, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Settings] = []
    serve(seen.append)
    monkeypatch.setenv("MAX_SEQS", "3")
    monkeypatch.setenv("PORT", "1234")
    result = runner.invoke(app, ["serve", "some/model", "--port", "4321", "--max-len", "auto"])
    assert result.exit_code == 0, result.output
    (settings,) = seen
    assert (settings.model, settings.port, settings.max_seqs) == ("some/model", 4321, 3)
    assert [settings.origins[n] for n in ("model", "port", "max_seqs", "host")] == [
        "flag",
        "flag",
        "environment",
        "default",
    ]


def test_the_model_argument_is_optional(serve) -> None:
    seen: list[Settings] = []
    serve(seen.append)
    assert runner.invoke(app, ["serve"]).exit_code == 0
    assert seen[0].model == "demo"


def test_a_fault_of_the_user_exits_with_2_and_shows_the_remedy(serve) -> None:
    def refuse(settings: Settings) -> None:
        raise CheckpointError("x/config.json is missing.", "Download it again.")

    serve(refuse)
    result = runner.invoke(app, ["serve", "x"])
    assert result.exit_code == 2
    assert "x/config.json is missing." in result.stderr and "Download it again." in result.stderr


def test_a_fault_of_ours_exits_with_1(serve) -> None:
    def fail(settings: Settings) -> None:
        raise EngineError("the engine stopped")

    serve(fail)
    result = runner.invoke(app, ["serve"])
    assert result.exit_code == 1 and "the engine stopped" in result.stderr


def test_refused_settings_never_reach_the_server(serve) -> None:
    serve(lambda settings: pytest.fail("the server was started"))
    result = runner.invoke(app, ["serve", "--dtype", "bf16"])
    assert result.exit_code == 2 and "DTYPE=bfloat16" in result.stderr


def test_an_unknown_command_or_flag_names_the_nearest() -> None:
    result = runner.invoke(app, ["srve"])
    assert result.exit_code == 2 and "soloist serve" in result.stderr
    result = runner.invoke(app, ["serve", "--prot", "1"])
    assert result.exit_code == 2 and "--port" in result.stderr


def test_every_knob_is_a_flag_of_serve_or_its_argument() -> None:
    root = get_command(app)
    params = root.get_command(None, "serve").params
    names = {p.name for p in params}
    assert set(KNOBS) <= names


def test_every_command_has_help_and_only_its_own_options() -> None:
    root = get_command(app)
    names = root.list_commands(None)
    assert {"serve", "chat", "knobs"} <= set(names)
    for name in names:
        command = root.get_command(None, name)
        assert command.help, f"soloist {name} has no help"
        assert not any("completion" in p.name for p in command.params), f"soloist {name}: pass add_completion=False"


def test_knobs_prints_the_table_without_keys(serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PORT", "1234")
    monkeypatch.setenv("API_KEY", "hush")
    monkeypatch.setenv("COLUMNS", "200")
    result = runner.invoke(app, ["knobs"])
    assert result.exit_code == 0
    assert "1234 (environment)" in result.stdout and "hush" not in result.stdout
    for knob in KNOBS.values():
        assert knob.env in result.stdout


@pytest.mark.parametrize("arguments", [["--help"], ["chat", "--help"], ["serve", "--help"], ["knobs"]])
def test_light_commands_import_nothing_heavy(arguments: list[str]) -> None:
    program = (
        "import sys\nfrom soloist.cli import app\napp(standalone_mode=False)\n"
        "heavy = {'torch', 'transformers', 'fastapi', 'numpy', 'httpx', 'tokenizers'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr


def test_the_chat_client_does_not_import_torch() -> None:
    program = "import sys, soloist.chat.loop, soloist.chat.talk\nassert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


def test_the_generated_pages_are_current() -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "tools/generate_docs.py"), "--check"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
