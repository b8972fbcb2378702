"""Calibration and evaluation texts: a plain text file, or JSON lines with `text`, `messages` or `ids`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from soloist.errors import UserError
from soloist.server.messages import normalise
from soloist.server.template import ChatTemplate
from soloist.server.tokenizer import Tokenizer

SHORTEST = 2


class Reader:
    """Turns lines of a file into token ids with one checkpoint's tokenizer and template."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.tokenizer = Tokenizer.load(directory)
        self._template: ChatTemplate | None = None

    def chat(self, messages: list[dict[str, Any]], answer: bool, **switches: Any) -> list[int]:
        """A rendered conversation; with `answer`, up to where the model would start to speak."""
        if self._template is None:
            self._template = ChatTemplate.load(self.directory)
        text = self._template.render(normalise(messages), {**switches, "add_generation_prompt": answer, "tools": None})
        return self.tokenizer.encode(text)

    def texts(self, path: Path, length: int, limit: int) -> list[list[int]]:
        """Token ids of a file: windows of at most `length`, `limit` tokens in all. Raises UserError."""
        out: list[list[int]] = []
        left = limit
        for ids in self._documents(path):
            for start in range(0, len(ids), length):
                window = ids[start : start + min(length, left)]
                if len(window) >= SHORTEST:
                    out.append(window)
                    left -= len(window)
                if left < SHORTEST:
                    return out
        if not out:
            raise UserError(f"{path} holds no text.", "Give a text file, or JSON lines with text, messages or ids.")
        return out

    def prompts(self, path: Path, **switches: Any) -> list[list[int]]:
        """Prompts of a file, each up to where the model answers: text is one user message per line or entry."""
        found = []
        for entry in self._entries(path):
            if "ids" in entry:
                found.append(self._ids(path, entry))
            else:
                messages = entry.get("messages") or [{"role": "user", "content": entry["text"]}]
                found.append(self.chat(messages, True, **switches))
        if not found:
            raise UserError(f"{path} holds no prompts.", "Give one prompt per line, or JSON lines.")
        return found

    def _documents(self, path: Path) -> Iterator[list[int]]:
        if path.suffix != ".jsonl":
            yield self.tokenizer.encode(_read(path))
            return
        for entry in self._entries(path):
            if "ids" in entry:
                yield self._ids(path, entry)
            elif "messages" in entry:
                yield self.chat(entry["messages"], False)
            else:
                yield self.tokenizer.encode(str(entry["text"]))

    @staticmethod
    def _ids(path: Path, entry: dict[str, Any]) -> list[int]:
        ids = entry["ids"]
        if not isinstance(ids, list) or not all(isinstance(i, int) for i in ids):
            raise UserError(f"{path}: `ids` is not a list of token ids.", "Write integers.")
        return ids

    @staticmethod
    def _entries(path: Path) -> Iterator[dict[str, Any]]:
        for number, line in enumerate(_read(path).splitlines(), 1):
            if not line.strip():
                continue
            if path.suffix != ".jsonl":
                yield {"text": line}
                continue
            try:
                entry = json.loads(line)
            except json.JSONDecodeError as error:
                raise UserError(f"{path}, line {number}: not JSON ({error}).", "Write one object per line.") from None
            if not isinstance(entry, dict) or not {"ids", "messages", "text"} & entry.keys():
                raise UserError(f"{path}, line {number}: no text, messages or ids.", "Write one object per line.")
            yield entry


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}).", "Give a readable file.") from None
    except UnicodeDecodeError:
        raise UserError(f"{path} is not UTF-8 text.", "Convert it to UTF-8.") from None
