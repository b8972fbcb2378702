"""What 4 bits cost and a draft vocabulary gains: benchmarks/demo-cpu/quantization.json.

    soloist capture MODEL --prompts calibration.txt --part lm_head --part mtp --out capture
    soloist capture MODEL --prompts calibration.txt --part drafter --drafter DRAFTER --out capture-drafter
    soloist capture MODEL --prompts held-out.txt --part mtp --seed 777 --out held-out
    python tools/measure_quantization.py MODEL DRAFTER capture capture-drafter held-out held-out.txt raw-text.txt RESULT

MODEL and DRAFTER are dense. KL and perplexity are taken on the held-out answers, acceptance on greedy answers to the
held-out prompts (chains only, no lookup), coverage on the held-out answers' tokens.
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from soloist import Engine
from soloist.bench.machine import commit, machine, versions
from soloist.checkpoint.reader import Checkpoint, open_checkpoint
from soloist.prepare import draft_vocab
from soloist.prepare.evaluate import compare
from soloist.prepare.hessians import Captured
from soloist.prepare.quantize import Gptq, quantize
from soloist.prepare.recipe import OUTPUTS, Part, PartRecipe
from soloist.prepare.texts import Reader
from soloist.sampling.params import SamplingParams

PROMPTS, TOKENS, TEXTS = 24, 64, 40
FORMS = {"rtn": ("rtn", False), "gptq, extreme scale": ("gptq", False), "gptq, searched scale": ("gptq", True)}


def make(checkpoint: Checkpoint, part: Part, form: str, capture: Path, out: Path) -> Path:
    method, search = FORMS[form]
    recipe = PartRecipe(4, "gptq" if method == "gptq" else "rtn")
    quantize(checkpoint, {part: recipe}, out, gptq=Gptq([Captured(capture)], search=search))
    return out


def acceptance(model: Path, prompts: list[list[int]], **knobs: Any) -> dict[str, float]:
    fixed = {"tree": False, "lookup": False, "block_rule": "saturated", "prefix_cache": False, "threads": 1}
    with Engine(model, **fixed, **knobs) as engine:
        params = SamplingParams(max_tokens=TOKENS, temperature=0.0, stop_ids=engine.engine.eos_ids)
        stats = [answer.stats for answer in engine.generate(prompts, params)]
    return {
        "acceptance": sum(s.accepted for s in stats) / sum(s.drafted for s in stats),
        "tokens_per_step": sum(s.output_tokens for s in stats) / sum(s.steps for s in stats),
    }


def main() -> None:
    model, drafter, capture, capture_drafter, held, prompt_file, raw_file, result = map(Path, sys.argv[1:])
    torch.set_grad_enabled(False)
    target, block = open_checkpoint(model), open_checkpoint(drafter, "drafter")
    reader = Reader(model)
    texts = [json.loads(line)["ids"] for line in (held / OUTPUTS).read_text().splitlines()][:TEXTS]
    prompts = reader.prompts(prompt_file, enable_thinking=False)[:PROMPTS]
    vocab = target.config.vocab_size
    own, spoken = draft_vocab.read_counts(capture), draft_vocab.read_counts(held)
    raw = Counter(token for ids in reader.texts(raw_file, 1 << 20, 1 << 40) for token in ids)
    always = draft_vocab.control_ids(reader.tokenizer.added, target.config.eos_ids)
    found: dict[str, Any] = {
        "command": "python tools/measure_quantization.py (see its first lines)",
        "model": "Soloist-Demo-27M bf16",
        "machine": machine(),
        "versions": versions(),
        "commit": commit(),
    }
    with tempfile.TemporaryDirectory() as scratch:
        there = Path(scratch)
        found["head int4"] = {
            form: asdict(
                compare(
                    target,
                    open_checkpoint(make(target, "lm_head", form, capture, there / f"head {i}")),
                    texts,
                    torch.device("cpu"),
                )
            )
            for i, form in enumerate(FORMS)
        }
        print(found["head int4"], flush=True)
        mtp = {"bf16": model} | {
            form: make(target, "mtp", form, capture, there / f"mtp {form}") for form in FORMS if "extreme" not in form
        }
        found["mtp int4"] = {form: acceptance(path, prompts, spec="mtp") for form, path in mtp.items()}
        print(found["mtp int4"], flush=True)
        blocks = {"bf16": drafter} | {
            form: make(block, "drafter", form, capture_drafter, there / f"block {form}")
            for form in FORMS
            if "extreme" not in form
        }
        found["dflash2 int4"] = {
            form: acceptance(model, prompts, spec="dflash2", drafter=path) for form, path in blocks.items()
        }
        print(found["dflash2 int4"], flush=True)
        found["draft vocabulary"] = []
        for size in (256, 1024, 4096, vocab):
            row: dict[str, Any] = {"size": size}
            for name, counts in (("own answers", own), ("raw text", raw)):
                ids = draft_vocab.choose(counts, always, size, vocab)
                row[name] = {"coverage": draft_vocab.coverage(spoken, ids)}
                if size < vocab and (name == "own answers" or size == 1024):
                    copy = Path(shutil.copytree(model, there / f"{size} {name}", copy_function=shutil.copyfile))
                    copy.chmod(0o755)
                    draft_vocab.write(copy, ids)
                    row[name] |= acceptance(copy, prompts, spec="mtp")
            found["draft vocabulary"].append(row)
            print(row, flush=True)
    result.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
