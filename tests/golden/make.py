"""Writes demo.json: what the bundled model answers according to the oracles, in fp32.

Run by hand after the bundle changed:  PYTHONPATH=src:tests python tests/golden/make.py
Per prompt: rendered ids, 200 greedy ids of transformers (stop ids do not end them), the smallest top-2 logit gap.
For the first `PROBED` prompts also a probe in the middle of the answer: top logits, hidden norms, MTP and DFlash2
proposals.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from jinja2 import Environment
from tokenizers import Tokenizer

from oracle.dflash2 import Dflash2Oracle
from oracle.mtp import MtpOracle
from oracle.target import States, greedy, load_target, states
from soloist import demo
from soloist.checkpoint.reader import open_checkpoint
from soloist.checkpoint.sidecars import find_template

PROMPTS = (
    "Hello, who are you?",
    "Write a short story about a fox.",
    "Explain what a computer is.",
    "Give me five tips for better sleep.",
    "What is a river?",
    "Write a short letter to a friend about a birthday party.",
    "Repeat the following text exactly:\n\nAll cats like warm milk and soft beds.",
    "Repeat the following text exactly:\n\nThe old bridge over the river was built in 1887 by 42 workers.",
    "Tell me about whales.",
    "How can I learn to cook?",
    "Write a Python function that adds two numbers.",
    "What is 12 + 30?",
    "Why is the sky blue?",
    "Describe a garden in spring.",
    "What should I pack for a trip to the sea?",
    "Name three animals that can fly.",
    "Write a poem about rain.",
    "What does a teacher do?",
    "How do I clean a window?",
    "What is the capital of Denmark?",
)
TOKENS = 200
PROBED = 8
DEPTH = 12
TOP = 16


def _round(values: torch.Tensor) -> list[Any]:
    return [[round(v, 5) for v in row] for row in values.tolist()]


def _probe(ids: list[int], found: States, mtp: MtpOracle, dflash2: Dflash2Oracle) -> dict[str, Any]:
    following = int(found.logits[-1].argmax())
    features = torch.cat([found.layers[i] for i in dflash2.config.tap_layers], -1)
    block = dflash2.draft(features, following)
    top = found.logits[-4:].topk(TOP, -1)
    return {
        "length": len(ids),
        "next": following,
        "top_ids_last4": top.indices.tolist(),
        "top_logits_last4": _round(top.values),
        "hidden_norms_last4": [round(v, 5) for v in found.hidden[-4:].norm(dim=-1).tolist()],
        "tap_norms_last": [round(found.layers[i][-1].norm().item(), 5) for i in dflash2.config.tap_layers],
        "mtp_drafts": mtp.draft(found.hidden, [*ids[1:], following], 4),
        "dflash2_drafts": block.drafts,
        "dflash2_candidates": block.candidates.tolist(),
        "dflash2_scores": _round(block.scores),
    }


def main() -> None:
    torch.set_grad_enabled(False)
    directory = demo.path()
    model, mtp = load_target(directory), MtpOracle(directory)
    dflash2 = Dflash2Oracle(demo.drafter_path(), directory)
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    template = Environment().from_string(find_template(directory) or "")
    stop = open_checkpoint(directory).config.eos_ids
    entries = []
    for number, prompt in enumerate(PROMPTS):
        messages = [{"role": "user", "content": prompt}]
        text = template.render(messages=messages, add_generation_prompt=True, enable_thinking=False)
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        answer = greedy(model, ids, TOKENS)
        whole = states(model, ids + answer)
        best = whole.logits[len(ids) - 1 : -1].topk(2, -1).values
        entry: dict[str, Any] = {
            "prompt": prompt,
            "prompt_ids": ids,
            "greedy_ids": answer,
            "smallest_gap": round(float((best[:, 0] - best[:, 1]).min()), 6),
        }
        if number < PROBED:
            probed = ids + answer[:DEPTH]
            entry["probe"] = _probe(probed, states(model, probed), mtp, dflash2)
        entries.append(entry)
        print(len(answer), entry["smallest_gap"], prompt[:40], flush=True)
    result = {"enable_thinking": False, "dtype": "float32", "stop_ids": list(stop), "entries": entries}
    target = Path(__file__).with_name("demo.json")
    text = json.dumps(result, ensure_ascii=False, separators=(",", ":")).replace('{"prompt"', '\n{"prompt"')
    target.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
