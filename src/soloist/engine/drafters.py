"""From settings to the draft sources of an engine: which drafter, in which numerics, under which block rule."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import torch

from soloist.cache.codecs import DenseCodec
from soloist.cache.kv import KVStore
from soloist.checkpoint.reader import Checkpoint, open_checkpoint
from soloist.drafting.block_length import BlockRule, GainRule, SaturatedConfig, SaturatedRule
from soloist.drafting.dflash2 import DFlash2Drafter
from soloist.drafting.drafter import Drafter
from soloist.drafting.lookup import LookupConfig
from soloist.drafting.mtp import MTPDrafter
from soloist.engine.costs import measure_costs
from soloist.engine.memory import Memory
from soloist.engine.speculation import NoSpeculation, Speculation
from soloist.engine.speculator import SpeculationConfig, Speculator
from soloist.errors import SettingError
from soloist.models.captured import Mode
from soloist.models.card_loader import CardLoader
from soloist.models.dflash2 import DFlash2
from soloist.models.layers import Loader
from soloist.models.mtp import MTPModule, truncated_head
from soloist.models.qwen3_5 import Qwen35
from soloist.ops.linear import DenseWeight
from soloist.ops.products import Linear, PackedLinear
from soloist.ops.upload import staged
from soloist.settings import Settings

Kind = Literal["none", "mtp", "dflash2"]

# Rows lookup alone puts up before a copy has shown itself.
LOOKUP_BLOCK = 7


def drafter_directory(settings: Settings, checkpoint: Checkpoint) -> Path | None:
    """Where the DFlash2 drafter lies, None if there is none. A directory that was asked for must exist."""
    if settings.drafter != "auto":
        return Path(settings.drafter).expanduser()
    bundled = checkpoint.directory / "dflash2"
    return bundled if (bundled / "config.json").is_file() else None


def drafter_kind(settings: Settings, checkpoint: Checkpoint) -> Kind:
    """The drafter SPEC asks for; raises SettingError where the model cannot have it."""
    where = drafter_directory(settings, checkpoint)
    if settings.spec == "auto":
        if settings.drafter != "auto":
            return "dflash2"
        return "mtp" if checkpoint.has_mtp else "dflash2" if where else "none"
    if settings.spec == "mtp" and not checkpoint.has_mtp:
        raise SettingError(f"SPEC=mtp, but {checkpoint.directory} has no MTP module.", "Set SPEC=none or dflash2.")
    if settings.spec == "dflash2" and where is None:
        raise SettingError(
            f"SPEC=dflash2, but {checkpoint.directory} has no drafter.", "Set DRAFTER to its directory, or SPEC=none."
        )
    return settings.spec


def tap_layers(settings: Settings, checkpoint: Checkpoint) -> tuple[int, ...]:
    """The target's layers whose outputs the drafter reads."""
    where = drafter_directory(settings, checkpoint)
    if drafter_kind(settings, checkpoint) != "dflash2" or where is None:
        return ()
    return open_checkpoint(where, "drafter").drafter_config.tap_layers


def lookup_config(settings: Settings) -> LookupConfig | None:
    if not settings.lookup:
        return None
    return LookupConfig(
        nmin=settings.lookup_nmin,
        nmax=settings.lookup_nmax,
        nstrong=settings.lookup_nstrong,
        agree=settings.lookup_agree,
        nmin_tail=settings.lookup_nmin_tail,
        longmin=settings.lookup_longmin,
        search=settings.lookup_search,
        extend=settings.lookup_extend,
    )


def drafting_dtype(device: torch.device, dtype: torch.dtype) -> torch.dtype:
    """Drafts need no bit-invariance, so a CPU drafts in bf16 where it has the instructions."""
    if device.type != "cpu":
        return dtype
    probe = DenseWeight(torch.zeros(32, 32))
    return dtype if PackedLinear.refuses(probe, device, torch.bfloat16) else torch.bfloat16


def build_speculation(settings: Settings, checkpoint: Checkpoint, model: Qwen35, memory: Memory) -> Speculation:
    """Load the drafter and put the sources together. Raises a UserError for what does not fit together."""
    kind = drafter_kind(settings, checkpoint)
    lookup = lookup_config(settings)
    rows = settings.verify_rows - 1
    if rows == 0 or (kind == "none" and lookup is None):
        return NoSpeculation()
    if settings.given("dflash_tokens") and settings.dflash_tokens > rows:
        raise SettingError(
            f"DFLASH_TOKENS={settings.dflash_tokens} does not fit VERIFY_ROWS={settings.verify_rows}.",
            f"Set DFLASH_TOKENS={rows} or VERIFY_ROWS={settings.dflash_tokens + 1}.",
        )
    dtype = drafting_dtype(model.device, model.dtype)
    drafter: Drafter | None = None
    if kind == "mtp":
        drafter = _mtp(settings, checkpoint, model, memory, dtype)
    elif kind == "dflash2":
        drafter = _dflash2(settings, checkpoint, model, memory, dtype)
    block = drafter.depth if drafter else LOOKUP_BLOCK
    long = rows
    if kind == "dflash2" and not settings.tree:
        long = min(rows, settings.dflash_tokens)
    block = min(block, long)
    # A tree fills its rows with alternatives: there is no shorter block to fall back to.
    short = long if settings.tree and drafter else block
    saturated = SaturatedConfig(
        short, long, settings.lookup_adaptive, settings.lookup_sticky, settings.lookup_cheap_ctx
    )
    cost = measure_costs(model, memory, drafter, long + 1, settings.tree) if settings.block_rule == "gain" else None

    def rule() -> BlockRule:
        return SaturatedRule(saturated) if cost is None else GainRule(cost, long)

    config = SpeculationConfig(lookup, settings.tree, block, long, settings.draft_sample, rule)
    return Speculator(drafter, config)


