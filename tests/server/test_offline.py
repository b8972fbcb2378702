"""`from soloist import Engine`, over a scripted engine."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import soloist
from fakes import FakeEngine
from soloist import demo
from soloist.offline import Engine
from soloist.sampling.params import SamplingParams
from soloist.server.parsers.parts import Content, Reasoning
from soloist.server.template import ChatTemplate
from soloist.server.tokenizer import Tokenizer

EOS = 16362


@pytest.fixture(params=[1, 4, 16])
def engine(request) -> Iterator[Engine]:
    tokenizer = Tokenizer.load(demo.path())
    ids = [*tokenizer.encode("I greet.\n</think>\n\nHello 🙂 there."), EOS]
    fake = FakeEngine(lambda r: ids, block=request.param)
    with Engine.assembled(fake, tokenizer, ChatTemplate.load(demo.path()), {"temperature": 1.0}) as made:
        yield made


def test_the_package_offers_it():
    assert soloist.Engine is Engine and soloist.__all__ == ["Engine"]
    with pytest.raises(AttributeError, match="nothing"):
        _ = soloist.nothing


def test_chat(engine):
    answer = engine.chat("Hi")
    assert (answer.content, answer.reasoning, answer.finish_reason) == ("Hello 🙂 there.", "I greet.", "stop")
    assert answer.tokens[-1] == EOS and answer.stats.output_tokens == len(answer.tokens)
    assert engine.chat([{"role": "user", "content": "Hi"}], stop=["there"]).content == "Hello 🙂 "
    assert engine.chat("Hi", max_tokens=2).finish_reason == "length"


def test_streams(engine):
    assert "".join(engine.stream("Hi")) == "Hello 🙂 there."
    parts = list(engine.stream_parts("Hi"))
    assert "".join(p.text for p in parts if isinstance(p, Reasoning)) == "I greet."
    assert "".join(p.text for p in parts if isinstance(p, Content)) == "Hello 🙂 there."


def test_closing_a_stream_cancels(engine):
    stream = engine.stream("Hi")
    next(stream)
    stream.close()
    request = engine.engine.submitted[-1]
    assert request.cancelled or request.stats.finished


def test_generate(engine):
    first, second = engine.generate(["One", [5, 6, 7]], SamplingParams(max_tokens=5))
    assert len(first.tokens) == len(second.tokens) == 5 and first.finish_reason == "length"
    assert engine.engine.submitted[-1].prompt == [5, 6, 7]
    assert engine.engine.submitted[-1].params.stop_ids == engine.engine.eos_ids
    assert engine.generate(["x"])[0].content == "I greet.\n</think>\n\nHello 🙂 there."


def test_a_dead_engine_raises(engine):
    engine.engine.kill()
    with pytest.raises(soloist.errors.EngineDeadError):
        engine.chat("Hi")
