"""Every knob, declared once, and the one frozen object they resolve to.

A flag wins over the environment, the environment over `.env`. `resolve` is pure: it takes the three sources as
mappings and returns a `Settings` that remembers where each value came from, or raises SettingError. Only the edge
(command line, server start) reads a Settings; rooms below get plain values.

To add a knob: one field here, and code that reads `settings.<name>` (a test looks for it).
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

from soloist.combinations import check
from soloist.errors import SettingError
from soloist.knobs import Knob, Origin, knob, lookalike, table

PREFIX = "SOLOIST_"


@dataclass(frozen=True)
class Settings:
    """The resolved knobs. `origins` says where each value came from, `notes` what was odd but not wrong."""

    model: str = knob("demo", "Model directory, or `demo` for the bundled model.", group="Model")
    served_name: tuple[str, ...] = knob((), "Names clients may use; default: the directory's name.", group="Model")
    max_len: int | Literal["auto"] = knob(
        "auto", "Longest prompt plus answer in tokens; auto: what the model and memory allow.", group="Model", low=64
    )
    generation_defaults: bool = knob(
        True, "Take sampling defaults from the model's generation_config.json.", group="Model"
    )

    vision: bool = knob(False, "Take pictures: load the checkpoint's vision tower.", group="Vision")
    vision_offload: bool = knob(
        False, "Keep the tower in host memory and copy it to the card block by block.", group="Vision"
    )
    vision_max_images: int = knob(1, "Pictures a prompt may hold, its history included.", group="Vision", low=1)
    vision_max_pixels: int = knob(
        1 << 20, "Pixels above which a picture is scaled down; a token takes 1024 of them.", group="Vision", low=4096
    )
    vision_urls: bool = knob(False, "Fetch pictures from http and https addresses; 0: data URLs only.", group="Vision")

    host: str = knob("127.0.0.1", "Address to listen on.", group="Server")
    port: int = knob(
        18020, "Port to listen on, and the port `soloist chat` looks at.", group="Server", low=1, high=65535
    )
    api_key: tuple[str, ...] = knob((), "Keys clients must present; none: keyless.", group="Server", secret=True)
    max_queue: int = knob(64, "Requests that may wait; more are answered 503.", group="Server", low=1)
    max_body_mb: int = knob(32, "Largest request body in MiB.", group="Server", low=1)
    req_metrics: bool = knob(True, "Put a `metrics` object into responses.", group="Server")
    reasoning_fields: Literal["both", "reasoning", "reasoning_content"] = knob(
        "both", "Names under which reasoning text is returned.", group="Server"
    )
    force_usage: bool = knob(False, "Send usage at the end of every stream, asked for or not.", group="Server")
    cors_origins: tuple[str, ...] = knob(("*",), "Web origins that may call the server; *: any.", group="Server")
    drain_s: int = knob(30, "Seconds running answers may go on after SIGTERM.", group="Server", low=0)
    idle_release_min: float = knob(
        0.0,
        "Minutes without a request after which the card is given back until the next one; 0: never.",
        group="Server",
        low=0,
    )
    log_level: Literal["debug", "info", "warning", "error"] = knob("info", "What the server logs.", group="Server")

    max_seqs: int = knob(8, "Requests decoded at the same time.", group="Scheduling", low=1, high=256)
    prefill_slice_ms: int = knob(150, "Longest prefill slice while another request decodes.", group="Scheduling", low=1)

    prefix_cache: bool = knob(True, "Resume from known prompt prefixes instead of computing them.", group="Memory")
    settle: bool = knob(True, "Prefill finished turns when idle, so that the next turn starts warm.", group="Memory")
    snapshot_every: int = knob(
        2048, "Tokens between snapshots inside a long prompt; 0: at message ends only.", group="Memory", low=0
    )
    reserve_tokens: int = knob(
        2048, "Answer tokens that must be free before a request is admitted.", group="Memory", low=64
    )
    pool_tokens: int | Literal["auto"] = knob(
        "auto",
        "Tokens of KV in the page pool; auto: what the card has left, on a CPU four times MAX_LEN.",
        group="Memory",
        low=128,
    )
    reserve_mb: int = knob(256, "Memory of the card that is kept free, in MiB.", group="Memory", low=0)
    ctx: Literal["auto", "fast", "long", "huge"] = knob(
        "auto", "KV profile: fast 16 bits, long 8 bits, huge KVarN; auto: fast.", group="Memory"
    )
    kv_format: Literal["auto", "bf16", "fp16", "fp32", "fp8", "int8", "kvarn"] = knob(
        "auto", "Format of stored keys and values; auto: by CTX.", group="Memory"
    )
    kv_format_v: Literal["same", "bf16", "fp16", "fp32", "fp8", "int8"] = knob(
        "same", "Format of stored values where it differs from that of keys.", group="Memory"
    )
    host_cache_gb: float = knob(
        4.0, "Host memory for snapshots and for pages that left the pool, in GiB.", group="Memory", low=0
    )
    session_dir: str = knob(
        "auto",
        "Directory of saved sessions, or none; auto: ~/.cache/soloist/sessions for a served model, none for the demo.",
        group="Memory",
    )
    session_cache_gb: float = knob(20.0, "Largest size of SESSION_DIR in GiB.", group="Memory", low=0)
    session_flush_s: float = knob(
        2.0, "Seconds in which a settled turn is on disk; slower writes are logged.", group="Memory", low=0
    )

    sampler: Literal["auto", "coupled", "rejection"] = knob(
        "auto", "How drafts are verified when sampling; auto: coupled for requests with a seed.", group="Sampling"
    )

    spec: Literal["auto", "none", "mtp", "dflash2"] = knob(
        "auto", "Drafter; auto: dflash2 where DRAFTER is given, else mtp where the model has it.", group="Speculation"
    )
    drafter: str = knob(
        "auto", "Directory of the DFlash2 drafter; auto: `dflash2/` inside the model directory.", group="Speculation"
    )
    draft_tokens: int = knob(4, "Tokens the MTP module drafts per step.", group="Speculation", low=1, high=8)
    draft_sample: bool = knob(
        True, "Draft by sampling where the request samples; 0: always the likeliest token.", group="Speculation"
    )
    mtp_draft_vocab: bool = knob(
        True, "Draft from the truncated vocabulary where the model has one.", group="Speculation"
    )
    dflash_tokens: int = knob(
        7, "Draft rows of a DFlash2 chain (TREE=0), lookup included; 15 suits copying.", group="Speculation", low=1
    )
    verify_rows: int = knob(
        16, "Rows one request may verify in a step, the anchor included.", group="Speculation", low=1, high=64
    )
    tree: bool = knob(True, "Verify a tree of alternatives; 0: one chain.", group="Speculation")
    block_rule: Literal["saturated", "gain"] = knob(
        "gain", "How the rows of a step are chosen: two saturated steps, or expected gain.", group="Speculation"
    )
    lookup: bool = knob(True, "Draft from the request's own text.", group="Lookup")
    lookup_nmin: int = knob(6, "Shortest match in tokens.", group="Lookup", low=1)
    lookup_nmax: int = knob(12, "Match length from which the most recent match wins.", group="Lookup", low=1)
    lookup_nstrong: int = knob(6, "Match length trusted alone to replace drafted tokens.", group="Lookup", low=0)
    lookup_agree: int = knob(0, "Tokens drafter and match must agree on below LOOKUP_NSTRONG.", group="Lookup", low=0)
    lookup_nmin_tail: int = knob(4, "Match length for rows beyond the drafter's block.", group="Lookup", low=0)
    lookup_longmin: int = knob(6, "Match length that counts towards the long block.", group="Lookup", low=0)
    lookup_search: int = knob(0, "Look only this many tokens back; 0: everywhere.", group="Lookup", low=0)
    lookup_extend: bool = knob(True, "Copy on through the end of the text (periodic text).", group="Lookup")
    lookup_adaptive: bool = knob(
        True, "BLOCK_RULE=saturated: long blocks only while a copy runs; 0: always.", group="Lookup"
    )
    lookup_sticky: int = knob(3, "BLOCK_RULE=saturated: steps the long block is held.", group="Lookup", low=0)
    lookup_cheap_ctx: int = knob(
        0, "BLOCK_RULE=saturated: contexts up to this length always get the long block.", group="Lookup", low=0
    )

    device: Literal["auto", "cpu", "cuda"] = knob("auto", "Where the model runs.", group="Numerics")
    dtype: Literal["auto", "float32", "bfloat16"] = knob(
        "auto", "Type of activations and products; auto: float32 on a CPU, bfloat16 on a card.", group="Numerics"
    )
    graphs: Literal["on", "off", "check"] = knob(
        "on", "CUDA graphs of decode steps and drafts; check: also run eagerly and compare.", group="Numerics"
    )
    linear: str = knob("auto", "Product backend by name; auto: the first that passes the check.", group="Numerics")
    state_dtype: Literal["float32", "float16"] = knob(
        "float32", "Storage type of the recurrent state.", group="Numerics"
    )
    threads: int = knob(
        0,
        "CPU threads of a product; 0: one per core that affinity and a container's quota leave.",
        group="Numerics",
        low=0,
    )

    origins: Mapping[str, Origin] = field(default_factory=dict, compare=False, repr=False)
    notes: tuple[str, ...] = field(default=(), compare=False, repr=False)

    def given(self, name: str) -> bool:
        """True when the user set this knob, whatever its value."""
        return self.origins.get(name, "default") != "default"

    @property
    def address(self) -> tuple[str, int]:
        """Where a client on this machine reaches the server that these settings describe."""
        everywhere = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}
        return everywhere.get(self.host, self.host), self.port

    @property
    def url(self) -> str:
        """`address` as a base URL, without /v1."""
        host, port = self.address
        return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


KNOBS: Mapping[str, Knob] = MappingProxyType(table(Settings))
_BY_ENV = {k.env: k for k in KNOBS.values()}

# Names that other programs put into an environment and that look like one of ours.
FOREIGN = frozenset({"HOSTS", "PORTS", "MODELS", "DEVICES", "POST", "MODE"})


def resolve(flags: Mapping[str, str | None], environ: Mapping[str, str], dotenv: Mapping[str, str | None]) -> Settings:
    """Merge the sources into a Settings.

    flags     knob name (`max_len`) -> text; None or absent means not given. Unknown names are refused.
    environ   the process environment. Unknown SOLOIST_* names are refused; lookalikes of knobs become notes.
    dotenv    the parsed `.env`. Lookalikes of knobs and SOLOIST_* names are refused; other strangers become notes.
    """
    for name in flags:
        if name not in KNOBS:
            raise _unknown(name.upper(), "flag")
    notes = _strangers_in_environment(environ) + _strangers_in_dotenv(dotenv)

    values: dict[str, Any] = {}
    origins: dict[str, Origin] = {}
    sources: tuple[tuple[Origin, Callable[[Knob], str | None]], ...] = (
        ("flag", lambda k: flags.get(k.name)),
        ("environment", lambda k: environ.get(k.env)),
        (".env", lambda k: dotenv.get(k.env)),
    )
    for name, item in KNOBS.items():
        origins[name] = "default"
        for origin, read in sources:
            text = read(item)
            if text is not None and (text.strip() or origin == "flag"):
                values[name] = item.parse(text, origin)
                origins[name] = origin
                break
    settings = Settings(**values, origins=MappingProxyType(origins))
    return dataclasses.replace(settings, notes=(*notes, *check(settings, KNOBS)))


def from_process(flags: Mapping[str, str | None] | None = None, directory: Path = Path(".")) -> Settings:
    """`resolve` with this process's environment and the `.env` of `directory`."""
    return resolve(flags or {}, os.environ, read_dotenv(directory / ".env"))


