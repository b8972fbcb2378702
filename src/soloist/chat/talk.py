"""Questions and answers with one server: the conversation at a terminal, and the single question of a pipe."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from soloist.chat import slash
from soloist.chat.client import Answer, Client, Served
from soloist.chat.session import Session
from soloist.chat.status import status_line
from soloist.chat.terminal import Screen, read_message, remember_lines
from soloist.errors import SoloistError, UserError

DIM = "2"
PROMPT = "1;36"
WARN = "33"


class Talk:
    """Holds the session and the screens; `out` gets the answers, `err` everything about them."""

    def __init__(self, client: Client, served: Served, session: Session) -> None:
        self.client = client
        self.served = served
        self.session = session
        self.out = Screen(sys.stdout)
        self.err = Screen(sys.stderr)

    def converse(self) -> None:
        """Read and answer until the user leaves (Ctrl-D, /quit, or Ctrl-C twice at the prompt)."""
        remember_lines()
        context = f", context {self.served.max_len}" if self.served.max_len else ""
        self.out.line(f"{self.served.name} at {self.client.url}{context}. /help for commands, Ctrl-D to leave.", DIM)
        interrupted = False
        while True:
            try:
                text = read_message(input, self.out.prompt("› ", PROMPT), self.out.prompt("… ", PROMPT))
            except EOFError:
                self.out.line()
                return
            except KeyboardInterrupt:
                self.out.line()
                if interrupted:
                    return
                interrupted = True
                self.out.line("Ctrl-C again, or Ctrl-D, to leave.", DIM)
                continue
            interrupted = False
            if text.strip() and not self._handle(text):
                return

    def answer_once(self, text: str) -> None:
        """Answer one question. Raises what went wrong."""
        if not text.strip():
            raise UserError("There is no question on stdin.", "For example: echo 'Hello' | soloist chat")
        self.session.ask(text.rstrip("\n"))
        answer = self._answer()
        if answer.finish_reason is None:
            raise SystemExit(130)
        if not answer.content:
            self.err.line("The answer ended inside its reasoning.", WARN)

    def _handle(self, text: str) -> bool:
        """Carry out one line of input; False to leave."""
        try:
            if slash.is_command(text):
                outcome = slash.apply(text, self.session)
                if outcome.say:
                    self.out.line(outcome.say, DIM)
                if outcome.action != "answer":
                    return outcome.action != "quit"
            else:
                self.session.ask(text)
            self._answer()
        except UserError as error:
            self.err.line(f"{error.message} {error.remedy}".strip(), WARN)
        except SoloistError as error:
            self.err.line(str(error), WARN)
        return True

    def _answer(self) -> Answer:
        """Stream the answer to the session's last question onto the screen and into the session."""
        answer = Answer()
        # In a pipe stdout carries the answer alone; reasoning goes where a person may be watching.
        aside = self.out if self.out.is_terminal else self.err
        pieces = self.client.stream(self.served.name, self.session.messages(), self.session.request_options(), answer)
        kind = ""
        try:
            with _interrupts() as asked:
                for piece in pieces:
                    if asked:
                        raise KeyboardInterrupt
                    reasoning = piece.kind == "reasoning"
                    if reasoning and not aside.is_terminal:
                        continue
                    if kind and kind != piece.kind:
                        aside.line()
                    kind = piece.kind
                    (aside if reasoning else self.out).write(piece.text, DIM if reasoning else "")
        except KeyboardInterrupt:
            pieces.close()
        finally:
            self.out.end_line()
            self.session.answered(answer.content, answer.reasoning)
        self.err.line(status_line(answer), DIM)
        return answer


@contextmanager
def _interrupts() -> Iterator[list[int]]:
    """Inside, a Ctrl-C is noted as well as raised: what is raised while Python runs a finaliser goes no further."""
    noted: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        noted.append(number)
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, note)
    try:
        yield noted
    finally:
        signal.signal(signal.SIGINT, before)
