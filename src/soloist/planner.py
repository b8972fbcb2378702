"""What fits on a card, before anything is loaded: a pure function from shapes, weight bytes and knobs to a plan.

Everything the engine allocates is one `Item`; what is left becomes the page pool. The same function sizes the pool
at boot, with the free memory that the driver reports in place of the card's size. Units are bytes and tokens.

What can go wrong: a "24 GB" card has 24 GiB, of which the driver and a CUDA context take their part; both are
items here. Per-token and per-request bytes are arithmetic (spec/model.md section 6, spec/kv_formats.md section 1).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from soloist.cache.codecs import bytes_per_token, token_codec
from soloist.cache.pages import PAGE, pages_for
from soloist.checkpoint.config import DrafterConfig, ModelConfig

MIB, GIB = 1 << 20, 1 << 30

DRIVER = 330 * MIB  # a 24 GiB card shows 23.68 GiB to programs
CONTEXT = 450 * MIB  # CUDA context, cuBLAS handles and loaded kernels of this process
GRAPHS = 256 * MIB  # one captured graph per row bucket, sharing one pool
MAX_ROWS = 64  # rows of all requests in one step: twice the largest row tile of the 4-bit products
SPLIT = 256  # tokens per attention split (ops/triton/attention.py)
DRAFT_ROWS = 64  # settled rows a drafter takes in at once (models/card_mtp.py)
KVARN_WINDOW = 400  # 16-bit tokens a request keeps beside its packed tiles
CONTEXTS = (128, 4096, 16384, 65536)
BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "fp32": 4, "fp16": 2, "bf16": 2}


@dataclass(frozen=True)
class Choices:
    """The knobs that cost or save memory. `spec` is what drafts: none, mtp or dflash2.

    tower    bytes of the vision tower, 0 where it is not loaded; offload: they stay on the host
    pixels   of the largest picture; pictures: how many a prompt may hold
    """

    spec: str = "none"
    kv_format: str = "bf16"
    kv_format_v: str = "same"
    state_dtype: str = "float16"
    dtype: str = "bfloat16"
    max_seqs: int = 8
    verify_rows: int = 16
    reserve: int = 256 * MIB
    prefill_rows: int = 512
    tower: int = 0
    offload: bool = False
    pixels: int = 0
    pictures: int = 1


@dataclass(frozen=True)
class Item:
    """One line of the plan. `why` says what it is made of."""

    name: str
    nbytes: int
    why: str


@dataclass(frozen=True)
class Plan:
    """What the card holds. `pool_bytes` may be negative: then the model does not fit and by how much."""

    card: int
    used: int
    items: tuple[Item, ...]
    token_bytes: int
    pool_bytes: int
    pool_tokens: int
    max_seqs: int
    max_context: int

    @property
    def fits(self) -> bool:
        return self.pool_tokens >= 2 * PAGE

    def residents(self, context: int) -> int:
        """Requests of `context` tokens that pool and slots hold together; 0 beyond the longest context."""
        if context > self.max_context:
            return 0
        return min(self.max_seqs, self.pool_tokens // (pages_for(context + 1) * PAGE))


@dataclass(frozen=True)
class Saving:
    """One knob turned: what the pool would be."""

    knob: str
    pool_tokens: int
    gained: int


def kv_token_bytes(config: ModelConfig, choices: Choices) -> int:
    """Bytes of one token in all pages: the target's attention layers, and the MTP layer where it drafts."""
    key = choices.kv_format
    value = key if choices.kv_format_v == "same" else choices.kv_format_v
    heads, dim = config.num_kv_heads, config.head_dim
    if key == "kvarn":
        from soloist.cache.tiles import RecordCodec

        layer = bytes_per_token(RecordCodec(), heads, dim)
    else:
        layer = sum(bytes_per_token(token_codec(name), heads, dim) for name in (key, value))
    target = len(config.attention_layers) * layer
    mtp = 2 * heads * dim * BYTES[choices.dtype] if choices.spec == "mtp" else 0
    return target + mtp


