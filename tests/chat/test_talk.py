"""One answer on the screen."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Generator

from soloist.chat.client import Answer, Piece, Served
from soloist.chat.session import Session
from soloist.chat.talk import Talk

PIECES = 50


class Swallowing:
    """A client whose stream loses the Ctrl-C that comes at its second piece, as a finaliser would."""

    url = "http://nowhere"

    def stream(self, model: str, messages: object, options: object, answer: Answer) -> Generator[Piece, None, None]:
        for n in range(PIECES):
            if n == 1:
                with contextlib.suppress(KeyboardInterrupt):
                    os.kill(os.getpid(), signal.SIGINT)
            answer.content += "a"
            yield Piece("content", "a")
        answer.finish_reason = "stop"


def test_an_interrupt_that_python_swallows_still_stops_the_answer() -> None:
    before = signal.getsignal(signal.SIGINT)
    talk = Talk(Swallowing(), Served("demo", None), Session())  # type: ignore[arg-type]
    talk.session.ask("first")
    answer = talk._answer()
    assert answer.finish_reason is None and len(answer.content) < PIECES
    assert talk.session.turns[-1] == {"role": "assistant", "content": answer.content}
    assert signal.getsignal(signal.SIGINT) is before
