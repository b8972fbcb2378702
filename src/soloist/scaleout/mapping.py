"""The table: what each knob becomes on vLLM's command line, or why it cannot be had there.

Checked against the argument parser of the versions in CHECKED. A knob without a row here has no counterpart: it is
refused when the user set it, and does nothing when it has its default.

vLLM serves many users from several cards. It does not promise what Soloist promises: greedy text there may change with
the batch and with speculation.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from soloist.errors import SettingError

CHECKED = ("0.32.0",)


@dataclass(frozen=True)
class Have:
    """What vLLM gets: command-line options, environment variables, and remarks worth printing."""

    options: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    remark: str = ""


@dataclass(frozen=True)
class Cannot:
    """Why a value cannot be had on vLLM, and what to do instead."""

    reason: str
    remedy: str


@dataclass(frozen=True)
class Asked:
    """The resolved knobs as the rows see them: values by knob name and which of them the user set; the device
    (`cpu` or `cuda`); and what the model directory has: an MTP module, a DFlash2 drafter (its path)."""

    values: Mapping[str, Any]
    given: frozenset[str]
    device: str
    has_mtp: bool = True
    drafter: str | None = None

    def get(self, name: str, default: Any = None) -> Any:
        return self.values.get(name, default)


Row = Callable[[Any, Asked], Have | Cannot]
ALWAYS = (
    "--reasoning-parser", "qwen3",
    "--enable-auto-tool-choice",
    "--tool-call-parser", "qwen3_coder",
    "--enable-prompt-tokens-details",
)  # fmt: skip
"""Options without a knob: the parsers of this model family, and usage with cached tokens."""

KV_FORMATS = {"bf16": "bfloat16", "fp16": "float16", "fp8": "fp8_e4m3", "int8": "int8_per_token_head"}
PROFILES = {"auto": "bf16", "fast": "bf16", "long": "fp8", "huge": "kvarn"}


def option(flag: str) -> Row:
    """A knob whose value is handed over unchanged."""
    return lambda value, _: Have((flag, str(value)))


def only(reason: str, remedy: str, *fine: Any) -> Row:
    """A knob of which vLLM has some values only; those need no option."""
    return lambda value, _: Have() if value in fine else Cannot(reason, remedy)


def _served_name(value: tuple[str, ...], _: Asked) -> Have:
    return Have(("--served-model-name", *value) if value else ())


def _max_len(value: int | str, asked: Asked) -> Have:
    # vLLM sizes `auto` from card memory, which its CPU build cannot; there the model's own length is taken.
    return Have(() if value == "auto" and asked.device == "cpu" else ("--max-model-len", str(value)))


def _generation_defaults(value: bool, _: Asked) -> Have:
    return Have(("--generation-config", "auto" if value else "vllm"))


def _api_key(value: tuple[str, ...], _: Asked) -> Have | Cannot:
    if len(value) > 1:
        return Cannot("vLLM takes one key from its environment", "Give a single API_KEY.")
    return Have(environment={"VLLM_API_KEY": value[0]} if value else {})


def _req_metrics(value: bool, _: Asked) -> Have:
    return Have(("--enable-per-request-metrics" if value else "--no-enable-per-request-metrics",))


def _log_level(value: str, _: Asked) -> Have:
    return Have(("--uvicorn-log-level", value), {"VLLM_LOGGING_LEVEL": value.upper()})


def _reasoning_fields(value: str, asked: Asked) -> Have | Cannot:
    if value == "reasoning_content" or (value == "both" and "reasoning_fields" in asked.given):
        return Cannot("vLLM returns thinking as `reasoning` only", "Use REASONING_FIELDS=reasoning.")
    return Have(remark="Thinking is returned as `reasoning` only.")


def _max_seqs(value: int, asked: Asked) -> Have:
    # Our default of 8 is for one person; many users get vLLM's own.
    return Have(("--max-num-seqs", str(value)) if "max_seqs" in asked.given else ())


def _max_queue(value: int, asked: Asked) -> Have:
    return Have(("--max-num-queued-reqs", str(value)) if "max_queue" in asked.given else ())


def _threads(value: int, _: Asked) -> Have:
    return Have(environment={"OMP_NUM_THREADS": str(value)} if value else {})


def _prefix_cache(value: bool, asked: Asked) -> Have:
    if not value:
        return Have(("--no-enable-prefix-caching",))
    if asked.device == "cpu" and _speculates(asked):
        return Have(
            ("--no-enable-prefix-caching",),
            remark="Prefix caching is off: on a CPU vLLM cannot combine it with speculation for hybrid models.",
        )
    return Have(("--enable-prefix-caching", "--mamba-cache-mode", "align"))


def _speculates(asked: Asked) -> bool:
    spec = asked.get("spec", "none")
    return (_auto_spec(asked) if spec == "auto" else spec) != "none"


def _kv_format(value: str, asked: Asked) -> Have | Cannot:
    if value == "auto":
        value = PROFILES[asked.get("ctx") or "auto"]
    if value not in KV_FORMATS:
        return Cannot(f"vLLM has no KV format {value}", f"Use one of {', '.join(KV_FORMATS)}.")
    return Have(("--kv-cache-dtype", KV_FORMATS[value]))


def _ctx(value: str, _: Asked) -> Have | Cannot:
    if value == "huge":
        return Cannot("vLLM has no KVarN", "Use CTX=long.")
    return Have()


def _vision(value: bool, asked: Asked) -> Have:
    limit = json.dumps({"image": int(asked.get("vision_max_images") or 1)})
    return Have(("--limit-mm-per-prompt", limit) if value else ())


def _spec(value: str, asked: Asked) -> Have | Cannot:
    """MTP and DFlash2 as speculative configs; lookup alone as vLLM's n-gram proposer."""
    lookup = "lookup" in asked.given and bool(asked.get("lookup"))
    if value == "auto":
        value = _auto_spec(asked)
    if value == "none":
        return _config({"method": "ngram", **_ngram(asked)}) if lookup else Have()
    if lookup:
        return Cannot("vLLM cannot fuse lookup with a drafter", f"Leave LOOKUP out, or use SPEC=none, not {value}.")
    config: dict[str, Any] = {}
    if "draft_sample" in asked.given:
        config["draft_sample_method"] = "probabilistic" if asked.get("draft_sample") else "greedy"
    if value == "mtp":
        if not asked.has_mtp:
            return Cannot("the model directory has no MTP module", "Use SPEC=none or dflash2.")
        remark = "On a CPU vLLM's engine ends when a request samples with drafts on; send temperature 0 only."
        tokens = int(asked.get("draft_tokens") or 4)
        made = _config({"method": "mtp", "num_speculative_tokens": tokens, **config})
        return replace(made, remark=remark if asked.device == "cpu" else "")
    if asked.device == "cpu":
        return Cannot("vLLM's CPU build does not run DFlash2 drafters", "Use SPEC=mtp or SPEC=none on a CPU.")
    if asked.drafter is None:
        return Cannot("SPEC=dflash2 needs the drafter's directory", "Give DRAFTER.")
    tokens = int(asked.get("dflash_tokens") or 7)
    return _config({"method": "dflash", "model": asked.drafter, "num_speculative_tokens": tokens, **config})


