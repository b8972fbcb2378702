"""Knobs: precedence, parsing, and that everything wrong is refused with the nearest valid value."""

from __future__ import annotations

import re
import typing
from functools import cache
from pathlib import Path
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

import soloist
from soloist.combinations import POINTLESS
from soloist.errors import SettingError
from soloist.knobs import Knob, edit_distance, lookalike
from soloist.settings import KNOBS, Settings, defaults, from_process, read_dotenv, resolve

ROOT = Path(__file__).resolve().parent.parent


def companions(name: str) -> dict[str, str]:
    """What must stand in the environment for this knob to be allowed at all."""
    beside = {case.other: case.use for case in POINTLESS if name in case.knobs}
    if name == "lookup_nmax":
        beside["lookup_nmin"] = 1
    return {KNOBS[n].env: KNOBS[n].show(value) for n, value in beside.items()}


def legal(knob: Knob) -> list[Any]:
    """At least two distinct legal values of a knob, in its own type."""
    values: list[Any] = list(knob.words)
    for kind in knob.kinds:
        if kind is bool:
            values += [True, False]
        elif kind in (int, float):
            low = 0 if knob.low is None else knob.low
            values += [kind(low + 1), kind(low + 2 if knob.high is None else knob.high)]
        elif kind is str:
            values += ["alpha", "beta"]
        elif kind is Path:
            values += [Path("/a/b"), Path("c")]
        elif typing.get_origin(kind) is tuple:
            values += [("one",), ("one", "two")]
    return values


@pytest.mark.parametrize("name", KNOBS)
def test_flag_beats_environment_beats_dotenv_beats_default(name: str) -> None:
    knob = KNOBS[name]
    flag, other = legal(knob)[:2]
    env = {knob.env: knob.show(other)}
    dotenv = {knob.env: knob.show(flag)}

    def value(flags: Any, env: Any, dotenv: Any) -> tuple[Any, str]:
        settings = resolve(flags, companions(name) | env, dotenv)
        return getattr(settings, name), settings.origins[name]

    assert value({name: knob.show(flag)}, env, {}) == (flag, "flag")
    assert value({name: None}, env, dotenv) == (other, "environment")
    assert value({}, {knob.env: "  "}, dotenv) == (flag, ".env")
    assert value({}, {}, {knob.env: ""}) == (defaults()[name], "default")


@pytest.mark.parametrize("name", KNOBS)
def test_shown_values_parse_back(name: str) -> None:
    knob = KNOBS[name]
    for value in legal(knob):
        parsed = knob.parse(knob.show(value), "flag")
        assert parsed == value and type(parsed) is type(value)


@pytest.mark.parametrize("name", KNOBS)
def test_every_knob_is_described_and_its_default_is_legal(name: str) -> None:
    knob = KNOBS[name]
    assert knob.help.endswith(".") and knob.group
    shown = knob.show(knob.default)
    assert not shown or knob.parse(shown, "flag") == knob.default


@pytest.mark.parametrize("name", KNOBS)
def test_every_knob_has_a_user(name: str) -> None:
    sources = [p for p in Path(soloist.__file__).parent.rglob("*.py") if p.name not in ("settings.py", "knobs.py")]
    assert any(re.search(rf"\bsettings\.{name}\b", p.read_text()) for p in sources), f"no code reads settings.{name}"


