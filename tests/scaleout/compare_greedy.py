"""Greedy text and MTP acceptance of Soloist and vLLM on one checkpoint, written as JSON.

    PYTHONPATH=src:tests python tests/scaleout/compare_greedy.py CHECKPOINT --vllm PYTHON \\
        --out benchmarks/peers/vllm-greedy.json

Both run in bfloat16 (vLLM's recurrence on a CPU knows nothing else) on token ids, so that neither template nor
tokenizer matters. Where the texts part, the log-probabilities of both engines at that place say whether it was a
near-tie. Acceptance is compared on text that both produce, so each draft is judged against the same tokens: over all
steps, and over the steps that begin at the same token in both, where a difference is the drafts' own.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import queue
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

TOKENS = 200
DRAFTS = 4
NEAR = 0.1  # nats between the two candidates, the tolerance for bfloat16

VLLM = """
import json, sys
from vllm import LLM, SamplingParams
if __name__ == "__main__":
    asked = json.load(sys.stdin)
    more = {"enable_prefix_caching": False}
    if asked["drafts"]:
        more["speculative_config"] = {"method": "mtp", "num_speculative_tokens": asked["drafts"]}
    llm = LLM(model=asked["model"], dtype="bfloat16", enforce_eager=True, max_model_len=2048, max_num_seqs=1,
              **more)
    answers = []
    for n, (ids, tokens) in enumerate(zip(asked["prompts"], asked["tokens"])):
        logprobs = None if asked["drafts"] else 5
        params = SamplingParams(temperature=0, max_tokens=tokens, logprobs=logprobs)
        engine, out, emitted, known = llm.llm_engine, None, [], 0
        engine.add_request(str(n), {"prompt_token_ids": ids}, params)
        while engine.has_unfinished_requests():
            for item in engine.step():
                out = item.outputs[0]
                emitted.append(len(out.token_ids) - known)
                known = len(out.token_ids)
        top = [{str(t): v.logprob for t, v in entry.items()} for entry in out.logprobs or []]
        answers.append({"ids": list(out.token_ids), "top": top, "emitted": emitted})
    print("RESULT" + json.dumps(answers))
"""


def vllm(python: str, model: str, prompts: list[list[int]], tokens: list[int], drafts: int) -> list[dict[str, Any]]:
    """Answers of vLLM in its own interpreter: ids, log-probabilities, tokens emitted by each step."""
    asked = json.dumps({"model": model, "prompts": prompts, "tokens": tokens, "drafts": drafts})
    env = {**os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1"}
    env.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "greedy.py"
        script.write_text(VLLM)
        done = subprocess.run([python, str(script)], input=asked, capture_output=True, text=True, env=env, timeout=7200)
    line = next((x for x in done.stdout.splitlines() if "RESULT" in x), None)
    if line is None:
        sys.exit(done.stderr[-3000:])
    return json.loads(line.split("RESULT", 1)[1])


def distribution(python: str, name: str) -> str:
    """A package's version in another interpreter."""
    code = f"from importlib.metadata import version; print(version({name!r}))"
    return subprocess.run([python, "-c", code], capture_output=True, text=True, check=True).stdout.strip()


def ours(model: str, prompts: list[list[int]], tokens: list[int], spec: str) -> list[dict[str, Any]]:
    """Answers of Soloist's engine with chains only, so that drafts are MTP's alone."""
    from soloist.engine.build import build_engine
    from soloist.engine.request import Event, Request
    from soloist.sampling.params import SamplingParams
    from soloist.settings import resolve

    flags = {"model": model, "dtype": "bfloat16", "spec": spec, "lookup": "0", "tree": "0", "prefix_cache": "0"}
    if spec == "mtp":
        flags |= {"draft_tokens": str(DRAFTS), "block_rule": "saturated"}
    engine = build_engine(resolve(flags, {}, {}))
    answers = []
    for ids, count in zip(prompts, tokens, strict=True):
        events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        # The same end as vLLM's: the checkpoint's stop ids.
        params = SamplingParams(max_tokens=count, temperature=0.0, logprobs=5, stop_ids=engine.eos_ids)
        request = Request(list(ids), params, events.put, eos_ids=engine.eos_ids)
        engine.submit(request)
        got: list[int] = []
        top: list[dict[str, float]] = []
        emitted: list[int] = []
        while True:
            event = events.get(timeout=600)
            if event.error is not None:
                raise event.error
            got += event.tokens
            emitted += [len(event.tokens)] if event.tokens else []
            top += [{str(e.token): e.logprob, **{str(t): v for t, v in e.top}} for e in event.logprobs or ()]
            if event.finish_reason is not None:
                break
        answers.append({"ids": got, "top": top, "emitted": emitted})
    engine.close()
    return answers