def _loader(source: Checkpoint, device: torch.device, dtype: torch.dtype) -> Loader:
    return CardLoader(source, device, dtype) if device.type == "cuda" else Loader(source, device, dtype)


def _head(
    settings: Settings, checkpoint: Checkpoint, model: Qwen35, dtype: torch.dtype
) -> tuple[Linear, torch.Tensor | None]:
    """The product drafts read their logits from, and the token ids of its rows (None: the vocabulary)."""
    load = _loader(checkpoint, model.device, dtype)
    if settings.mtp_draft_vocab and checkpoint.has_draft_head:
        ids = checkpoint.draft_vocab().to(model.device)
        return truncated_head(load, ids, stored=True), ids
    return (model.head, None) if dtype == model.dtype else (load.linear(["lm_head"]), None)


def _mtp(settings: Settings, checkpoint: Checkpoint, model: Qwen35, memory: Memory, dtype: torch.dtype) -> MTPDrafter:
    with staged(model.device):
        head, ids = _head(settings, checkpoint, model, dtype)
        module = MTPModule(_loader(checkpoint, model.device, dtype), checkpoint.config, model.embedding, head, ids)
    codec = DenseCodec(dtype, str(dtype).removeprefix("torch."))
    kv = KVStore(
        layers=1,
        kv_heads=checkpoint.config.num_kv_heads,
        head_dim=checkpoint.config.head_dim,
        pages=memory.kv.pages,
        codec_k=codec,
        codec_v=codec,
        dtype=dtype,
        device=model.device,
    )
    if model.device.type == "cuda":
        return card_mtp(module, kv, settings.draft_tokens, model, memory.state.slots)
    return MTPDrafter(module, kv, settings.draft_tokens)


def card_mtp(module: MTPModule, kv: KVStore, depth: int, model: Qwen35, slots: int) -> MTPDrafter:
    """The MTP drafter of a card, its graphs captured. Splits of attention share the target's room: the two never run at
    the same time, and a draft has no more rows than a step."""
    from soloist.drafting.card_mtp import CardMTPDrafter
    from soloist.engine.graphs import GraphedModel
    from soloist.models.card_mtp import CardMTP

    assert isinstance(model, GraphedModel)
    card = CardMTP(module, kv, depth, slots, model.shapes.pages, model.partials, model.mode)
    card.capture()
    return CardMTPDrafter(card, kv)


def _dflash2(
    settings: Settings, checkpoint: Checkpoint, model: Qwen35, memory: Memory, dtype: torch.dtype
) -> DFlash2Drafter:
    where = drafter_directory(settings, checkpoint)
    assert where is not None
    source = open_checkpoint(where, "drafter")
    config = source.drafter_config
    if config.hidden_size != model.config.hidden_size or config.vocab_size != model.config.vocab_size:
        raise SettingError(
            f"The drafter in {where} has hidden size {config.hidden_size} and {config.vocab_size} tokens, the model "
            f"{model.config.hidden_size} and {model.config.vocab_size}.",
            "Set DRAFTER to the drafter made for this model.",
        )
    if max(config.tap_layers) >= model.config.num_layers:
        raise SettingError(
            f"The drafter in {where} taps layer {max(config.tap_layers)} of a model with {model.config.num_layers}.",
            "Set DRAFTER to the drafter made for this model.",
        )
    with staged(model.device):
        head, ids = _head(settings, checkpoint, model, dtype)
        drafter = DFlash2(_loader(source, model.device, dtype), config, model.embedding, head, ids)
    if model.device.type == "cuda":
        return card_dflash2(drafter, memory.state.slots, settings.graphs)
    return DFlash2Drafter(drafter, memory.state.slots)


def card_dflash2(model: DFlash2, slots: int, mode: Mode = "on") -> DFlash2Drafter:
    """The DFlash2 drafter of a card, its graphs captured."""
    from soloist.drafting.card_dflash2 import CardDFlash2Drafter

    made = CardDFlash2Drafter(model, slots, mode)
    made.card.capture()
    return made
