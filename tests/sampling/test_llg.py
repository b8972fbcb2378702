"""Structured output: masks along drafted paths, exact roll-back, refusals by name, whitespace, thinking first.

The tokenizer is byte-level: ids 0..255 are bytes, then a few merges and the special tokens, so every text has a path.
"""

from __future__ import annotations

import json
import random
import re

import numpy as np
import pytest
import torch
from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from soloist.drafting.proposal import Proposal
from soloist.errors import EngineError, RequestError
from soloist.sampling.grammar import Grammar
from soloist.sampling.history import History
from soloist.sampling.llg import MAX_WHITESPACE, AfterThinking, GrammarCompiler, LLGrammar
from soloist.sampling.params import SamplingParams, ThinkingBudget
from soloist.sampling.processors import target_law
from soloist.sampling.rows import LogitRows
from soloist.sampling.verify import Mode, verify

MERGES = [("{", '"'), ('"', ":"), ("Ġ", '"'), ("a", "g"), ("ag", "e"), ("Ċ", "Ċ"), ("Ġ", "Ġ")]
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 6}, "age": {"type": "integer", "maximum": 99, "minimum": 0}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
PADDED = 320


def make_tokenizer() -> Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {c: i for i, c in enumerate(alphabet)}
    for left, right in MERGES:
        vocab[left + right] = len(vocab)
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=MERGES))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(t, special=True) for t in ("<|end|>", "<think>", "</think>")])
    return tokenizer


TOKENIZER = make_tokenizer()
EOS, END = TOKENIZER.token_to_id("<|end|>"), TOKENIZER.token_to_id("</think>")
COMPILER = GrammarCompiler(TOKENIZER, PADDED, [EOS])
NEWLINES = TOKENIZER.encode("\n\n").ids


def allowed(grammar: Grammar) -> set[int]:
    row = torch.zeros(PADDED)
    grammar.mask(row)
    return set(np.flatnonzero(np.isfinite(row.numpy())).tolist())


def takes(grammar: Grammar, text: str) -> bool:
    """True if the grammar takes the whole text and may end there."""
    return all(grammar.advance(t) for t in TOKENIZER.encode(text).ids) and EOS in allowed(grammar)


@pytest.mark.parametrize(
    ("make", "good", "bad"),
    [
        (
            lambda c: c.json_schema(SCHEMA),
            ['{"name":"Al","age":7}', '{ "name" : "",\n "age": 0 }'],
            ['{"name":"Al"}', '{"age":1,"name":"x"}', '{"name":"a","age":700}', "[]", ' {"name":"Al","age":7}'],
        ),
        (
            lambda c: c.json_schema(json.dumps(SCHEMA), any_whitespace=False),
            ['{"name":"Al","age":7}'],
            ['{"name": "Al"'],
        ),
        (lambda c: c.json_object(), ["{}", '{"a":[1,{"b":null}]}'], ["[]", "1", '{"a"}']),
        (lambda c: c.regex(r"[a-c]{2}\d+"), ["ab1", "cc123"], ["ab", "d1", "xab1"]),
        (lambda c: c.choice(["yes", "no", 'q"\n', "ü😀"]), ["yes", "no", 'q"\n', "ü😀"], ["ye", "yesno", "maybe"]),
        (lambda c: c.grammar('start: "a" B\nB: /[0-9]+/'), ["a1", "a12"], ["a", "b1"]),
        (lambda c: c.grammar('root ::= "a" b\nb ::= [0-9]+'), ["a1", "a12"], ["a", "b1"]),
    ],
    ids=["schema", "compact", "object", "regex", "choice", "lark", "gbnf"],
)
def test_what_a_grammar_takes(make, good: list[str], bad: list[str]) -> None:  # type: ignore[no-untyped-def]
    for text in good:
        assert takes(make(COMPILER), text), text
    for text in bad:
        assert not takes(make(COMPILER), text), text