def slot_items(config: ModelConfig, drafter: DrafterConfig | None, choices: Choices) -> list[Item]:
    """What every request slot costs, whatever its context; all slots are allocated at boot."""
    n, act = choices.max_seqs, BYTES[choices.dtype]
    layers = len(config.linear_layers)
    hv, dk, dv = config.linear_value_heads, config.linear_key_dim, config.linear_value_dim
    state = layers * hv * dk * dv * BYTES[choices.state_dtype]
    conv = layers * config.conv_channels * (config.conv_kernel - 1) * act
    items = [
        Item("recurrent state", n * state, f"{n} slots x {state / MIB:.1f} MiB ({choices.state_dtype})"),
        Item("convolution state", n * conv, f"{n} slots x {conv / MIB:.1f} MiB"),
    ]
    if choices.spec == "dflash2" and drafter is not None:
        window = drafter.num_layers * 2 * drafter.num_kv_heads * drafter.head_dim * drafter.window * act
        items.append(Item("drafter context", n * window, f"{n} slots x a window of {drafter.window} tokens"))
    if choices.kv_format == "kvarn":
        raw = KVARN_WINDOW * len(config.attention_layers) * 2 * config.num_kv_heads * config.head_dim * act
        items.append(Item("16-bit tiles", n * raw, f"{n} slots x {KVARN_WINDOW} tokens"))
    return items


def weight_items(config: ModelConfig, parts: Mapping[str, int], drafter_bytes: int, choices: Choices) -> list[Item]:
    """Weights by part as they stand on the device. `parts` are in-memory bytes as the checkpoint stores them."""
    body = sum(parts.get(part, 0) for part in ("attention", "deltanet", "mlp", "norms"))
    # Both as stored; a tied head is a product of its own, laid out for it.
    table = parts.get("embed", 0)
    head = table if config.tied else parts.get("lm_head", 0)
    items = [
        Item("layers", body, f"{config.num_layers} layers"),
        Item("embedding", table, f"{config.vocab_size} rows"),
        Item("head", head, f"{config.vocab_size} rows"),
    ]
    if choices.spec == "mtp":
        items.append(Item("MTP module", parts.get("mtp", 0) + parts.get("draft_head", 0), "module and draft head"))
    if choices.spec == "dflash2":
        items.append(Item("DFlash2 drafter", drafter_bytes + parts.get("draft_head", 0), "its weights and draft head"))
    return items


