"""The estimate for vLLM on numbers worked out by hand, and the command."""

from __future__ import annotations

import json
from dataclasses import replace

from typer.testing import CliRunner

from soloist.checkpoint.config import read_model_config
from soloist.cli import app
from soloist.demo import path
from soloist.scaleout.plan import UTILISATION, WORKSPACE, estimate

GIB = 1 << 30
DEMO = read_model_config(path())
# Shapes of the 27B, of which spec sheets give 144 MiB of fp32 state and 64 KiB of bf16 KV per token.
BIG = replace(
    DEMO,
    layer_types=("linear_attention",) * 48 + ("full_attention",) * 16,
    num_layers=64,
    num_heads=24,
    num_kv_heads=4,
    head_dim=256,
    linear_key_heads=16,
    linear_value_heads=48,
    linear_key_dim=128,
    linear_value_dim=128,
)


def test_state_and_kv_of_the_27b_shape():
    made = estimate(BIG, 16 * GIB, card=24 * GIB, cards=1, kv="bfloat16", state="float32", drafts=0)
    assert made.kv_per_token == 64 * 1024
    assert made.state_per_request == 144 * 2**20 + 3 * 10240 * 48 * 2
    assert made.pool == int(UTILISATION * 24 * GIB) - 16 * GIB - WORKSPACE
    assert made.residents(4096) == made.pool // (made.state_per_request + 4096 * 64 * 1024)


def test_drafts_multiply_the_state_and_cards_divide():
    one = estimate(BIG, 16 * GIB, card=24 * GIB, cards=1, kv="bfloat16", state="float32", drafts=0)
    drafted = estimate(BIG, 16 * GIB, card=24 * GIB, cards=1, kv="fp8_e4m3", state="float32", drafts=7)
    assert drafted.state_per_request == 8 * one.state_per_request and drafted.kv_per_token * 2 == one.kv_per_token
    two = estimate(BIG, 16 * GIB, card=24 * GIB, cards=2, kv="bfloat16", state="float32", drafts=0)
    assert two.weights * 2 == one.weights and two.kv_per_token * 2 == one.kv_per_token
    assert two.state_per_request * 2 == one.state_per_request
    small = estimate(BIG, 16 * GIB, card=16 * GIB, cards=1, kv="bfloat16", state="float32", drafts=0)
    assert not small.fits and small.residents(1024) == 0


def test_command():
    arguments = ["plan", "demo", "--engine", "vllm", "--card", "24GB", "--used", "1GB", "--tensor-parallel", "2"]
    done = CliRunner().invoke(app, [*arguments, "--json"])
    assert done.exit_code == 0, done.output
    made = json.loads(done.stdout)
    assert made["cards"] == 2 and made["residents"]["4096"] > 0
    done = CliRunner().invoke(app, [*arguments, "--ctx", "huge"])
    assert done.exit_code == 2 and "KVarN" in done.stderr