@pytest.mark.parametrize(
    ("sources", "message", "remedy"),
    [
        (({"port": "0"}, {}, {}), "--port 0 is out of range; PORT takes 1..65535", "PORT=1."),
        (({}, {"PORT": "70000"}, {}), "PORT=70000 (environment) is out of range", "PORT=65535"),
        (({}, {"PORT": "eighty"}, {}), "PORT=eighty (environment) is not valid", "PORT=18020"),
        (({}, {}, {"PORT": "nan"}), "PORT=nan (.env) is not valid", "PORT=18020"),
        (({}, {"DTYPE": "bf16"}, {}), "DTYPE takes auto | float32 | bfloat16", "Did you mean DTYPE=bfloat16?"),
        (({}, {"MAX_LEN": "12"}, {}), "MAX_LEN takes auto | an integer of at least 64", "MAX_LEN=64"),
        (({}, {"REQ_METRICS": "maybe"}, {}), "REQ_METRICS takes 0 or 1", "REQ_METRICS=1"),
        (({"max_len": ""}, {}, {}), "--max-len  is not valid", "MAX_LEN=auto"),
        (({"prot": "1"}, {}, {}), "PROT (flag) is not a knob", "Did you mean PORT?"),
        (({}, {"SOLOIST_PORT": "1"}, {}), "SOLOIST_PORT (environment) is not a knob", "use PORT"),
        (({}, {"SOLOIST_COLOUR": "1"}, {}), "SOLOIST_COLOUR (environment) is not a knob", "`soloist knobs`"),
        (({}, {}, {"MAX_SEQ": "4"}), "MAX_SEQ (.env) is not a knob", "Did you mean MAX_SEQS?"),
        (({}, {}, {"SOLOIST_PROT": "4"}), "SOLOIST_PROT (.env) is not a knob", "Did you mean PORT?"),
    ],
)
def test_refusals_name_the_value_and_the_nearest_valid_one(sources: Any, message: str, remedy: str) -> None:
    with pytest.raises(SettingError) as refused:
        resolve(*sources)
    assert message in refused.value.message
    assert remedy in refused.value.remedy


@pytest.mark.parametrize(
    ("given", "message", "remedy"),
    [
        ("SPEC=none DRAFT_TOKENS=3", "DRAFT_TOKENS has no effect with SPEC=none", "Set SPEC=mtp"),
        ("SPEC=dflash2 DRAFT_TOKENS=3", "DRAFT_TOKENS has no effect with SPEC=dflash2", "Set SPEC=mtp"),
        ("SPEC=mtp DRAFTER=x", "DRAFTER has no effect with SPEC=mtp", "Set SPEC=dflash2"),
        ("SPEC=dflash2 DFLASH_TOKENS=7", "DFLASH_TOKENS has no effect with TREE=1", "Set TREE=0"),
        ("LOOKUP=0 LOOKUP_NMIN=4", "LOOKUP_NMIN has no effect with LOOKUP=0", "leave LOOKUP_NMIN out"),
        ("BLOCK_RULE=gain LOOKUP_STICKY=1", "LOOKUP_STICKY has no effect with BLOCK_RULE=gain", "BLOCK_RULE=saturated"),
        ("PREFIX_CACHE=0 HOST_CACHE_GB=2", "HOST_CACHE_GB has no effect with PREFIX_CACHE=0", "Set PREFIX_CACHE=1"),
        ("SESSION_DIR=none SESSION_CACHE_GB=2", "no effect with SESSION_DIR=none", "Set SESSION_DIR=auto"),
        ("CTX=long KV_FORMAT=int8", "CTX has no effect with KV_FORMAT=int8", "Set KV_FORMAT=auto, or leave CTX out"),
        ("LOOKUP_NMIN=8 LOOKUP_NMAX=7", "LOOKUP_NMAX=7 is below LOOKUP_NMIN=8", "LOOKUP_NMAX=8"),
        ("SPEC=mtp VERIFY_ROWS=1", "VERIFY_ROWS=1 leaves no row", "VERIFY_ROWS=2"),
        ("VERIFY_ROWS=4 DRAFT_TOKENS=4", "do not fit VERIFY_ROWS=4", "Set DRAFT_TOKENS=3 or VERIFY_ROWS=5"),
        ("API_KEY=a\tb", "API_KEY contains white space", "commas"),
    ],
)
def test_impossible_combinations_are_refused(given: str, message: str, remedy: str) -> None:
    with pytest.raises(SettingError) as refused:
        resolve({}, dict(pair.split("=") for pair in given.split(" ")), {})
    assert message in refused.value.message and remedy in refused.value.remedy


def test_switching_off_what_is_off_already_is_no_fault() -> None:
    environ = {"PREFIX_CACHE": "0", "SETTLE": "0", "SESSION_DIR": "none", "LOOKUP": "0", "LOOKUP_STICKY": "0"}
    assert resolve({}, environ, {}).notes == ()