def parting(a: dict[str, Any], b: dict[str, Any]) -> dict[str, Any] | None:
    """Where two answers part, and how close the two tokens were for each engine; None when they agree."""
    for at, (x, y) in enumerate(zip(a["ids"], b["ids"], strict=False)):
        if x != y:
            gaps = [abs(t[at].get(str(x), -99.0) - t[at].get(str(y), -99.0)) for t in (a["top"], b["top"])]
            return {
                "token": at,
                "ours": x,
                "vllm": y,
                "gap_ours": gaps[0],
                "gap_vllm": gaps[1],
                "near_tie": min(gaps) <= NEAR,
            }
    return None


def shares(emitted: list[list[int]]) -> list[float]:
    """Share of steps that accepted at least j drafts, j = 1..DRAFTS. The prefill's token is no step; the last step is
    left out, because a stop or a limit cuts it."""
    steps = [n - 1 for counts in emitted for n in counts[1:-1]]
    return [sum(a >= j for a in steps) / max(1, len(steps)) for j in range(1, DRAFTS + 1)]


def accepted_at(emitted: list[int]) -> dict[int, int]:
    """Accepted drafts by the token a step begins at, counted from the answer's first; as in `shares`."""
    starts = itertools.accumulate(emitted)
    return {at: n - 1 for at, n in zip(starts, emitted[1:-1], strict=False)}


def same_anchors(ours: list[list[int]], theirs: list[list[int]]) -> dict[str, Any]:
    """Acceptance over the steps that begin at the same token of the same text in both engines."""
    pairs = [
        (a[at], b[at])
        for a, b in zip(map(accepted_at, ours), map(accepted_at, theirs), strict=True)
        for at in sorted(a.keys() & b.keys())
    ]
    share = [[sum(p[side] >= j for p in pairs) / max(1, len(pairs)) for j in range(1, DRAFTS + 1)] for side in (0, 1)]
    return {"steps": len(pairs), "equal": sum(a == b for a, b in pairs), "ours": share[0], "vllm": share[1]}


def points(acceptance: dict[str, Any]) -> float:
    """The largest difference at any position, in percentage points."""
    return round(100 * max(abs(a - b) for a, b in zip(acceptance["ours"], acceptance["vllm"], strict=True)), 2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--vllm", required=True)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()

    from drafting.prompts import prompts as every_kind
    from soloist.bench.machine import machine, versions
    from soloist.bench.promptset import chat_prompts
    from soloist.server.template import ChatTemplate
    from soloist.server.tokenizer import Tokenizer

    directory = Path(args.model)
    tokenizer, template = Tokenizer.load(directory), ChatTemplate.load(directory)
    texts = [p.text for p in chat_prompts()]
    asked = {"add_generation_prompt": True, "tools": None, "enable_thinking": False}
    prompts = [tokenizer.encode(template.render([{"role": "user", "content": t}], asked)) for t in texts]
    prompts += every_kind()
    tokens = [TOKENS] * len(prompts)
    theirs = vllm(args.vllm, args.model, prompts, tokens, 0)
    plain = ours(args.model, prompts, tokens, "none")
    partings = [parting(a, b) for a, b in zip(plain, theirs, strict=True)]
    common = [
        p["token"] if p else min(len(a["ids"]), len(b["ids"])) for p, a, b in zip(partings, plain, theirs, strict=True)
    ]
    kept = [i for i, n in enumerate(common) if n >= 8]
    drafted = vllm(args.vllm, args.model, [prompts[i] for i in kept], [common[i] for i in kept], DRAFTS)
    mine = ours(args.model, [prompts[i] for i in kept], [common[i] for i in kept], "mtp")
    pairs = [(a, b) for a, b in zip(mine, drafted, strict=True) if a["ids"] == b["ids"]]
    emitted = [[a["emitted"] for a, _ in pairs], [b["emitted"] for _, b in pairs]]
    everywhere = {"ours": shares(emitted[0]), "vllm": shares(emitted[1])}
    anchored = same_anchors(*emitted)
    report = {
        "model": directory.name,
        "command": " ".join(["tests/scaleout/compare_greedy.py", directory.name, "--vllm PYTHON"]),
        "machine": machine(),
        "versions": versions() | {"vllm-cpu": distribution(args.vllm, "vllm-cpu")},
        "prompts": len(prompts),
        "tokens_asked": TOKENS,
        "equal_tokens": common,
        "partings": partings,
        "drafted_texts_equal": [a["ids"] == b["ids"] for a, b in zip(mine, drafted, strict=True)],
        "acceptance": everywhere | {"largest_difference_points": points(everywhere)},
        "acceptance_at_the_same_token": anchored | {"largest_difference_points": points(anchored)},
        "steps": {"ours": sum(map(len, emitted[0])), "vllm": sum(map(len, emitted[1]))},
        "texts_with_equal_steps": [x == y for x, y in zip(*emitted, strict=True)],
    }
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
