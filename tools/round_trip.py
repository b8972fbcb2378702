"""One quantised directory in three engines: does each greedy answer agree, or part at a near-tie?

    soloist capture MODEL --prompts CALIBRATION --part lm_head --part mtp --out CAPTURE
    soloist capture MODEL --drafter DRAFTER --prompts CALIBRATION --part drafter --out CAPTURE-DRAFTER
    python tools/round_trip.py MODEL DRAFTER CAPTURE CAPTURE-DRAFTER --vllm PYTHON --out RESULT

MODEL and DRAFTER are dense. The whole recipe is made by the commands a user types (int4 GPTQ body, head, MTP module and
drafter, int8 embedding, draft vocabulary); Soloist serves the result without drafts, with MTP and with DFlash2; then
vLLM's CPU build (bfloat16) and transformers with compressed-tensors (float32) load the same directory. They read the
dense embedding and Soloist the int8 one beside it, so a difference is judged by the log-probabilities: at the first
token where two answers part, the other's candidate must lie within NEAR nats of one's own.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from soloist import Engine
from soloist.bench.machine import commit, machine, versions
from soloist.bench.promptset import chat_prompts
from soloist.checkpoint.reader import open_checkpoint
from soloist.sampling.params import SamplingParams
from soloist.server.template import ChatTemplate
from soloist.server.tokenizer import Tokenizer

TOKENS = 64
NEAR = {"vllm": 0.25, "transformers": 0.1}
"""Nats between two candidates that count as a tie: the int8 embedding's share, and bfloat16's on top of it."""
MARK = "RESULT"

VLLM = """
import json, sys
from vllm import LLM, SamplingParams
if __name__ == "__main__":
    asked = json.load(sys.stdin)
    more = {"speculative_config": {"method": "mtp", "num_speculative_tokens": 3}} if asked["drafts"] else {}
    llm = LLM(model=asked["model"], dtype="bfloat16", enforce_eager=True, max_model_len=1024, max_num_seqs=1,
              enable_prefix_caching=False, **more)
    params = SamplingParams(temperature=0, max_tokens=asked["tokens"], logprobs=None if asked["drafts"] else 5)
    answers = []
    for ids in asked["prompts"]:
        out = llm.generate({"prompt_token_ids": ids}, params, use_tqdm=False)[0].outputs[0]
        top = [{str(t): v.logprob for t, v in entry.items()} for entry in out.logprobs or []]
        answers.append({"ids": list(out.token_ids), "top": top})
    print("RESULT" + json.dumps(answers))