def test_a_stronger_source_may_make_a_weaker_one_pointless() -> None:
    settings = resolve({"spec": "none"}, {}, {"SPEC": "mtp", "DRAFT_TOKENS": "3"})
    assert settings.spec == "none" and settings.notes == ("DRAFT_TOKENS has no effect with SPEC=none.",)


def test_a_slip_in_the_environment_is_a_note_and_strangers_are_not() -> None:
    settings = resolve({}, {"MAX_SEQ": "4", "HOME": "/root", "HOSTNAME": "box", "PATH": "/bin", "_": "x"}, {})
    assert len(settings.notes) == 1 and "did you mean MAX_SEQS?" in settings.notes[0]
    assert settings.max_seqs == defaults()["max_seqs"]


def test_a_stranger_in_dotenv_is_a_note() -> None:
    (note,) = resolve({}, {}, {"HF_TOKEN": "secret"}).notes
    assert "HF_TOKEN" in note and "secret" not in note


def test_keys_are_not_printed() -> None:
    settings = resolve({}, {"API_KEY": "first-key,second-key"}, {})
    assert settings.api_key == ("first-key", "second-key")
    assert "first-key" not in repr(settings)


def test_dotenv_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / ".env").write_text("# comment\nexport PORT=9000\nMODEL='a b'  # trailing\nHOST=\n")
    monkeypatch.delenv("PORT", raising=False)
    settings = from_process({"max_seqs": "2"}, tmp_path)
    assert (settings.port, settings.model, settings.host, settings.max_seqs) == (9000, "a b", "127.0.0.1", 2)
    assert settings.given("port") and not settings.given("host")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("HOST=::1\n\nPORT\n", "line 3: `PORT` has no value"),
        ("# one\n\n  \nthis is no setting\nPORT=9000\n", "line 4: 'this is no setting' is not NAME=VALUE"),
        ("PORT=9000\nMODEL='never closed\n", "line 2: .* is not NAME=VALUE"),
    ],
)
def test_a_broken_line_in_dotenv_is_named(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / ".env").write_text(text)
    with pytest.raises(SettingError, match=message) as refused:
        read_dotenv(tmp_path / ".env")
    assert str(tmp_path / ".env") in refused.value.message and refused.value.remedy


def test_the_example_dotenv_is_valid() -> None:
    assert resolve({}, {}, read_dotenv(ROOT / ".env.example")).notes == ()


def test_settings_are_frozen() -> None:
    with pytest.raises(AttributeError):
        Settings().port = 1  # type: ignore[misc]


word = st.text("ABCD", max_size=6)


@given(word, word)
def test_edit_distance_is_the_restricted_damerau_levenshtein(a: str, b: str) -> None:
    @cache
    def reference(i: int, j: int) -> int:
        """The textbook recursion."""
        if i == 0 or j == 0:
            return i + j
        best = min(reference(i - 1, j) + 1, reference(i, j - 1) + 1, reference(i - 1, j - 1) + (a[i - 1] != b[j - 1]))
        if i > 1 and j > 1 and a[i - 1] == b[j - 2] and a[i - 2] == b[j - 1]:
            best = min(best, reference(i - 2, j - 2) + 1)
        return best

    exact = reference(len(a), len(b))
    assert edit_distance(a, b, 99) == exact
    assert edit_distance(a, b, 2) == min(exact, 3)


def test_lookalikes() -> None:
    def near(name: str) -> str | None:
        found = lookalike(name, KNOBS.values())
        return found.env if found else None

    assert [near(n) for n in ("PROT", "MAXLEN", "PREFILL_SLICES", "SERVD_NAME")] == [
        "PORT",
        "MAX_LEN",
        "PREFILL_SLICE_MS",
        "SERVED_NAME",
    ]
    assert [near(n) for n in ("HOME", "PATH", "TERM", "USER", "LANG")] == [None] * 5


def test_a_union_with_none_and_a_path() -> None:
    knob = Knob("drafts", Path | None, None, "Help.", "Group", None, None, False)
    assert knob.parse("~/x", "flag") == Path.home() / "x"
    assert knob.values == "a path" and knob.show(None) == ""
    either = Knob("n", float | Literal["auto"], "auto", "Help.", "Group", 0, None, False)
    assert either.parse("AUTO", "flag") == "auto" and either.parse("0.5", "flag") == 0.5