def read_dotenv(path: Path) -> dict[str, str | None]:
    """The pairs of a `.env` file; empty when there is no file. SettingError names the line that is not NAME=VALUE."""
    if not path.is_file():
        return {}
    from dotenv.parser import parse_stream

    pairs: dict[str, str | None] = {}
    with path.open(encoding="utf-8") as stream:
        for item in parse_stream(stream):
            text = item.original.string
            line = item.original.line + text[: len(text) - len(text.lstrip())].count("\n")
            if item.error:
                raise SettingError(
                    f"{path}, line {line}: {text.strip()!r} is not NAME=VALUE.", "Mend it, or begin it with #."
                )
            if item.key is not None and item.value is None:
                raise SettingError(
                    f"{path}, line {line}: `{item.key}` has no value.", f"Write {item.key}=VALUE, or remove the line."
                )
            if item.key is not None:
                pairs[item.key] = item.value
    return pairs


def _unknown(name: str, where: str) -> SettingError:
    plain = name.removeprefix(PREFIX)
    near = _BY_ENV.get(plain) or lookalike(plain, KNOBS.values())
    if near is not None and near.env == plain:
        return SettingError(f"{name} ({where}) is not a knob.", f"Knobs have plain names: use {plain}.")
    hint = f"Did you mean {near.env}?" if near else "`soloist knobs` lists the knobs."
    return SettingError(f"{name} ({where}) is not a knob.", hint)


def _strangers_in_environment(environ: Mapping[str, str]) -> list[str]:
    notes = []
    for name in environ:
        if name in _BY_ENV or name in FOREIGN or not name.isupper():
            continue
        if name.startswith(PREFIX):
            raise _unknown(name, "environment")
        near = lookalike(name, KNOBS.values())
        if near is not None:
            notes.append(f"The environment variable {name} is not a knob and has no effect; did you mean {near.env}?")
    return notes


def _strangers_in_dotenv(dotenv: Mapping[str, str | None]) -> list[str]:
    notes = []
    for name in dotenv:
        if name in _BY_ENV:
            continue
        if name.startswith(PREFIX) or lookalike(name, KNOBS.values()) is not None:
            raise _unknown(name, ".env")
        notes.append(f"{name} in .env is not a knob and has no effect on Soloist.")
    return notes


def defaults() -> dict[str, Any]:
    """Knob name -> default value."""
    return {f.name: f.default for f in dataclasses.fields(Settings) if "help" in f.metadata}
