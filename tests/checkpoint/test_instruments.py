"""The instruments other tests lean on: random tiny models must be sensitive, scripts must say what they are told."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer

from oracle.mtp import MtpOracle
from oracle.target import greedy, load_target, states
from script_model import Piece, build_script, pieces
from tiny import build_tiny


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"tied": True, "nested": True, "shards": 2},
        {"head_dim": 256, "pattern": "LFLF", "key_heads": 1, "value_heads": 3},
        {"head_dim": 128, "rotary": 0.5, "attention_bias": True, "layer_list": False},
    ],
)
def test_tiny_models_are_sensitive(tmp_path: Path, changes: dict[str, object]) -> None:
    model = load_target(build_tiny(tmp_path / "m", **changes))
    ids = torch.randint(0, 256, (96,), generator=torch.Generator().manual_seed(5)).tolist()
    whole, tail = states(model, ids), states(model, ids[48:])
    assert 2.5 < float(whole.logits.std()) < 3.5
    moved = (whole.logits[48:].log_softmax(-1) - tail.logits.log_softmax(-1)).abs().amax(-1)
    assert float(moved.min()) > 0.5  # forgetting the past shows in every later position


SCRIPT: list[Piece] = [
    *pieces("let me think about it"),
    "</think>",
    b"\n\nCalling: ",
    "<tool_call>",
    b"\n<function=a>\n<parameter=x>\n1",
    b"\n</parameter>\n</function>\n",
    "</tool_call>",
    b" and ",
    "<tool_call>",
    b"\n<function=b>\n</function>",
    b"\n ",
    "</tool_call>",
    b"\xf0\x9f",
    b"\x98\x80",
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_script_is_emitted(tmp_path: Path, dtype: torch.dtype) -> None:
    directory = build_script(tmp_path / "s", SCRIPT, wrong_after=[SCRIPT[2]], dtype=dtype)
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    text = "<|im_start|>user\nHello\n<|im_end|>\n<|im_start|>assistant\n<think>\n"
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    model = load_target(directory)
    answer = greedy(model, ids, 60, (tokenizer.token_to_id("<|im_end|>"),))
    wanted = b"".join(p if isinstance(p, bytes) else p.encode() for p in SCRIPT).decode()
    assert tokenizer.decode(answer, skip_special_tokens=False) == wanted + "<|im_end|>"
    assert len(answer) == len(SCRIPT) + 1

    whole = states(model, ids + answer)
    best = whole.logits[len(ids) - 1 : -1].topk(2, -1).values
    assert float((best[:, 0] - best[:, 1]).min()) > 8

    mtp, full = MtpOracle(directory), ids + answer
    right = [mtp.draft(whole.hidden[:n], full[1 : n + 1], 1)[0] == full[n + 1] for n in range(len(ids), len(full) - 1)]
    assert not right[2], "the altered fc drafts a wrong token after the chosen piece"
    assert sum(not hit for hit in right) == 3  # the chosen piece, one use each of <tool_call> and </tool_call>


def test_pieces_are_distinct() -> None:
    text = "la la la la la la, said the bird; la la la"
    cut = pieces(text, 2)
    assert b"".join(p for p in cut if isinstance(p, bytes)).decode() == text
    assert len(set(cut)) == len(cut)


def test_ambiguous_scripts_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="followed by two"):
        build_script(tmp_path / "s", [b"ab", b"cd", b"ef", b"ab", b"cd", b"gh"])
