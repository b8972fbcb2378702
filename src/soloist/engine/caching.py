"""From settings to the prefix cache of an engine: tiers, budgets and the identity of what is stored."""

from __future__ import annotations

import logging
from pathlib import Path

from soloist.cache.persist import Persister
from soloist.cache.prefix import PrefixCache
from soloist.cache.segments import Identity
from soloist.cache.sessions import SessionStore
from soloist.cache.tiers import PagedStores
from soloist.cache.value import RecomputeCost
from soloist.checkpoint.config import ModelConfig
from soloist.checkpoint.reader import Checkpoint, open_checkpoint
from soloist.engine.drafters import drafter_directory
from soloist.engine.kept import Kept
from soloist.engine.memory import Memory
from soloist.engine.reuse import Reuse
from soloist.engine.speculation import Speculation
from soloist.errors import CapacityError
from soloist.settings import Settings

log = logging.getLogger("soloist.engine")

GIB = 1 << 30
DEFAULT_DIRECTORY = Path("~/.cache/soloist/sessions")


def session_directory(settings: Settings, keep: bool = True) -> Path | None:
    """Where sessions are kept; None when they are not. With SESSION_DIR=auto `keep` decides; the demo keeps none."""
    if not settings.prefix_cache or settings.session_dir == "none":
        return None
    if settings.session_dir != "auto":
        return Path(settings.session_dir).expanduser()
    return DEFAULT_DIRECTORY.expanduser() if keep and settings.model != "demo" else None


def build_reuse(
    settings: Settings,
    checkpoint: Checkpoint,
    memory: Memory,
    speculation: Speculation,
    numerics: str,
    keep_sessions: bool = False,
    kept: Kept | None = None,
) -> Reuse:
    """The cache over `memory`, warm from what a sleeping engine kept or from the session directory. `numerics` names
    everything that decides bits; what was kept under another name is not used."""
    config = checkpoint.config
    storage = PagedStores({"target": memory.kv, **speculation.stores})
    if not settings.prefix_cache:
        return Reuse(memory, speculation, storage, None)
    prefix, persister = kept.cache_for(numerics) if kept is not None else (None, None)
    if prefix is not None:
        prefix.rebind(memory.pages, storage)
    else:
        prefix, persister = _fresh(settings, checkpoint, memory, speculation, storage, numerics, keep_sessions)
    return Reuse(
        memory,
        speculation,
        storage,
        prefix,
        persister,
        snapshot_every=settings.snapshot_every,
        message_ends=config.eos_ids,
        numerics=numerics,
    )


def _fresh(
    settings: Settings,
    checkpoint: Checkpoint,
    memory: Memory,
    speculation: Speculation,
    storage: PagedStores,
    numerics: str,
    keep_sessions: bool,
) -> tuple[PrefixCache, Persister | None]:
    """A cache that knows what the session directory holds, and whoever writes there."""
    prefix = PrefixCache(
        memory.pages,
        grid=memory.kv.tile,
        storage=storage,
        host_bytes=int(settings.host_cache_gb * GIB),
        cost=recompute_cost(checkpoint.config),
    )
    directory = session_directory(settings, keep_sessions)
    persister = None
    if directory is not None:
        identity = _identity(settings, checkpoint, storage, speculation, numerics)
        persister = _persister(settings, directory, identity, prefix)
    return prefix, persister


def recompute_cost(config: ModelConfig) -> RecomputeCost:
    """Prefill cost by position: `half` is where attention (4 n D per key) equals the products (2 per weight)."""
    mixer = config.hidden_size * (config.num_heads * config.head_dim * 3 + 2 * config.num_kv_heads * config.head_dim)
    delta = config.hidden_size * (config.conv_channels + 2 * config.linear_value_heads * config.linear_value_dim)
    attention_layers = len(config.attention_layers)
    weights = (
        attention_layers * mixer
        + len(config.linear_layers) * delta
        + config.num_layers * 3 * config.hidden_size * config.intermediate_size
    )
    per_key = 4 * attention_layers * config.num_heads * config.head_dim
    return RecomputeCost(half=2 * weights / per_key if per_key else float("inf"))


def _identity(
    settings: Settings, checkpoint: Checkpoint, storage: PagedStores, speculation: Speculation, numerics: str
) -> Identity:
    """Whose bits a session file holds: target and drafter, everything that decides rounding, and the KV formats."""
    model = checkpoint.fingerprint()
    where = drafter_directory(settings, checkpoint) if speculation.name == "dflash2" else None
    if where is not None:
        model += "+" + open_checkpoint(where, "drafter").fingerprint()
    return Identity(model, f"{numerics} {speculation.name}", storage.format)


def _persister(settings: Settings, directory: Path, identity: Identity, prefix: PrefixCache) -> Persister:
    capacity = int(settings.session_cache_gb * GIB)
    try:
        store = SessionStore(directory, identity, capacity, flush_s=settings.session_flush_s)
    except OSError as error:
        raise CapacityError(
            f"SESSION_DIR={directory} cannot be used ({error}).", "Name another directory, or SESSION_DIR=none."
        ) from None
    persister = Persister(prefix, store)
    tokens = persister.restore()
    if tokens:
        log.info("%d tokens of earlier sessions are warm (%s)", tokens, directory)
    return persister