"""


def make(model: Path, drafter: Path, captures: tuple[Path, Path], scratch: Path) -> tuple[Path, Path]:
    """The whole recipe by the commands a user types; returns the two directories."""
    fast, block = scratch / "fast", scratch / "drafter"
    parts = ("body=int4:gptq", "lm_head=int4:gptq", "embed=int8", "mtp=int4:gptq")
    commands = [
        ["quantize", str(model), *(word for part in parts for word in ("--part", part)), "--capture", str(captures[0]),
         "--text", str(captures[0] / "outputs.jsonl"), "--tokens", "16384", "--out", str(fast)],
        ["draft-vocab", str(fast), "--capture", str(captures[0]), "--coverage", "0.975"],
        ["quantize", str(drafter), "--part", "drafter=int4:gptq", "--capture", str(captures[1]), "--out", str(block)],
    ]  # fmt: skip
    for command in commands:
        if command[0] == "quantize" and Path(command[-1]).exists():
            continue
        subprocess.run([sys.executable, "-m", "soloist", *command], check=True)
    return fast, block


def soloist(model: Path, prompts: list[list[int]], **knobs: Any) -> list[dict[str, Any]]:
    """Greedy answers: ids and the top five log-probabilities of each token."""
    with Engine(model, prefix_cache=False, threads=1, max_seqs=1, max_len=1024, **knobs) as engine:
        params = SamplingParams(max_tokens=TOKENS, temperature=0.0, logprobs=5, stop_ids=engine.engine.eos_ids)
        answers = []
        for output in engine.generate(prompts, params):
            answers.append({"ids": list(output.tokens), "steps": output.stats.steps})
    return answers


def transformers(model: Path, prompts: list[list[int]], stops: set[int]) -> list[dict[str, Any]]:
    """transformers with compressed-tensors, float32, greedy; log-probabilities of the five likeliest tokens."""
    from transformers import AutoModelForCausalLM

    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, attn_implementation="eager")
    answers = []
    for prompt in prompts:
        ids: list[int] = []
        top: list[dict[str, float]] = []
        past = None
        while len(ids) < TOKENS and not (ids and ids[-1] in stops):
            fed = torch.tensor([prompt if past is None else ids[-1:]])
            with torch.no_grad():
                out = loaded(fed, past_key_values=past, use_cache=True)
            past = out.past_key_values
            best = out.logits[0, -1].float().log_softmax(-1).topk(5)
            ids.append(int(best.indices[0]))
            top.append({str(int(t)): float(v) for t, v in zip(best.indices, best.values, strict=True)})
        answers.append({"ids": ids, "top": top})
    return answers


def vllm(python: str, model: Path, prompts: list[list[int]], drafts: bool) -> list[dict[str, Any]]:
    """vLLM in its own interpreter."""
    asked = json.dumps({"model": str(model), "prompts": prompts, "tokens": TOKENS, "drafts": drafts})
    env = {
        **os.environ,
        "VLLM_TARGET_DEVICE": "cpu",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    }
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "greedy.py"
        script.write_text(VLLM)
        done = subprocess.run([python, str(script)], input=asked, capture_output=True, text=True, env=env, timeout=3000)
    line = next((x for x in done.stdout.splitlines() if MARK in x), None)
    if line is None:
        raise RuntimeError(f"vLLM did not answer:\n{done.stderr[-3000:]}")
    answers: list[dict[str, Any]] = json.loads(line.split(MARK, 1)[1])
    return answers


def judge(ours: dict[str, Any], theirs: dict[str, Any], near: float) -> dict[str, Any]:
    """Equal, or where the two part and how far apart the candidates were for the other engine."""
    for at, (mine, other) in enumerate(zip(ours["ids"], theirs["ids"], strict=False)):
        if mine != other:
            known = theirs["top"][at]
            gap = known[str(other)] - known.get(str(mine), -torch.inf)
            return {"token": at, "soloist": mine, "other": other, "gap": round(gap, 4), "near_tie": gap <= near}
    return {"equal": len(ours["ids"]) == len(theirs["ids"]), "tokens": len(ours["ids"])}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name in ("model", "drafter", "capture", "capture_drafter"):
        parser.add_argument(name, type=Path)
    parser.add_argument("--vllm", help="the Python of an environment with vllm-cpu")
    parser.add_argument("--work", type=Path, help="keep the two directories here, and use them if they are there")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    report: dict[str, Any] = {
        "command": "python tools/round_trip.py MODEL DRAFTER CAPTURE CAPTURE-DRAFTER --vllm PYTHON --out RESULT",
        "model": args.model.name,
        "machine": machine(),
        "versions": versions(),
        "commit": commit(),
        "tokens_asked": TOKENS,
        "near": NEAR,
    }
    with tempfile.TemporaryDirectory() as folder:
        work = args.work or Path(folder)
        fast, block = make(args.model, args.drafter, (args.capture, args.capture_drafter), work)
        opened = open_checkpoint(fast)
        report["parts"] = {row.part: f"int{row.bits}" for row in opened.summary() if row.form == "pack-quantized"}
        template, tokenizer = ChatTemplate.load(fast), Tokenizer.load(fast)
        asked = {"add_generation_prompt": True, "tools": None, "enable_thinking": False}
        texts = [prompt.text for prompt in chat_prompts()]
        prompts = [tokenizer.encode(template.render([{"role": "user", "content": t}], asked)) for t in texts]
        plain = soloist(fast, prompts, spec="none", lookup=False)
        for name, knobs in (("mtp", {}), ("dflash2", {"drafter": block})):
            drafted = soloist(fast, prompts, spec=name, lookup=False, **knobs)
            report[f"soloist {name}"] = {
                "same_text_as_without_drafts": [a["ids"] == b["ids"] for a, b in zip(plain, drafted, strict=True)],
                "tokens_per_step": sum(len(a["ids"]) for a in drafted) / sum(a["steps"] for a in drafted),
            }
            print(name, report[f"soloist {name}"], flush=True)
        theirs: dict[str, list[dict[str, Any]]] = {}

        def compare(name: str, answers: list[dict[str, Any]]) -> None:
            theirs[name] = answers
            report[name] = [judge(a, b, NEAR[name]) for a, b in zip(plain, answers, strict=True)]
            args.out.write_text(json.dumps(report, indent=1) + "\n")
            print(name, report[name], flush=True)

        if args.vllm:
            compare("vllm", vllm(args.vllm, fast, prompts, drafts=False))
        compare("transformers", transformers(fast, prompts, set(opened.config.eos_ids)))
        if args.vllm:
            drafted = vllm(args.vllm, fast, prompts, drafts=True)
            same = [a["ids"] == b["ids"] for a, b in zip(theirs["vllm"], drafted, strict=True)]
            report["vllm with its MTP drafts"] = {"same_text_as_without_drafts": same}
    args.out.write_text(json.dumps(report, indent=1) + "\n")
    bad = [one for name in theirs for one in report[name] if not (one.get("equal") or one.get("near_tie"))]
    drafts = [report[f"soloist {name}"]["same_text_as_without_drafts"] for name in ("mtp", "dflash2")]
    if bad or not all(map(all, drafts)):
        sys.exit(f"Not the same model: {bad or drafts}")


if __name__ == "__main__":
    main()
