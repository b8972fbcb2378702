"""Decoding and stop strings: the stream must equal the whole, for any cut and any stop."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from soloist import demo
from soloist.server.text import StopHalt, TextStream
from soloist.server.tokenizer import StreamDecoder, Tokenizer

TOKENIZER = Tokenizer.load(demo.path())
IDS = st.lists(st.integers(0, 16383), max_size=40)


@given(IDS)
@settings(max_examples=300, deadline=None)
def test_decoding_equals_the_tokenizers_library(ids):
    decoder = StreamDecoder(TOKENIZER)
    text = "".join(decoder.push(i) for i in ids) + decoder.flush()
    assert text == TOKENIZER.raw.decode(ids, skip_special_tokens=False) == TOKENIZER.decode(ids)
    assert TOKENIZER.decode(ids, skip_special=True) == TOKENIZER.raw.decode(ids, skip_special_tokens=True)


@given(st.text(max_size=60))
@settings(max_examples=200, deadline=None)
def test_text_survives_the_round_trip_up_to_normalisation(text):
    ids = TOKENIZER.encode(text)
    assert TOKENIZER.decode(ids) == TOKENIZER.raw.normalizer.normalize_str(text)


def test_characters_are_never_split():
    ids = TOKENIZER.encode("🙂ů中")
    assert len(ids) > 3
    decoder = StreamDecoder(TOKENIZER)
    shown = [decoder.push(i) for i in ids]
    assert "".join(shown) == "🙂ů中" and not any("\ufffd" in s for s in shown) and decoder.flush() == ""
    cut = StreamDecoder(TOKENIZER)
    assert cut.push(ids[0]) == "" and cut.flush() == "\ufffd"


def run(ids, stops, include=False, min_tokens=0):
    """(text, tokens consumed, matched) as the engine and the server would see it together."""
    halt = StopHalt(TextStream(TOKENIZER, stops, include, min_tokens=min_tokens))
    shown = TextStream(TOKENIZER, stops, include, min_tokens=min_tokens)
    text = ""
    for n, token in enumerate(ids, 1):
        text += "".join(p.text for p in shown.push(token))
        matched = halt.push(token)
        assert matched == shown.matched
        if matched:
            return text, n, matched
    return text + "".join(p.text for p in shown.finish()), len(ids), None


@given(st.text("abEND ", max_size=60), st.lists(st.text("abEND ", min_size=1, max_size=4), min_size=1, max_size=3))
@settings(max_examples=500, deadline=None)
def test_cut_at_the_first_stop(text, stops):
    ids = TOKENIZER.encode(text)
    out, n, matched = run(ids, stops)
    whole = TOKENIZER.decode(ids)
    if matched is None:
        assert out == whole and not any(s in whole for s in stops)
        return
    seen = TOKENIZER.decode(ids[:n])
    assert out == seen[: min(seen.find(s) for s in stops if s in seen)]
    assert not any(s in TOKENIZER.decode(ids[: n - 1]) for s in stops), "the token that completed it is the last"
    assert run(ids, stops, include=True)[0] == out + matched


def test_held_text_comes_out_when_no_stop_follows():
    ids = TOKENIZER.encode("one EN")
    shown = TextStream(TOKENIZER, ["END"])
    early = "".join(p.text for i in ids for p in shown.push(i))
    assert early == "one " and "".join(p.text for p in shown.finish()) == "EN"


def test_a_stop_must_end_after_min_tokens():
    ids = TOKENIZER.encode("aXb aXb")
    n = len(TOKENIZER.encode("aXb"))
    assert run(ids, ["X"])[0] == "a"
    assert run(ids, ["X"], min_tokens=n)[0] == "aXb a"


@pytest.mark.parametrize("stop", ["</think>", "k>\n", "x</think>"])
def test_stops_see_structural_tokens(stop):
    ids = TOKENIZER.encode("x</think>\n\ny")
    out, _, matched = run(ids, [stop])
    assert matched == stop and out == "x</think>\n\n".split(stop)[0]


def test_structural_tokens_come_out_as_markers():
    markers = {TOKENIZER.id_of("</think>"): "/think"}
    shown = TextStream(TOKENIZER, ["never"], markers=markers)
    pieces = [p for i in TOKENIZER.encode("a</think>b<|im_end|>c") for p in shown.push(i)] + shown.finish()
    assert [(p.text, p.marker) for p in pieces] == [("a", None), ("</think>", "/think"), ("b", None), ("c", None)]
