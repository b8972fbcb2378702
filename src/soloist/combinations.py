"""Which knobs exclude each other. `settings.resolve` calls `check` on what it has put together.

Two kinds of fault: a knob the user set that cannot have an effect beside another (`POINTLESS`, a table), and values
that contradict each other (`RULES`, functions). A knob made pointless by a stronger source than its own is a note, not
a fault: `--spec none` for one run must not require editing `.env`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from soloist.errors import SettingError
from soloist.knobs import Knob

if TYPE_CHECKING:
    from collections.abc import Mapping

    from soloist.settings import Settings

STRENGTH = {"default": 0, ".env": 1, "environment": 2, "flag": 3}


@dataclass(frozen=True)
class Pointless:
    """`knobs` have no effect while `other` has one of `values`; `use` is the value of `other` to suggest instead."""

    knobs: tuple[str, ...]
    other: str
    values: tuple[Any, ...]
    use: Any


SATURATED = ("lookup_adaptive", "lookup_sticky", "lookup_cheap_ctx")
MATCHING = ("lookup_nmin", "lookup_nmax", "lookup_search", "lookup_extend")
MERGING = ("lookup_nstrong", "lookup_agree", "lookup_nmin_tail", "lookup_longmin")
SESSIONS = ("session_cache_gb", "session_flush_s")

POINTLESS = (
    Pointless(("draft_tokens",), "spec", ("none", "dflash2"), use="mtp"),
    Pointless(("drafter", "dflash_tokens"), "spec", ("none", "mtp"), use="dflash2"),
    Pointless(("draft_sample", "mtp_draft_vocab"), "spec", ("none",), use="auto"),
    Pointless(("dflash_tokens",), "tree", (True,), use=False),
    Pointless((*MATCHING, *MERGING, *SATURATED), "lookup", (False,), use=True),
    Pointless(SATURATED, "block_rule", ("gain",), use="saturated"),
    Pointless(("settle", "snapshot_every", "host_cache_gb", "session_dir"), "prefix_cache", (False,), use=True),
    Pointless(SESSIONS, "prefix_cache", (False,), use=True),
    Pointless(SESSIONS, "session_dir", ("none",), use="auto"),
    Pointless(
        ("vision_offload", "vision_max_images", "vision_max_pixels", "vision_urls"), "vision", (False,), use=True
    ),
    Pointless(("ctx",), "kv_format", ("bf16", "fp16", "fp32", "fp8", "int8", "kvarn"), use="auto"),
)
OFF = (False, 0, "none", "auto")
"""Switching off what is off already, or asking for the default, is no fault."""


def check(settings: Settings, knobs: Mapping[str, Knob]) -> list[str]:
    """Notes about knobs without effect; raises SettingError for a combination that cannot be meant."""
    notes = []
    for case in POINTLESS:
        other, now = knobs[case.other], getattr(settings, case.other)
        if now not in case.values:
            continue
        for name in case.knobs:
            if not settings.given(name) or getattr(settings, name) in OFF:
                continue
            fault = f"{knobs[name].env} has no effect with {other.env}={other.show(now)}."
            if STRENGTH[settings.origins[name]] < STRENGTH[settings.origins[case.other]]:
                notes.append(fault)
            else:
                remedy = f"Set {other.env}={other.show(case.use)}, or leave {knobs[name].env} out."
                raise SettingError(fault, remedy)
    for rule in RULES:
        rule(settings)
    return notes


def _keys_without_spaces(settings: Settings) -> None:
    if any(c.isspace() for key in settings.api_key for c in key):
        raise SettingError("API_KEY contains white space.", "Separate several keys by commas, without spaces.")


def _match_lengths_in_order(settings: Settings) -> None:
    if settings.lookup_nmax < settings.lookup_nmin:
        raise SettingError(
            f"LOOKUP_NMAX={settings.lookup_nmax} is below LOOKUP_NMIN={settings.lookup_nmin}.",
            f"The nearest valid value is LOOKUP_NMAX={settings.lookup_nmin}.",
        )


def _rows_for_drafts(settings: Settings) -> None:
    rows = settings.verify_rows
    if rows < 2 and settings.spec in ("mtp", "dflash2"):
        raise SettingError(
            f"VERIFY_ROWS={rows} leaves no row for a draft of SPEC={settings.spec}.",
            "Set VERIFY_ROWS=2 or more, or SPEC=none.",
        )
    for name in ("draft_tokens", "dflash_tokens"):
        tokens = getattr(settings, name)
        if settings.given(name) and tokens >= rows:
            raise SettingError(
                f"{name.upper()}={tokens} and the anchor do not fit VERIFY_ROWS={rows}.",
                f"Set {name.upper()}={rows - 1} or VERIFY_ROWS={tokens + 1}.",
            )


RULES: tuple[Callable[[Settings], None], ...] = (_keys_without_spaces, _match_lengths_in_order, _rows_for_drafts)
