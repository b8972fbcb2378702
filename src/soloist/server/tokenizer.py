"""Text to ids and back, over a checkpoint's `tokenizer.json`.

Decoding is done here, byte by byte, because a stream must never split a character and must give the same
text however the ids are cut into steps. `StreamDecoder` equals `tokenizers`' own decode of the whole list.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as RawTokenizer

from soloist.errors import CheckpointError


def _byte_alphabet() -> dict[str, int]:
    """The printable stand-in of every byte in byte-level BPE (GPT-2's table), character to byte."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {chr(b): b for b in printable}
    for b in range(256):
        if b not in printable:
            table[chr(0x100 + len(table) - len(printable))] = b
    return table


_ALPHABET = _byte_alphabet()


class Tokenizer:
    """Encode, decode and per-token bytes of one checkpoint. Thread-safe; byte tables are filled on demand."""

    def __init__(self, raw: RawTokenizer, vocab_size: int | None = None) -> None:
        self.raw = raw
        added = raw.get_added_tokens_decoder()
        self.special_ids = frozenset(i for i, token in added.items() if token.special)
        self.added = {token.content: i for i, token in added.items()}
        self.size = max(vocab_size or 0, raw.get_vocab_size(with_added_tokens=True))
        self._bytes: dict[int, bytes] = {}

    @classmethod
    def load(cls, directory: str | Path) -> Tokenizer:
        """Read `tokenizer.json`. Raises CheckpointError when it is missing, damaged or not byte-level BPE."""
        path = Path(directory) / "tokenizer.json"
        if not path.is_file():
            raise CheckpointError(
                f"{path.parent} has no tokenizer.json.", "Fetch the complete model directory, tokenizer included."
            )
        try:
            text = path.read_text(encoding="utf-8")
            kind = json.loads(text).get("decoder") or {}
            raw = RawTokenizer.from_str(text)
        except Exception as error:  # the tokenizers library raises bare Exception
            raise CheckpointError(f"{path} cannot be read ({error}).", "Download the file again.") from None
        if not _is_byte_level(kind):
            raise CheckpointError(
                f"{path}: decoder {kind.get('type')!r} is not byte-level.", "Soloist serves byte-level BPE tokenizers."
            )
        return cls(raw)

    def encode(self, text: str) -> list[int]:
        """Ids of a text; added tokens inside it are recognised, nothing is put before or after."""
        return self.raw.encode(text, add_special_tokens=False).ids

    def encode_with_specials(self, text: str) -> list[int]:
        """Ids with whatever the tokenizer's post-processor adds (a BOS, for families that have one)."""
        return self.raw.encode(text, add_special_tokens=True).ids

    def decode(self, ids: Iterable[int], skip_special: bool = False) -> str:
        """Text of a whole id list; incomplete or invalid UTF-8 becomes U+FFFD."""
        kept = (i for i in ids if not (skip_special and i in self.special_ids))
        return b"".join(map(self.token_bytes, kept)).decode("utf-8", errors="replace")

    def token_bytes(self, token: int) -> bytes:
        """The bytes a token stands for; empty for ids the vocabulary pads with."""
        found = self._bytes.get(token)
        if found is None:
            name = self.raw.id_to_token(token)
            if name is None:
                found = b""
            elif all(c in _ALPHABET for c in name):
                found = bytes(_ALPHABET[c] for c in name)
            else:
                found = name.encode("utf-8")
            self._bytes[token] = found
        return found

    def token_text(self, token: int) -> str:
        """One token as text for log-probability listings; partial characters show as U+FFFD."""
        return self.token_bytes(token).decode("utf-8", errors="replace")

    def token_name(self, token: int) -> str:
        """The vocabulary's own spelling of a token."""
        return self.raw.id_to_token(token) or ""

    def id_of(self, content: str) -> int | None:
        """Id of an added token such as `<think>`, or None."""
        return self.added.get(content)


def _is_byte_level(decoder: dict[str, Any]) -> bool:
    if decoder.get("type") == "Sequence":
        return any(_is_byte_level(d) for d in decoder.get("decoders", ()))
    return decoder.get("type") == "ByteLevel"


class StreamDecoder:
    """Incremental UTF-8 over token bytes: `push` returns the characters completed so far, `flush` the rest."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token: int) -> str:
        return self._utf8.decode(self._tokenizer.token_bytes(token))

    def flush(self) -> str:
        """End the current run of bytes: an incomplete character becomes U+FFFD."""
        rest = self._utf8.decode(b"", final=True)
        self._utf8.reset()
        return rest


def bad_word_ids(tokenizer: Tokenizer, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
    """Token sequences that spell each word, at the start of a text and after a blank."""
    found = dict.fromkeys(
        tuple(tokenizer.encode(variant)) for word in words for variant in (word.lstrip(), " " + word.lstrip())
    )
    return tuple(ids for ids in found if ids)