@pytest.mark.parametrize(
    ("make", "word"),
    [
        (lambda c: c.regex("[a-"), "unclosed"),
        (lambda c: c.json_schema({"type": "foo"}), "foo"),
        (lambda c: c.json_schema({"type": "array", "uniqueItems": True}), "uniqueItems"),
        (lambda c: c.json_schema("{"), "JSON"),
        (lambda c: c.grammar('start: "a" missing'), "missing"),
        (lambda c: c.grammar('root ::= "a" missing'), "missing"),
        (lambda c: c.choice([]), "choice"),
        (lambda c: c.choice(["a", ""]), "choice"),
        (lambda c: c.structural_tag([], ["<"]), "structures"),
        (lambda c: c.structural_tag([{"begin": "<a>", "schema": {}, "end": ""}], ["<b"]), "trigger"),
    ],
)
def test_unusable_grammars_are_refused_with_the_reason(make, word: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(RequestError, match=re.escape(word)) as caught:
        make(COMPILER)
    assert caught.value.param in ("response_format", "structured_outputs")


def test_refs_and_recursion() -> None:
    schema = {"$defs": {"t": {"type": "object", "properties": {"c": {"$ref": "#/$defs/t"}}}}, "$ref": "#/$defs/t"}
    assert takes(COMPILER.json_schema(schema), '{"c":{"c":{}}}')


def test_structural_tags_constrain_only_what_follows_a_trigger() -> None:
    tags = [{"begin": "<f=a>", "schema": {"type": "integer"}, "end": "</f>"}]

    def make() -> LLGrammar:
        return COMPILER.structural_tag(tags, ["<f"])

    assert takes(make(), "hello")
    assert takes(make(), "call <f=a>12</f>")
    assert not takes(make(), "call <f=b>")
    assert not takes(make(), "call <f=a>x")


def test_blanks_between_elements_are_bounded() -> None:
    grammar = COMPILER.json_schema(SCHEMA)
    assert grammar.advance(TOKENIZER.encode("{").ids[0])
    space = TOKENIZER.encode(" ").ids[0]
    taken = 0
    while grammar.advance(space):
        taken += 1
    assert taken == MAX_WHITESPACE
    assert space not in allowed(grammar)


def test_roll_back_returns_to_the_same_masks() -> None:
    rng = random.Random(0)
    ids = TOKENIZER.encode('{"name":"Al","age":73}').ids
    grammar = COMPILER.json_schema(SCHEMA)
    fresh = COMPILER.json_schema(SCHEMA)
    for i, token in enumerate(ids):
        depth = rng.randrange(0, 8)
        taken = sum(1 for t in ids[i : i + depth] if grammar.advance(t))
        assert not grammar.advance(EOS if i < len(ids) - 1 and taken == 0 else 300)
        grammar.rollback(taken)
        assert allowed(grammar) == allowed(fresh)
        assert grammar.advance(token) and fresh.advance(token)
    assert grammar.finished and allowed(grammar) == {EOS}
    grammar.rollback(1)
    assert not grammar.finished


def test_ids_without_a_token_and_special_tokens_are_masked() -> None:
    free = COMPILER.regex(r"(.|\n)*")
    assert allowed(free) <= set(range(TOKENIZER.get_vocab_size()))
    assert not {END, TOKENIZER.token_to_id("<think>")} & allowed(free)


def test_forced_tokens_are_what_the_mask_leaves() -> None:
    grammar = COMPILER.json_schema(SCHEMA, any_whitespace=False)
    forced = grammar.forced(8)
    assert forced and TOKENIZER.decode(forced) == '{"name":'[: len(TOKENIZER.decode(forced))]
    assert len(grammar.forced(2)) <= 2
    for token in forced:
        assert token in allowed(grammar) and grammar.advance(token)


def test_copies_and_cached_compilations_are_independent() -> None:
    first, second = COMPILER.regex("ab"), COMPILER.regex("ab")
    token = TOKENIZER.encode("a").ids[0]
    assert first.advance(token) and not first.advance(token)
    copy = first.copy()
    assert second.advance(token)
    assert copy.advance(TOKENIZER.encode("b").ids[0]) and copy.finished and not first.finished


def biased(prefix: tuple[int, ...]) -> torch.Tensor:
    """Random logits that like blanks and quotes, and dislike the end: a model that would never stop by itself."""
    x = torch.randn(PADDED, generator=torch.Generator().manual_seed(hash(prefix) % 2**31)) * 2
    x[TOKENIZER.encode(" ").ids[0]] += 4
    x[EOS] -= 6
    return x


def generate(  # type: ignore[no-untyped-def]
    params: SamplingParams, grammar: Grammar, mode: Mode, seed: int, rng: random.Random | None, oracle=None, cap=400
) -> list[int]:
    history = History(params, [0], PADDED, grammar)
    out = history.output
    while len(out) < cap and (not out or out[-1] not in params.stop_ids):
        tokens: list[int] = []
        if rng is not None:
            forced = grammar.forced(4)
            tokens = forced if forced else [rng.randrange(PADDED) for _ in range(rng.randrange(0, 6))]
            if oracle is not None and rng.random() < 0.8:
                tokens = oracle[len(out) : len(out) + rng.randrange(1, 9)]
        paths = [tuple(out + tokens[:i]) for i in range(len(tokens) + 1)]
        proposal = Proposal.chain(tokens, "test")
        for token in verify(torch.stack([biased(p) for p in paths]), proposal, history, seed, mode).tokens:
            history.advance(token)
    return list(out)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_speculation_does_not_change_constrained_text_and_it_validates(temperature: float) -> None:
    rng = random.Random(2)
    params = SamplingParams(temperature=temperature, stop_ids=(EOS,), max_tokens=400)
    for seed in range(25):
        plain = generate(params, COMPILER.json_schema(SCHEMA), "coupled", seed, None)
        fast = generate(params, COMPILER.json_schema(SCHEMA), "coupled", seed, rng, plain)
        assert fast == plain
        assert plain[-1] == EOS
        value = json.loads(TOKENIZER.decode(plain[:-1]))
        assert set(value) == {"name", "age"} and 0 <= value["age"] <= 99
        assert not re.search(rf"\s{{{MAX_WHITESPACE + 1}}}", TOKENIZER.decode(plain))


def test_rejection_with_invalid_drafts_stays_inside_the_grammar() -> None:
    rng = random.Random(3)
    params = SamplingParams(stop_ids=(EOS,), max_tokens=400)
    for seed in range(25):
        out = generate(params, COMPILER.regex("[a-z ]{3,9}[0-9]"), "rejection", seed, rng)
        assert re.fullmatch("[a-z ]{3,9}[0-9]", TOKENIZER.decode(out[:-1]))


@pytest.mark.parametrize("drafted", [0, 1, 3, 8])
def test_the_block_may_run_past_the_end_of_the_grammar(drafted: int) -> None:
    """Drafts after the closing brace: nothing after it but the end, whatever was proposed."""
    text = TOKENIZER.encode('{"name":"Al","age":73}').ids
    history = History(SamplingParams(temperature=0.0, stop_ids=(EOS,)), [], PADDED, COMPILER.json_schema(SCHEMA))
    start = len(text) - 2
    for token in text[:start]:
        history.advance(token)
    script = [*text[start:], *NEWLINES, EOS, *NEWLINES, *text]
    rows = torch.nn.functional.one_hot(torch.tensor(script[: drafted + 1]), PADDED).float() * 9
    verdict = verify(rows, Proposal.chain(script[:drafted], "test"), history, 0, "greedy")
    assert verdict.tokens == [*text[start:], EOS][: len(verdict.tokens)]
    assert len(verdict.tokens) == min(drafted + 1, 3)
    assert history.output == text[:start]


@pytest.mark.parametrize("budget", [0, 1, 7])
@pytest.mark.parametrize("natural", [None, 0, 3])
def test_a_grammar_that_starts_after_thinking(budget: int, natural: int | None) -> None:
    close = (*TOKENIZER.encode("\n").ids, END, *NEWLINES)

    def make() -> Grammar:
        return AfterThinking(COMPILER.json_schema(SCHEMA), END, lead_ids=NEWLINES)

    def logits(prefix: tuple[int, ...]) -> torch.Tensor:
        x = biased(prefix)
        x[END] = 60.0 if len(prefix) == natural else -60.0
        return x

    params = SamplingParams(
        temperature=0.0, stop_ids=(EOS,), max_tokens=400, thinking=ThinkingBudget(budget, close, END)
    )
    texts = []
    for width in (0, 1, 4, 9):
        grammar = make()
        history = History(params, [0], PADDED, grammar)
        out = history.output
        while EOS not in out and len(out) < 300:
            drafts = texts[0][len(out) : len(out) + width] if texts else []
            paths = [tuple(out + drafts[:i]) for i in range(len(drafts) + 1)]
            proposal = Proposal.chain(drafts, "test")
            for token in verify(torch.stack([logits(p) for p in paths]), proposal, history, 0, "greedy").tokens:
                history.advance(token)
        texts.append(list(out))
    assert all(t == texts[0] for t in texts)
    text = texts[0]
    end = text.index(END)
    assert end == (natural if natural is not None and natural < budget else budget + 1)
    json.loads(TOKENIZER.decode(text[end + 1 : -1]))


def test_before_the_end_of_thinking_nothing_is_masked_and_roll_back_reopens() -> None:
    grammar = AfterThinking(COMPILER.regex("ab"), END, lead_ids=NEWLINES)
    a, b = TOKENIZER.encode("ab").ids
    assert not grammar.active and len(allowed(grammar)) == PADDED and grammar.forced(4) == []
    assert grammar.advance(b) and grammar.advance(END) and grammar.active
    assert allowed(grammar) == {a, *NEWLINES}
    assert grammar.advance(NEWLINES[0]) and not grammar.advance(NEWLINES[0])
    assert allowed(grammar) == {a}
    assert grammar.advance(a) and grammar.advance(b) and grammar.finished
    grammar.rollback(2)
    assert allowed(grammar) == {a}
    grammar.rollback(1)
    assert allowed(grammar) == {a, *NEWLINES}
    grammar.rollback(1)
    assert not grammar.active and len(allowed(grammar)) == PADDED


def test_a_grammar_beyond_its_limits_is_an_error_not_an_early_end() -> None:
    tokenizer = LLTokenizer(TOKENIZER.to_str(), n_vocab=PADDED, eos_token=[EOS])
    limits = LLParserLimits(step_max_items=1)
    source = LLMatcher.grammar_from_json_schema({"type": "object"})
    history = History(SamplingParams(), [], PADDED, LLGrammar(LLMatcher(tokenizer, source, log_level=0, limits=limits)))
    with pytest.raises(EngineError, match="Too many items"):
        verify(torch.zeros(1, PADDED), Proposal(), history, 0, "coupled")


def test_min_tokens_gives_way_to_a_finished_grammar() -> None:
    params = SamplingParams(temperature=0.0, min_tokens=50, max_tokens=60, stop_ids=(EOS,))
    history = History(params, [], PADDED, COMPILER.choice(["yes"]))
    for token in TOKENIZER.encode("yes").ids:
        history.advance(token)
    assert target_law(LogitRows(torch.zeros(1, PADDED)), 0, history).ids.tolist() == [EOS]