def vision_items(config: ModelConfig, choices: Choices) -> list[Item]:
    """The tower, and what pictures need while it runs and until their requests end."""
    if not choices.tower or config.vision is None:
        return []
    v, act = config.vision, BYTES[choices.dtype]
    width, ffn = int(v.get("hidden_size", 1152)), int(v.get("intermediate_size", 4304))
    patch, merge = int(v.get("patch_size", 16)), int(v.get("spatial_merge_size", 2))
    patches = choices.pixels // patch**2
    rows = choices.max_seqs * choices.pictures * (patches // merge**2) * config.hidden_size * act
    # A patch's pixels in fp32 and as the tower takes them (two frames each), then residual, q, k, v and the MLP.
    running = patches * (3 * 2 * patch**2 * (4 + act) + (6 * width + ffn) * act)
    merged = width * merge**2
    streamed = (
        max(merged * (merged + config.hidden_size), 4 * width**2 + 2 * width * ffn) * act if choices.offload else 0
    )
    items = [] if choices.offload else [Item("vision tower", choices.tower, "all its weights")]
    return [
        *items,
        Item("pictures", rows + running + streamed, f"of {choices.pixels:,} pixels, {choices.pictures} a prompt"),
    ]


def step_rows(choices: Choices) -> int:
    """Rows of the largest verify step, all requests together."""
    return max(choices.verify_rows, min(choices.max_seqs * choices.verify_rows, MAX_ROWS))


def step_items(config: ModelConfig, choices: Choices, taps: int = 0) -> list[Item]:
    """Buffers of the largest verify step (`models/card.py`) and of a prefill slice. `taps`: layers a drafter reads."""
    t, act = step_rows(choices), BYTES[choices.dtype]
    hk, hv = config.linear_key_heads, config.linear_value_heads
    dk, dv, kv = config.linear_key_dim, config.linear_value_dim, config.num_kv_heads * config.head_dim
    queries = config.num_heads * config.head_dim
    deltas, attentions = len(config.linear_layers), len(config.attention_layers)
    # Kept until the accepted path is known: inputs of the convolution, keys, values and gates in fp32, and the rows of
    # attention as they will be stored (KVarN packs later and keeps them as computed).
    target = replace(choices, spec="none")
    stored = attentions * 2 * kv * act if choices.kv_format == "kvarn" else kv_token_bytes(config, target)
    delta = (config.conv_channels + hv * dv) * act + (hk * dk + hv * dv + 2 * hv) * 4
    record = t * (deltas * delta + stored)
    row = (
        (3 + max(1, taps)) * config.hidden_size
        + 3 * config.intermediate_size
        + 2 * (queries + kv)
        + queries
        + max(queries, hv * dv)
        + config.vocab_size
        + 2 * hv
    )
    branches = (t // 2 + 1) * hv * dk * dv * 4
    verify = t * (row * act + (hv * dv + hk * dk) * 4) + branches
    prompt = choices.prefill_rows * prompt_row_bytes(config, choices, taps)
    return [
        Item("record", record, f"{t} rows of {deltas + attentions} layers"),
        Item("workspace", verify + prompt, f"{t} rows, and {choices.prefill_rows} of a prompt"),
    ]


def prompt_row_bytes(config: ModelConfig, choices: Choices, taps: int = 0) -> int:
    """Most bytes that a row of a prompt slice has in use at once: its residual stream, its taps, and the larger of an
    MLP and of a DeltaNet layer, whose heads are expanded and kept in fp32 with the products of their chunks of 64."""
    act, hidden = BYTES[choices.dtype], config.hidden_size
    hk, hv = config.linear_key_heads, config.linear_value_heads
    dk, dv = config.linear_key_dim, config.linear_value_dim
    mlp = (4 * config.intermediate_size + hidden) * act
    projected = (2 * config.conv_channels + hv * dv) * act
    delta = projected + (2 * 2 * hk * dk + 3 * hv * dk + 4 * hv * dv + hv * PAGE) * 4
    return max(mlp, delta) + (4 + 2 * taps) * hidden * act


def draft_items(config: ModelConfig, drafter: DrafterConfig | None, choices: Choices) -> list[Item]:
    """Buffers of drafting on a card (`models/card_mtp.py`, `models/card_dflash2.py`), and of what a step hands over."""
    n, act = choices.max_seqs, BYTES[choices.dtype]
    taps = len(drafter.tap_layers) if drafter is not None else 0
    # Features of the kept rows, and a key per group of 64 logits.
    kept = step_rows(choices) * ((1 + max(1, taps)) * config.hidden_size * act + config.vocab_size // 64 * 4)
    if choices.spec == "mtp":
        rows = max(DRAFT_ROWS, 2 * n)
        queries, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        row = 7 * config.hidden_size + 4 * queries + 4 * kv + 3 * config.intermediate_size
        levels = n * (2 * 16 * kv + 2 * config.hidden_size + 2 * config.vocab_size)
        kept += (rows * row + levels) * act
    if choices.spec == "dflash2" and drafter is not None:
        d = drafter
        splits = -(-d.window // SPLIT)
        ring = d.num_layers * 2 * d.num_kv_heads * d.head_dim * d.window * act  # of the slot that takes padding
        attended = n * d.block_size * splits * d.num_heads * (d.head_dim + 2) * 4
        queries, kv = d.num_heads * d.head_dim, d.num_kv_heads * d.head_dim
        coefficients = 4 * d.conv_taps * d.hidden_size // d.conv_group
        row = 4 * d.hidden_size + coefficients + 3 * queries + 3 * kv + 3 * d.intermediate_size
        proposed = (d.block_size - 1) * (d.hidden_size + d.selector_rank + config.vocab_size)
        context = (taps + 2) * d.hidden_size + 2 * d.num_layers * kv
        kept += ring + attended + (n * (d.block_size * row + proposed) + DRAFT_ROWS * context) * act
    return [Item("drafting", kept, "buffers of drafts and of what a step hands over")]


def split_bytes(config: ModelConfig, choices: Choices) -> tuple[int, float]:
    """Partial results of attention splits on a card: (fixed bytes, bytes per pool token)."""
    entry = config.num_heads * (config.head_dim + 2) * 4
    fixed = (choices.verify_rows * 2 * choices.max_seqs + step_rows(choices)) * entry
    return fixed, choices.verify_rows * entry / SPLIT


def pool_pages(config: ModelConfig, choices: Choices, left: int) -> int:
    """Pages that `left` bytes hold, with the splits that attention over them needs."""
    fixed, per_token = split_bytes(config, choices)
    group = 2 if choices.kv_format == "kvarn" else 1
    page = (kv_token_bytes(config, choices) + per_token) * PAGE
    return max(0, int((left - fixed) // (page * group))) * group


def plan(
    config: ModelConfig,
    parts: Mapping[str, int],
    choices: Choices,
    *,
    card: int,
    used: int = 0,
    drafter: DrafterConfig | None = None,
    drafter_bytes: int = 0,
) -> Plan:
    """The plan for a card of `card` bytes of which other programs hold `used`."""
    items = [
        *weight_items(config, parts, drafter_bytes, choices),
        *slot_items(config, drafter, choices),
        *step_items(config, choices, len(drafter.tap_layers) if drafter is not None else 0),
        *draft_items(config, drafter, choices),
        *vision_items(config, choices),
        Item("driver", DRIVER, "not visible to programs"),
        Item("CUDA context", CONTEXT, "this process, kernels included"),
        Item("graphs", GRAPHS, "captured verify steps"),
        Item("reserve", choices.reserve, "kept free"),
    ]
    left = card - used - sum(item.nbytes for item in items)
    pages = pool_pages(config, choices, left)
    fixed, per_token = split_bytes(config, choices)
    splits = Item("attention splits", fixed + int(pages * PAGE * per_token), f"{per_token:.0f} B per pool token")
    group = 2 if choices.kv_format == "kvarn" else 1
    context = max(0, min(config.max_position, (pages - group) * PAGE - 1))
    return Plan(
        card,
        used,
        (*items, splits),
        kv_token_bytes(config, choices),
        left - splits.nbytes,
        pages * PAGE,
        choices.max_seqs,
        context,
    )


def savings(
    config: ModelConfig,
    parts: Mapping[str, int],
    choices: Choices,
    *,
    card: int,
    used: int = 0,
    drafter: DrafterConfig | None = None,
    drafter_bytes: int = 0,
) -> list[Saving]:
    """Which knob buys what: the plan again with one knob turned, best first. Only those that gain are listed."""
    turned = {
        "STATE_DTYPE=float16": {"state_dtype": "float16"},
        "KV_FORMAT=fp8": {"kv_format": "fp8", "kv_format_v": "same"},
        "KV_FORMAT=int8": {"kv_format": "int8", "kv_format_v": "same"},
        "KV_FORMAT=kvarn": {"kv_format": "kvarn", "kv_format_v": "same"},
        f"MAX_SEQS={max(1, choices.max_seqs // 2)}": {"max_seqs": max(1, choices.max_seqs // 2)},
        "SPEC=none": {"spec": "none"},
        "SPEC=mtp": {"spec": "mtp"},
    }
    if not parts.get("mtp"):
        del turned["SPEC=mtp"]
    if choices.tower:
        turned["VISION_OFFLOAD=1"] = {"offload": True}
    sizes = {"card": card, "used": used, "drafter_bytes": drafter_bytes}
    now = plan(config, parts, choices, drafter=drafter, **sizes).pool_tokens
    found = []
    for knob, change in turned.items():
        there = plan(config, parts, replace(choices, **change), drafter=drafter, **sizes).pool_tokens  # type: ignore[arg-type]
        if there > now:
            found.append(Saving(knob, there, there - now))
    return sorted(found, key=lambda saving: -saving.gained)
