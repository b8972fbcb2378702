"""The conversation so far and the options of the next request. Knows neither terminal nor network."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from soloist.errors import UserError

Message = dict[str, Any]

OPTIONS: dict[str, type] = {
    "temperature": float,
    "top_p": float,
    "top_k": int,
    "min_p": float,
    "repetition_penalty": float,
    "presence_penalty": float,
    "frequency_penalty": float,
    "max_tokens": int,
    "seed": int,
    "thinking": bool,
}
"""What /set takes; ranges are the server's to judge."""


@dataclass
class Session:
    """`turns` alternates user and assistant messages; at most the last user turn is unanswered."""

    system: str = ""
    turns: list[Message] = field(default_factory=list)
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def unanswered(self) -> bool:
        return bool(self.turns) and self.turns[-1]["role"] == "user"

    def ask(self, text: str) -> None:
        """Add a question. One that never got an answer is replaced: templates expect the roles to alternate."""
        if self.unanswered:
            self.turns.pop()
        self.turns.append({"role": "user", "content": text})

    def answered(self, content: str, reasoning: str = "") -> None:
        """Add the answer, complete or stopped half-way. An empty one leaves the question unanswered."""
        if not content and not reasoning:
            return
        message: Message = {"role": "assistant", "content": content}
        if reasoning:
            message["reasoning"] = reasoning
        self.turns.append(message)

    def retry(self) -> None:
        """Drop the last answer, so that its question is asked again."""
        if self.turns and not self.unanswered:
            self.turns.pop()
        if not self.turns:
            raise UserError("There is no question to ask again.")

    def reset(self) -> None:
        """Forget the turns; the system message and the options stay."""
        self.turns.clear()

    def set(self, name: str, text: str) -> None:
        """Set one option from its text; `default` (or nothing) takes it back to the server's default."""
        if name not in OPTIONS:
            raise UserError(f"There is no option {name}.", f"Options: {', '.join(OPTIONS)}.")
        if text in ("", "default"):
            self.options.pop(name, None)
            return
        self.options[name] = _value(name, text)

    def messages(self) -> list[Message]:
        """The messages of the next request."""
        return ([{"role": "system", "content": self.system}] if self.system else []) + self.turns

    def request_options(self) -> dict[str, Any]:
        """The options as request fields."""
        fields = dict(self.options)
        if "thinking" in fields:
            fields["chat_template_kwargs"] = {"enable_thinking": fields.pop("thinking")}
        return fields


def _value(name: str, text: str) -> Any:
    kind = OPTIONS[name]
    if kind is bool:
        if text.lower() not in ("on", "off"):
            raise UserError(f"{name} is on or off, not {text}.")
        return text.lower() == "on"
    try:
        return kind(text)
    except ValueError:
        raise UserError(f"{name} takes {'an integer' if kind is int else 'a number'}, not {text}.") from None
