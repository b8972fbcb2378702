"""The whole recipe on real weights: quantised by the commands, served with each drafter, loaded by transformers.

`tools/round_trip.py` does the same with vLLM as a third reader; its outcome is benchmarks/peers/round-trip.json.
"""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType

import pytest
from safetensors.torch import save_file

from soloist import Engine, demo
from soloist.checkpoint.reader import open_checkpoint
from soloist.prepare.capture import Target, capture
from soloist.scaleout.dense import dense_copy
from soloist.server.template import ChatTemplate
from soloist.server.tokenizer import Tokenizer

TEXTS = ("What is the moon?", "Write a short story about a fox.", "Name three facts about bread.")


def _tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location("round_trip", Path(__file__).parents[2] / "tools" / "round_trip.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _dense_drafter(out: Path) -> Path:
    """The bundled drafter, dequantised."""
    opened = open_checkpoint(demo.drafter_path(), "drafter")
    out.mkdir()
    tensors = {f"{name}.weight": opened.weight(name).dequantize() for name in opened.modules}
    tensors |= {name: opened.tensor(name) for name in opened.layout.tensors}
    save_file(tensors, out / "model.safetensors", {"format": "pt"})
    config = json.loads((opened.directory / "config.json").read_text())
    del config["quantization_config"]
    (out / "config.json").write_text(json.dumps(config))
    return out


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_one_directory_in_two_engines(tmp_path: Path) -> None:
    tool = _tool()
    model, drafter = dense_copy(demo.path(), tmp_path / "cache"), _dense_drafter(tmp_path / "dense-drafter")
    template, tokenizer = ChatTemplate.load(model), Tokenizer.load(model)
    asked = {"add_generation_prompt": True, "tools": None, "enable_thinking": False}
    prompts = [tokenizer.encode(template.render([{"role": "user", "content": text}], asked)) for text in TEXTS]
    captures = (tmp_path / "c", tmp_path / "c-drafter")
    runs: list[tuple[Path, list[Target], dict[str, object]]] = [
        (captures[0], ["lm_head", "mtp"], {"spec": "mtp"}),
        (captures[1], ["drafter"], {"spec": "dflash2", "drafter": drafter}),
    ]
    for out, parts, knobs in runs:
        with Engine(model, prefix_cache=False, threads=1, max_len=512, **knobs) as engine:
            capture(engine, prompts, out, parts, tokens=96)
    fast, block = tool.make(model, drafter, captures, tmp_path)
    opened = open_checkpoint(fast)
    bits = {row.part: row.bits for row in opened.summary() if row.form == "pack-quantized"}
    assert (bits["mlp"], bits["lm_head"], bits["embed"], bits["mtp"], bits["draft_head"]) == (4, 4, 8, 4, 4)
    assert opened.notes == () and open_checkpoint(block, "drafter").modules["fc"].bits == 4
    plain = tool.soloist(fast, prompts, spec="none", lookup=False)
    for knobs in ({"spec": "mtp"}, {"spec": "dflash2", "drafter": block}):
        drafted = tool.soloist(fast, prompts, lookup=False, **knobs)
        assert [a["ids"] for a in drafted] == [a["ids"] for a in plain]
        assert sum(a["steps"] for a in drafted) < 0.8 * sum(a["steps"] for a in plain)
    theirs = tool.transformers(fast, prompts, set(opened.config.eos_ids))
    for ours, other in zip(plain, theirs, strict=True):
        outcome = tool.judge(ours, other, tool.NEAR["transformers"])
        assert outcome.get("equal") or outcome.get("near_tie"), outcome
