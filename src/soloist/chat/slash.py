"""The /commands of the chat: parse one line, apply it to the session, say what the loop should do."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from soloist.chat.session import OPTIONS, Session
from soloist.errors import UserError

HELP = f"""\
/reset             forget the conversation
/retry             ask the last question again
/system [TEXT]     set the system message, or clear it
/set NAME VALUE    {", ".join(OPTIONS)}
/set NAME          back to the server's default
/show              system message, options and length of the conversation
/help              this list
/quit              leave (also Ctrl-D)

A line that ends in \\ goes on in the next one; \"\"\" starts and ends a block of lines.
Ctrl-C stops an answer and keeps what has come."""


@dataclass(frozen=True)
class Outcome:
    """What the loop does next, and what it tells the user first."""

    action: Literal["prompt", "answer", "quit"] = "prompt"
    say: str = ""


def is_command(text: str) -> bool:
    """True for `/word`; a path such as /etc/hosts is a message."""
    word = text.split(maxsplit=1)[0] if text.strip() else ""
    return word.startswith("/") and "/" not in word[1:] and word[1:].isalpha()


def apply(text: str, session: Session) -> Outcome:
    """Carry out one command line. Raises UserError when it makes no sense."""
    word, _, rest = text.strip().partition(" ")
    rest = rest.strip()
    match word:
        case "/quit" | "/exit":
            return Outcome("quit")
        case "/help":
            return Outcome(say=HELP)
        case "/reset":
            session.reset()
            return Outcome(say="The conversation starts afresh.")
        case "/retry":
            session.retry()
            return Outcome("answer")
        case "/system":
            session.system = rest
            return Outcome(say="System message set." if rest else "System message cleared.")
        case "/set":
            name, _, value = rest.partition(" ")
            session.set(name, value.strip())
            return Outcome(say=_options(session))
        case "/show":
            return Outcome(say=f"system: {session.system or 'none'}\n{_options(session)}\nturns: {len(session.turns)}")
    raise UserError(f"There is no command {word}.", "/help lists the commands.")


def _options(session: Session) -> str:
    def shown(value: object) -> str:
        return {True: "on", False: "off"}[value] if isinstance(value, bool) else str(value)

    given = ", ".join(f"{name} {shown(value)}" for name, value in session.options.items())
    return f"options: {given or 'the defaults of the server'}"
