"""What would fit on vLLM: `soloist plan --engine vllm`. An estimate from headers; vLLM itself profiles at start-up.

Weights, KV heads and value heads are split over the cards. A hybrid's recurrent state takes 1 + k slots per request
under speculation with k drafts, which is what usually limits the residents there.
"""

from __future__ import annotations

from dataclasses import dataclass

from soloist.checkpoint.config import ModelConfig

UTILISATION = 0.92  # vLLM's default share of each card
WORKSPACE = 1 << 30  # activations, graphs and fragmentation; vLLM measures its own
KV_BYTES = {"bfloat16": 2, "float16": 2, "auto": 2, "fp8_e4m3": 1, "int8_per_token_head": 1}
STATE_BYTES = {"float32": 4, "float16": 2}


@dataclass(frozen=True)
class Estimate:
    """Bytes are per card. `pool` is what is left for pages and states."""

    cards: int
    weights: int
    pool: int
    kv_per_token: int
    state_per_request: int
    context: int

    @property
    def fits(self) -> bool:
        return self.pool > self.state_per_request

    def residents(self, context: int) -> int:
        """Requests of that many tokens that fit together."""
        return max(0, self.pool // (self.state_per_request + context * self.kv_per_token))

    def longest(self) -> int:
        """Tokens of the longest single request, the model's own limit included."""
        return max(0, min(self.context, (self.pool - self.state_per_request) // self.kv_per_token))


def estimate(
    config: ModelConfig, weights: int, *, card: int, cards: int, kv: str, state: str, drafts: int, used: int = 0
) -> Estimate:
    """`weights`: bytes of the whole checkpoint; `card`, `used`: bytes of one card; `kv`: vLLM's cache dtype."""
    heads = max(1, config.num_kv_heads // cards)
    kv_per_token = len(config.attention_layers) * 2 * heads * config.head_dim * KV_BYTES[kv]
    values = config.linear_value_heads // cards * config.linear_key_dim * config.linear_value_dim * STATE_BYTES[state]
    conv = (config.conv_kernel - 1) * config.conv_channels // cards * 2
    state_per_request = len(config.linear_layers) * (values + conv) * (1 + drafts)
    per_card = -(-weights // cards)
    pool = int(UTILISATION * card) - used - per_card - WORKSPACE
    return Estimate(cards, per_card, max(0, pool), kv_per_token, state_per_request, config.max_position)


def report(made: Estimate, contexts: tuple[int, ...]) -> str:
    """The table `soloist plan --engine vllm` prints."""
    mib = 1 << 20
    share = f"{UTILISATION:.0%} less weights and 1 GiB workspace"
    rows = [
        f"cards                  {made.cards}",
        f"weights per card       {made.weights / mib:,.0f} MiB",
        f"left for requests      {made.pool / mib:,.0f} MiB per card ({share})",
        f"state per request      {made.state_per_request / mib:,.1f} MiB",
        f"KV per token           {made.kv_per_token / 1024:,.1f} KiB",
        f"longest request        {made.longest():,} tokens",
        *(f"residents at {context:>7,}   {made.residents(context):,}" for context in contexts),
        "An estimate: vLLM measures its own workspace when it starts.",
    ]
    return "\n".join(rows)
