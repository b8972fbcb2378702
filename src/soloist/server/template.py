"""The checkpoint's own chat template, rendered in a sandbox.

The environment offers what templates on the Hugging Face hub rely on: trimmed blocks, loop controls, the
`generation` block, `raise_exception`, `strftime_now` and a `tojson` that leaves non-ASCII alone.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
import jinja2.ext
from jinja2.sandbox import ImmutableSandboxedEnvironment

from soloist.errors import CheckpointError, RequestError

_SPECIAL_NAMES = ("bos_token", "eos_token", "pad_token", "unk_token")


class _GenerationBlock(jinja2.ext.Extension):
    """`{% generation %}...{% endgeneration %}` marks assistant text for training; here it only renders its body."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares it so

    def parse(self, parser: Any) -> Any:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body).set_lineno(line)


def _tojson(value: Any, indent: int | None = None, separators: Any = None, sort_keys: bool = False, **_: Any) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _environment() -> ImmutableSandboxedEnvironment:
    env = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, jinja2.ext.loopcontrols]
    )
    env.filters["tojson"] = _tojson
    env.globals["raise_exception"] = _raise_exception
    env.globals["strftime_now"] = lambda pattern: datetime.now().strftime(pattern)
    return env


class ChatTemplate:
    """A compiled template. `render` is a pure function of its arguments (but for `strftime_now`)."""

    def __init__(self, source: str, special_tokens: dict[str, str] | None = None) -> None:
        self.source = source
        self.special_tokens = special_tokens or {}
        try:
            self._template = _environment().from_string(source)
        except jinja2.TemplateError as error:
            raise CheckpointError(f"The chat template does not compile ({error}).", "Download it again.") from None

    @classmethod
    def load(cls, directory: str | Path) -> ChatTemplate:
        """`chat_template.jinja` wins over the copy in `tokenizer_config.json`; neither is a CheckpointError."""
        directory = Path(directory)
        config: dict[str, Any] = {}
        config_path = directory / "tokenizer_config.json"
        if config_path.is_file():
            try:
                config = json.loads(config_path.read_text(encoding="utf-8"))
            except ValueError as error:
                raise CheckpointError(f"{config_path} is not valid JSON ({error}).", "Download it again.") from None
        jinja_path = directory / "chat_template.jinja"
        source = jinja_path.read_text(encoding="utf-8") if jinja_path.is_file() else config.get("chat_template")
        if isinstance(source, list):
            named = {entry.get("name"): entry.get("template") for entry in source}
            source = named.get("default")
        if not isinstance(source, str) or not source.strip():
            raise CheckpointError(
                f"{directory} has no chat template (chat_template.jinja or tokenizer_config.json).",
                "Fetch the complete model directory.",
            )
        specials = {}
        for name in _SPECIAL_NAMES:
            value = config.get(name)
            value = value.get("content") if isinstance(value, dict) else value
            if isinstance(value, str):
                specials[name] = value
        return cls(source, specials)

    def render(self, messages: list[dict[str, Any]], variables: Mapping[str, Any]) -> str:
        """The prompt text. A template that refuses the messages is the request's fault: RequestError on `messages`."""
        try:
            return self._template.render({**self.special_tokens, **variables, "messages": messages})
        except (jinja2.TemplateError, TypeError, ValueError, AttributeError, LookupError, RecursionError) as error:
            raise RequestError(f"The chat template refused the messages: {error}", param="messages") from None
