"""What every route shares: the engine, the text side of the checkpoint, the options, the meters."""

from __future__ import annotations

from dataclasses import dataclass, field

from soloist.errors import RequestError
from soloist.sampling.llg import GrammarCompiler
from soloist.server.face import EngineFace, Sleeps
from soloist.server.fields import IgnoredFields
from soloist.server.live import LiveRequests
from soloist.server.metrics import Meters
from soloist.server.options import ServerOptions
from soloist.server.parsers.parts import THINK_CLOSE, TURN_END, marker_ids
from soloist.server.response_store import ResponseStore
from soloist.server.template import ChatTemplate
from soloist.server.tokenizer import Tokenizer
from soloist.server.transcripts import Transcripts


@dataclass
class Service:
    """One served model. Lives on `app.state.service`; there is no module-level state. `sleeper` is the engine where it
    can give its card back."""

    engine: EngineFace
    tokenizer: Tokenizer
    template: ChatTemplate
    options: ServerOptions
    sleeper: Sleeps | None = None
    meters: Meters = field(init=False)
    ignored: IgnoredFields = field(default_factory=IgnoredFields)
    live: LiveRequests = field(default_factory=LiveRequests)
    responses: ResponseStore = field(default_factory=ResponseStore)
    transcripts: Transcripts = field(init=False)
    markers: dict[int, str] = field(init=False)
    grammars: GrammarCompiler = field(init=False)

    def __post_init__(self) -> None:
        self.meters = Meters(self.engine, self.options.names[0])
        self.grammars = GrammarCompiler(self.tokenizer.raw, self.engine.vocab_size, self.engine.eos_ids)
        self.transcripts = Transcripts(TURN_END)
        self.markers = marker_ids(self.tokenizer)
        self.think_close = self.tokenizer.id_of(THINK_CLOSE)

    def check_model(self, name: str | None) -> str:
        """The name to answer with. A missing name means the one model there is; an unknown one is a 404."""
        if not name:
            return self.options.names[0]
        if name not in self.options.names:
            raise RequestError(
                f"The model {name!r} does not exist; this server has {', '.join(self.options.names)}.",
                param="model",
                status=404,
                kind="NotFoundError",
                code="model_not_found",
            )
        return name

    def trouble(self) -> str | None:
        """Why nothing can be served, or None."""
        if not self.engine.alive:
            return "the engine has stopped"
        status = self.engine.status()
        if status.idle_s > self.options.stuck_s:
            return f"the engine has been in one step for {status.idle_s:.0f} s"
        return None
