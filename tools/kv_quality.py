"""What a KV format costs the bundled demo: perplexity of two texts under every format.

    PYTHONPATH=src:tests python tools/kv_quality.py --out benchmarks/cpu/kv_quality.json

`prose` is within the 2,048 tokens the demo was trained on, `handbook` goes to twice that. Every token's log-probability
counts, and apart from them those of tokens past 384, which are the first whose KVarN row reads a packed tile. KVarN is
also taken with only its keys or only its values packed, which says what the 4 and the 2 bits cost. fp32, so that
nothing but the format differs. The first 2,000 tokens are given apart, for what lies beyond the trained window.
"""

from __future__ import annotations

import argparse
import json
import math
import queue
import sys
from pathlib import Path
from typing import Any

import torch

from drafting.prompts import tokenizer
from soloist.bench.document_text import make_document, make_prose
from soloist.bench.machine import commit, machine, versions
from soloist.cache import tiles
from soloist.engine.build import build_engine
from soloist.engine.request import Event, Request
from soloist.sampling.params import SamplingParams
from soloist.settings import resolve

PACKED_FROM = 384
FORMATS = ("fp32", "bf16", "int8", "fp8", "kvarn")


def texts() -> dict[str, list[int]]:
    encode = tokenizer().encode
    prose = encode(make_prose(12_000, seed=5), add_special_tokens=False).ids[:2000]
    handbook = encode(make_document(16_000, seed=3).text, add_special_tokens=False).ids[:4000]
    return {"prose": prose, "handbook": handbook}


def logprobs(engine: Any, ids: list[int]) -> list[float]:
    """Log-probability of every token but the first."""
    box: queue.Queue[Event] = queue.Queue()
    engine.submit(Request(ids, SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0), box.put))
    rows: list[Any] = []
    while True:
        event = box.get()
        if event.error is not None:
            raise event.error
        rows += event.prompt_logprobs or ()
        if event.finish_reason is not None:
            return [row.logprob for row in rows if row is not None]


def measure(knobs: dict[str, str], threads: int) -> dict[str, dict[str, float]]:
    base = {"model": "demo", "spec": "none", "lookup": "0", "prefix_cache": "0", "max_len": "4200", "max_seqs": "1"}
    engine = build_engine(resolve({**base, "threads": str(threads), **knobs}, {}, {}))
    found = {}
    for name, ids in texts().items():
        values = logprobs(engine, ids)
        late = values[PACKED_FROM:]
        found[name] = {
            "tokens": len(values),
            "perplexity": math.exp(-sum(values) / len(values)),
            "perplexity_late": math.exp(-sum(late) / len(late)),
            "perplexity_to_2000": math.exp(-sum(values[:2000]) / len(values[:2000])),
        }
    engine.close()
    return found


class Half:
    """KVarN of which only the keys ("k") or only the values ("v") are packed: the other half is kept beside."""

    def __init__(self, packed: str) -> None:
        self.packed = packed
        self.kept: dict[bytes, tuple[torch.Tensor, torch.Tensor]] = {}

    def encode(self, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        records = _encode(k, v)
        for head, record in enumerate(records):
            self.kept[record.numpy().tobytes()] = (k[:, head].clone(), v[:, head].clone())
        return records

    def decode(self, records: torch.Tensor, dim: int) -> tuple[torch.Tensor, torch.Tensor]:
        k, v = _decode(records, dim)
        whole = v if self.packed == "k" else k
        for tile in range(records.shape[0]):
            for head in range(records.shape[1]):
                pair = self.kept[records[tile, head].numpy().tobytes()]
                whole[tile * tiles.TILE : (tile + 1) * tiles.TILE, head] = pair[1 if self.packed == "k" else 0]
        return k, v


_encode, _decode = tiles.encode_tile, tiles.decode_tiles


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    table = {}
    for name in FORMATS:
        table[name] = measure({"kv_format": name}, args.threads)
        print(name, table[name], flush=True)
    for half, name in (("k", "kvarn, keys only"), ("v", "kvarn, values only")):
        planted = Half(half)
        tiles.encode_tile, tiles.decode_tiles = planted.encode, planted.decode
        table[name] = measure({"kv_format": "kvarn"}, args.threads)
        tiles.encode_tile, tiles.decode_tiles = _encode, _decode
        print(name, table[name], flush=True)
    for found in table.values():
        for text, row in found.items():
            for key in ("perplexity", "perplexity_late", "perplexity_to_2000"):
                row[f"{key}_over_fp32_percent"] = round(100 * (row[key] / table["fp32"][text][key] - 1), 3)
    result = {
        "what": "perplexity of the bundled demo by KV format, fp32 otherwise",
        "command": " ".join(["tools/kv_quality.py", *sys.argv[1:]]),
        "machine": machine(),
        "versions": versions(),
        "commit": commit(),
        "packed_from": PACKED_FROM,
        "formats": table,
    }
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
