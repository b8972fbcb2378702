"""The script checkpoint: hand-made weights that emit a wanted text through the real engine.

Every attention, DeltaNet and MLP output projection is zero, so the residual stream is the embedding of the last
token, and the head holds at row j the embeddings of the tokens that j follows. One exception: where the script
reuses a token with different successors, layer 0 (a DeltaNet that forgets at once and whose convolution looks one
token back) adds a code for the previous token, and the head reads it to choose. The MTP module repeats the
embedding of the token it is given (fc = [I, 0]) and so drafts the right successor; for tokens in `wrong_after`
it drafts another one.

A script is a list of pieces: bytes (one id each, decoding to exactly these bytes) or the text of a special token.
The answer starts after the newline that ends the chat template's generation prompt, and closes with <|im_end|>.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from soloist.checkpoint.config import read_model_config
from soloist.checkpoint.layout import merged, mtp_layout, target_layout
from tiny import SPECIALS, Tiny, byte_tokenizer, stored_name, write_directory

CODE = 256  # dims 0..255: random signs per token
CONSTANT = CODE  # a dim that is 1 in every embedding
CONTEXT = CODE + 1  # dims of the previous-token code, one per context
CONTEXTS = 64
HIDDEN = 384
SHARP = 30.0  # logit of a right successor; others stay below about 8
HINT = 12.0  # added by the previous-token code
SHAPE = Tiny(
    pattern="LLLF", hidden=HIDDEN, ffn=128, heads=2, kv_heads=1, key_heads=1, value_heads=1, key_dim=16, value_dim=64
)

Piece = bytes | str


def pieces(text: str | bytes, size: int = 3) -> list[Piece]:
    """Cut a text into distinct pieces of at least `size` bytes (each id can occur once in a simple script)."""
    data = text.encode() if isinstance(text, str) else text
    seen: set[bytes] = set()
    out: list[Piece] = []
    start = 0
    while start < len(data):
        end = start + size
        while data[start:end] in seen and end < len(data):
            end += 1
        seen.add(data[start:end])
        out.append(data[start:end])
        start = end
    if out.count(out[-1]) > 1:  # a short tail that repeats an earlier piece
        last, before = out.pop(), out.pop()
        assert isinstance(before, bytes) and isinstance(last, bytes)
        out.append(before + last)
    return out


def _symbols() -> dict[int, str]:
    """byte -> its printable stand-in in byte-level BPE."""
    direct = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {byte: chr(byte) for byte in direct}
    for byte in range(256):
        if byte not in table:
            table[byte] = chr(256 + len(table) - len(direct))
    return table


def _tokenizer(script: Sequence[Piece]) -> Tokenizer:
    table = _symbols()
    vocab = {symbol: i for i, symbol in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    for piece in script:
        if isinstance(piece, bytes):
            vocab.setdefault("".join(table[byte] for byte in piece), len(vocab))
    base = byte_tokenizer()
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer, tokenizer.decoder = base.pre_tokenizer, decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIALS[:4]])
    tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in SPECIALS[4:]])
    return tokenizer


def _id(tokenizer: Tokenizer, piece: Piece) -> int:
    if isinstance(piece, bytes):
        piece = "".join(_symbols()[byte] for byte in piece)
    elif piece not in SPECIALS:
        raise ValueError(f"{piece!r} is not one of the special tokens {SPECIALS}; give other text as bytes")
    found = tokenizer.token_to_id(piece)
    assert found is not None
    return found


def _transitions(ids: Sequence[int]) -> tuple[dict[int, set[int]], dict[tuple[int, int], int]]:
    """(token -> successors; (previous, token) -> successor where the token alone does not decide)."""
    after: dict[int, set[int]] = {}
    for token, following in pairwise(ids):
        after.setdefault(token, set()).add(following)
    chosen: dict[tuple[int, int], int] = {}
    for previous, token, following in zip(ids, ids[1:], ids[2:]):
        if len(after[token]) > 1 and chosen.setdefault((previous, token), following) != following:
            raise ValueError(f"ids {previous}, {token} are followed by two different tokens; cut the text differently")
    if len(after[ids[0]]) > 1:
        raise ValueError("the token that starts the answer (a single newline) may not occur inside the script")
    if len({previous for previous, _ in chosen}) > CONTEXTS:
        raise ValueError(f"more than {CONTEXTS} different contexts before reused tokens; cut the text differently")
    return after, chosen


def build_script(
    directory: Path,
    script: Sequence[Piece],
    *,
    wrong_after: Iterable[Piece] = (),
    start: Piece = b"\n",
    end: Piece | None = "<|im_end|>",
    nested: bool = False,
    dtype: torch.dtype = torch.float32,
) -> Path:
    """Write the checkpoint. `end=None` makes the last piece its own successor, without end.

    `wrong_after`: pieces after which the MTP module proposes a wrong token. Raises ValueError for scripts whose
    last two tokens do not determine the next one.
    """
    tokenizer = _tokenizer([start, *script])
    ids = [_id(tokenizer, piece) for piece in (start, *script)]
    ids.append(ids[-1] if end is None else _id(tokenizer, end))
    vocab = -(-max(tokenizer.get_vocab_size(), 320) // 64) * 64
    tiny = replace(SHAPE, vocab=vocab, nested=nested, dtype=dtype)
    after, chosen = _transitions(ids)

    generator = torch.Generator().manual_seed(0)
    embed = torch.zeros(vocab, HIDDEN)
    embed[:, :CODE] = torch.randint(0, 2, (vocab, CODE), generator=generator).float() * 2 - 1
    embed[:, CONSTANT] = 1
    height = math.sqrt((CODE + 1) / HIDDEN)  # rms of every embedding, which the norms divide out
    head = torch.zeros(vocab, HIDDEN)
    for token, successors in after.items():
        for following in successors:
            head[following, :CODE] += embed[token, :CODE] * SHARP / CODE

    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(tiny.config()))
    config = read_model_config(directory)
    layout = merged((target_layout(config), mtp_layout(config)))
    tensors = {f"{name}.weight": torch.zeros(shape) for name, shape in layout.linears.items()}
    tensors |= {name: torch.zeros(shape) for name, shape in layout.tensors.items()}
    tensors |= {"embed_tokens.weight": embed, "lm_head.weight": head}
    _look_back(tensors, embed, head, chosen, height)
    fc = tensors["mtp.fc.weight"]
    fc[:, :HIDDEN] = torch.eye(HIDDEN)
    for piece in wrong_after:
        token = _id(tokenizer, piece)
        other = ids[ids.index(token) - 1]  # drafts this token again instead of its successor
        fc[:CODE, :CODE] += torch.outer(embed[other, :CODE] - embed[token, :CODE], embed[token, :CODE]) / CODE
    stored = {stored_name(name, nested): tensor.to(dtype) for name, tensor in tensors.items()}
    return write_directory(directory, stored, tiny.config(), tokenizer)


def _look_back(
    tensors: dict[str, torch.Tensor],
    embed: torch.Tensor,
    head: torch.Tensor,
    chosen: dict[tuple[int, int], int],
    height: float,
) -> None:
    """Layer 0: write a one-hot code of the previous token into the context dims; the head reads it.

    The gate dims see only the constant: q = k = a fixed unit vector, beta = 1, decay = 0, so the state holds the
    newest value alone. The value of context c is large when the token one tap back is c, and zero otherwise.
    """
    layer = "layers.0.linear_attn."
    contexts = sorted({previous for previous, _ in chosen})
    keys, values = SHAPE.key_dim, SHAPE.value_dim
    projection = tensors[layer + "in_proj_qkv.weight"]
    projection[: 2 * keys, CONSTANT] = 5 * height
    for c, previous in enumerate(contexts):
        projection[2 * keys + c, :CODE] = embed[previous, :CODE] * 60 * height / CODE
        projection[2 * keys + c, CONSTANT] = -30 * height
    taps = tensors[layer + "conv1d.weight"]
    taps[: 2 * keys, 0, -1] = 1
    taps[2 * keys :, 0, -2] = 1
    tensors[layer + "in_proj_z.weight"][:, CONSTANT] = 5 * height
    tensors[layer + "in_proj_b.weight"][:, CONSTANT] = 30 * height
    tensors[layer + "A_log"].fill_(4.0)
    tensors[layer + "dt_bias"].fill_(10.0)
    for i in range(len(SHAPE.pattern)):
        if SHAPE.pattern[i] == "L":
            tensors[f"layers.{i}.linear_attn.norm.weight"].fill_(1)
    if not contexts:
        return
    # One hot value v: the gated norm makes it sqrt(values) * silu(5), whatever v is.
    lifted = values**0.5 * 5 / (1 + math.exp(-5))
    for c in range(len(contexts)):
        tensors[layer + "out_proj.weight"][CONTEXT + c, c] = 8 / lifted
    for (previous, _), following in chosen.items():
        head[following, CONTEXT + contexts.index(previous)] = HINT / 8
