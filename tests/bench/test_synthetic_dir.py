"""A random directory is an ordinary one: it opens without a remark, drafts with both drafters and keeps E1."""

from dataclasses import replace
from pathlib import Path

from cache.arms import Arm, text
from soloist.bench.synthetic import dflash2_27b, qwen38_27b
from soloist.bench.synthetic_dir import write_synthetic
from soloist.checkpoint.reader import open_checkpoint


def test_a_small_one_is_served(tmp_path: Path) -> None:
    small = replace(
        qwen38_27b(8), hidden_size=256, intermediate_size=256, vocab_size=16384, num_heads=4, num_kv_heads=2,
        head_dim=64, rope_dim=16, linear_key_heads=2, linear_value_heads=4, linear_key_dim=32, linear_value_dim=32,
        max_position=4096, eos_ids=(16362,),
    )  # fmt: skip
    drafter = replace(dflash2_27b(small), num_layers=1, num_heads=4, num_kv_heads=2, head_dim=64, rope_dim=64)
    write_synthetic(tmp_path / "model", small, drafter)
    checkpoint = open_checkpoint(tmp_path / "model")
    assert checkpoint.notes == () and checkpoint.has_mtp and checkpoint.has_draft_head
    assert (checkpoint.config.layer_types, checkpoint.config.rope_dim) == (small.layer_types, small.rope_dim)
    found = open_checkpoint(tmp_path / "model" / "dflash2", "drafter")
    assert found.notes == () and replace(found.drafter_config, quantization=None) == drafter
    answers = set()
    for spec in ("none", "mtp", "dflash2"):
        with Arm(tmp_path / "model", device="cpu", max_len="512", spec=spec, lookup="0") as arm:
            answers.add(arm.ask(text(90, 16000, 1)).bits)
            assert spec == "none" or arm.engine.counters["drafted"] > 0
    assert len(answers) == 1


def test_a_hollow_one_has_headers_sizes_and_holes(tmp_path: Path) -> None:
    small = replace(qwen38_27b(4), vocab_size=4096, eos_ids=(4090,))
    write_synthetic(tmp_path / "whole", small, hollow=True)
    checkpoint = open_checkpoint(tmp_path / "whole", need_tokenizer=False)
    assert checkpoint.config.hidden_size == 5120 and checkpoint.has_mtp and checkpoint.notes == ()
    files = list(tmp_path.glob("whole/**/*.safetensors"))
    assert sum(f.stat().st_size for f in files) > 1 << 30
    assert sum(f.stat().st_blocks * 512 for f in files) < 32 << 20
