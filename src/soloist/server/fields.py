"""The one rule for request fields, as data.

    known and supported                               honoured   (the fields of the protocol models)
    known, unsupported, with an effect on the output  REFUSED    400 with `param`, unless the value is neutral
    known, without an effect on the output            INERT      accepted in silence
    unknown                                           ignored    accepted, logged once, listed in `x-soloist-ignored`

`REFUSED` maps a field to the values that ask for nothing.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from typing import Any

from soloist.errors import RequestError

log = logging.getLogger("soloist.server")

INERT = frozenset(
    {
        "user",
        "metadata",
        "store",
        "service_tier",
        "safety_identifier",
        "prompt_cache_key",
        "prompt_cache_retention",
        "prompt_cache_options",
        "prediction",
        "priority",
        "mm_processor_kwargs",
        "spaces_between_special_tokens",
        "cache_control",
        "betas",
        "anthropic_beta",
        "container",
        "client_metadata",
        "inference_geo",
        "speed",
    }
)

_OFF = (None, False)
_NO_PENALTY = (None, 1, 1.0)
_ZERO = (None, False, 0, 0.0)

REFUSED: Mapping[str, tuple[Any, ...]] = {
    "audio": _OFF,
    "modalities": (None, [], ["text"]),
    "web_search_options": (None,),
    "verbosity": (None, "medium"),
    "best_of": (None, 1),
    "suffix": (None, ""),
    "use_beam_search": _OFF,
    "length_penalty": _NO_PENALTY,
    "early_stopping": _OFF,
    "typical_p": _NO_PENALTY,
    "top_a": _ZERO,
    "tfs_z": _NO_PENALTY,
    "mirostat": _ZERO,
    "mirostat_mode": _ZERO,
    "dry_multiplier": _ZERO,
    "xtc_probability": _ZERO,
    "dynatemp_range": _ZERO,
    "repeat_penalty": _NO_PENALTY,
    "logits_processors": (None, []),
    "truncate_prompt_tokens": (None,),
    "prompt_embeds": (None,),
    "documents": (None, []),
    "lora_request": (None,),
    "num_ctx": (None,),
    "grammar_lazy": _OFF,
    "chat_template": (None,),
    "mcp_servers": (None, []),
}

_HEADER_SAFE = re.compile(r"[^A-Za-z0-9_.\-]")


def sort_extras(extras: Mapping[str, Any] | None) -> list[str]:
    """Apply the rule to the fields a protocol model does not have; return the names that are ignored."""
    ignored = []
    for name, value in (extras or {}).items():
        if name in INERT:
            continue
        if name in REFUSED:
            neutral = REFUSED[name]
            if not any(type(value) is type(n) and value == n for n in neutral):
                raise RequestError(
                    f"{name} is not supported.",
                    f"Leave it out or send {neutral[-1]!r}." if neutral[-1] is not None else "Leave it out.",
                    param=name,
                )
            continue
        ignored.append(name)
    return ignored


class IgnoredFields:
    """Logs each unknown field once per process and writes the response header."""

    def __init__(self) -> None:
        self._logged: set[str] = set()

    def headers(self, names: list[str]) -> dict[str, str]:
        """`{"x-soloist-ignored": "a, b"}`, or nothing when every field was known."""
        safe = [_HEADER_SAFE.sub("?", name)[:64] or "?" for name in names[:32]]
        for name in safe:
            if name not in self._logged and len(self._logged) < 1000:
                self._logged.add(name)
                log.info("ignoring the unknown request field %s", name)
        return {"x-soloist-ignored": ", ".join(safe)} if safe else {}