def _auto_spec(asked: Asked) -> str:
    """The strongest drafter that both the directory and vLLM on this device have.

    On a CPU none: vLLM 0.32.0's engine ends there when a request samples while drafts are on (greedy works).
    """
    if asked.device == "cpu":
        return "none"
    if asked.drafter is not None:
        return "dflash2"
    return "mtp" if asked.has_mtp else "none"


def _ngram(asked: Asked) -> dict[str, int]:
    return {
        "num_speculative_tokens": int(asked.get("dflash_tokens") or 7),
        "prompt_lookup_min": int(asked.get("lookup_nmin") or 6),
        "prompt_lookup_max": max(int(asked.get("lookup_nmin") or 6), int(asked.get("lookup_nmax") or 12)),
    }


def _config(values: Mapping[str, Any]) -> Have:
    return Have(("--speculative-config", json.dumps(values)))


def _used_by_vision(_: Any, __: Asked) -> Have:
    return Have()


def _used_by_spec(_: Any, __: Asked) -> Have:
    return Have()


TABLE: Mapping[str, Row] = {
    "served_name": _served_name,
    "max_len": _max_len,
    "generation_defaults": _generation_defaults,
    "host": option("--host"),
    "port": option("--port"),
    "api_key": _api_key,
    "max_queue": _max_queue,
    "req_metrics": _req_metrics,
    "reasoning_fields": _reasoning_fields,
    "log_level": _log_level,
    "max_seqs": _max_seqs,
    "sampler": only(
        "vLLM's speculation is not coupled to the seed", "Use SAMPLER=auto or rejection.", "auto", "rejection"
    ),
    "device": only("vLLM chooses the device by the build installed", "Leave DEVICE out.", "auto", "cpu", "cuda"),
    "dtype": option("--dtype"),
    "linear": only("vLLM chooses its own kernels", "Leave LINEAR out.", "auto"),
    "state_dtype": option("--mamba-ssm-cache-dtype"),
    "threads": _threads,
    "prefix_cache": _prefix_cache,
    "ctx": _ctx,
    "kv_format": _kv_format,
    "kv_format_v": only("vLLM stores keys and values in one format", "Leave KV_FORMAT_V out.", "same"),
    "vision": _vision,
    "vision_max_images": _used_by_vision,
    "spec": _spec,
    "draft_tokens": _used_by_spec,
    "dflash_tokens": _used_by_spec,
    "drafter": _used_by_spec,
    "lookup": _used_by_spec,
    "draft_sample": _used_by_spec,
    "lookup_nmin": _used_by_spec,
    "lookup_nmax": _used_by_spec,
    "tree": only("vLLM verifies hybrid models along one chain", "Use TREE=0 or leave it out.", False, 0, "0"),
}


def needs_dense(quantization: Mapping[str, Any] | None, device: str) -> bool:
    """True for weights that vLLM has no kernel for on this device: 8 bits on a CPU."""
    groups = ((quantization or {}).get("config_groups") or {}).values()
    return device == "cpu" and any((g.get("weights") or {}).get("num_bits") == 8 for g in groups)


def translate(asked: Asked) -> Have:
    """All knobs as one `Have`. Raises SettingError with vLLM's reason for what cannot be had there."""
    options: list[str] = []
    environment: dict[str, str] = {}
    remarks: list[str] = []
    for name, value in asked.values.items():
        row = TABLE.get(name)
        if row is None:
            if name in asked.given and name != "model":
                raise SettingError(
                    f"{name.upper()} has no counterpart on vLLM.", f"Leave {name.upper()} out, or use --engine soloist."
                )
            continue
        if name == "tree" and name not in asked.given:
            continue
        got = row(value, asked)
        if isinstance(got, Cannot):
            raise SettingError(f"{name.upper()}={value} cannot be had on vLLM: {got.reason}.", got.remedy)
        options += got.options
        environment |= got.environment
        remarks += [got.remark] if got.remark else []
    return Have((*options, *ALWAYS), environment, " ".join(remarks))
