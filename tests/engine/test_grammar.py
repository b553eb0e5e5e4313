"""Masks of grammars over real vocabularies, checked against what the grammar means."""

from __future__ import annotations

import gzip
import json
import random
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
from llguidance import LLMatcher

from treadle import _native
from treadle.core import SamplingParams
from treadle.engine.grammar import Grammars, Guide, GuidedState, settle
from treadle.text.tokenizer import Tokenizer

DATA = Path(__file__).parent.parent / "data"
SCHEMA = {
    "type": "object",
    "properties": {
        "城市": {"enum": ["北京", "上海"]},
        "inner": {
            "type": "object",
            "properties": {"n": {"type": "integer", "minimum": 3, "maximum": 40}},
            "additionalProperties": False,
        },
        "list": {"type": "array", "items": {"type": "boolean"}, "minItems": 1, "maxItems": 3},
    },
    "required": ["城市", "list"],
    "additionalProperties": False,
}


def load(name: str, padding: int) -> Grammars:
    with gzip.open(DATA / f"{name}.tokenizer.json.gz", "rt", encoding="utf-8") as file:
        tokenizer = Tokenizer.from_gguf(json.load(file))
    return Grammars(tokenizer, tokenizer.vocab_size + padding)


@pytest.fixture(scope="module")
def smol() -> Grammars:
    return load("smollm2-135m-instruct", 7)


@pytest.fixture(scope="module")
def r1() -> Grammars:
    return load("deepseek-r1-distill-qwen-7b", 0)


def params(schema: Any, **options: Any) -> SamplingParams:
    return SamplingParams(grammar=LLMatcher.grammar_from_json_schema(schema), **options)


def test_a_grammar_that_grows_too_large_says_so_without_quoting_it(
    smol: Grammars, caplog: pytest.LogCaptureFixture
) -> None:
    secret = guide(
        smol, {"type": "object", "properties": {f"secret{n}": {"type": "null"} for n in range(5000)}}
    )
    assert secret.failure is None
    for token in smol.text.encode('{"'):
        secret.accept(token)
    assert secret.words is not None and not secret.words.any()
    assert secret.failure is not None
    assert "items; max is" in secret.failure
    assert caplog.messages[0] == secret.failure
    assert "secret" not in caplog.text


def guide(grammars: Grammars, schema: Any, **options: Any) -> Guide:
    return Guide(grammars, grammars.prepare().result(), params(schema, **options))


def allowed(guide: Guide) -> set[int]:
    assert guide.words is not None
    bits = np.unpackbits(guide.words.view(np.uint8), bitorder="little")
    return set(np.flatnonzero(bits).tolist())


def accept(guide: Guide, tokenizer: Tokenizer, text: str) -> None:
    for token in tokenizer.encode(text, specials=True):
        assert token in allowed(guide), tokenizer.decode([token])
        guide.accept(token)


@pytest.mark.parametrize("seed", range(20))
def test_whatever_is_allowed_makes_a_valid_answer(smol: Grammars, seed: int) -> None:
    source = random.Random(seed)
    walk = guide(smol, {**SCHEMA, "x-guidance": {"whitespace_flexible": False}})
    ids: list[int] = []
    while not (choices := allowed(walk)) & smol.text.eos_ids:
        ids.append(source.choice(sorted(choices)))
        walk.accept(ids[-1])
        assert len(ids) < 500
    jsonschema.validate(json.loads(smol.text.decode(ids, skip_specials=False)), SCHEMA)


def test_the_text_ends_with_the_grammar_and_not_before(smol: Grammars) -> None:
    digit = guide(smol, {"type": "integer", "minimum": 0, "maximum": 9})
    assert {smol.text.decode([id]) for id in allowed(digit)} == set("0123456789")
    accept(digit, smol.text, "7")
    assert allowed(digit) == smol.text.eos_ids


def test_reasoning_is_free_but_does_not_end_the_text(r1: Grammars) -> None:
    walk = guide(r1, {"type": "integer"}, reasoning="open")
    assert allowed(walk) == set(range(r1.vocab_size)) - r1.text.eos_ids
    accept(walk, r1.text, "Well: {not json} 北京</think>\n\n12")
    assert allowed(walk) >= r1.text.eos_ids
    assert not {r1.text.encode(text)[0] for text in ("a", "\n\n", "{")} & allowed(walk)


def test_a_model_may_open_its_own_think_block(r1: Grammars) -> None:
    walk = guide(r1, {"type": "integer"}, reasoning="may_open")
    think = r1.text.encode("<think>", specials=True)[0]
    assert think in allowed(walk)
    accept(walk, r1.text, "<think>Well</think>5")
    plain = guide(r1, {"type": "integer"}, reasoning="may_open")
    accept(plain, r1.text, "5")
    assert think not in allowed(plain)
    assert think not in allowed(guide(r1, {"type": "integer"}))


def test_closing_tag_in_pieces(smol: Grammars) -> None:
    walk = guide(smol, {"type": "integer"}, reasoning="open")
    for text in ("a </th", "ink", ">"):
        accept(walk, smol.text, text)
    accept(walk, smol.text, "5")
    assert allowed(walk) >= smol.text.eos_ids


def test_a_broken_grammar_allows_nothing(smol: Grammars) -> None:
    broken = Guide(smol, smol.prepare().result(), SamplingParams(grammar="start: /(/"))
    assert allowed(broken) == set()
    lost = guide(smol, {"type": "integer"})
    lost.accept(smol.text.encode("{")[0])
    assert allowed(lost) == set()


def test_sampler_follows_the_grammar(smol: Grammars) -> None:
    sampler = _native.Sampler(smol.vocab_size)
    state = GuidedState(smol, params({"enum": ["北京"]}), temperature=1.5, seed=1)
    free = _native.SamplerState(smol.vocab_size, temperature=1.5, seed=1)
    logits = np.random.default_rng(0).normal(size=(2, smol.vocab_size)).astype(np.float32)
    ids: list[int] = []
    while True:
        settle([state, free])
        token = int(sampler.sample(logits, [0, 1], [state, free])[0][0])
        if token in smol.text.eos_ids:
            break
        ids.append(token)
        state.accept(token)
    assert smol.text.decode(ids) == '"北京"'


def test_masks_of_a_step_are_made_together(smol: Grammars) -> None:
    words = ["one", "two", "three", "北京"]
    states = [GuidedState(smol, params({"enum": [words[i % 4]]}), temperature=0.0) for i in range(40)]
    written: list[list[int]] = [[] for _ in states]
    sampler = _native.Sampler(smol.vocab_size)
    logits = np.zeros((1, smol.vocab_size), np.float32)
    for step in range(12):
        smol.took(1.0)  # masks that take long, so that threads make them
        settle(states)
        for state, ids in zip(states, written, strict=True):
            token = int(sampler.sample(logits, [0], [state])[0][0])
            state.accept(token)
            ids += [token] if token not in smol.text.eos_ids else []
        if step % 3:  # else the masks are made where they are waited for
            smol.begin()
    assert [smol.text.decode(ids) for ids in written] == [f'"{words[i % 4]}"' for i in range(40)]


def test_an_exception_under_one_mask_ends_that_answer_only(
    smol: Grammars, monkeypatch: pytest.MonkeyPatch
) -> None:
    digits = params({"type": "integer", "minimum": 10, "maximum": 99})
    good, bad = GuidedState(smol, digits), GuidedState(smol, digits)
    settle([good, bad])
    real = Guide.accept

    def accept(self: Guide, token: int) -> None:
        if self is bad._guide:
            raise RuntimeError("out of luck")
        real(self, token)

    monkeypatch.setattr(Guide, "accept", accept)
    smol.took(1.0)  # masks that take long, so that one thread makes both
    (four,) = smol.text.encode("4")
    for state in (bad, good):
        state.accept(four)
    smol.begin()
    settle([bad, good])
    assert good.failure is None
    assert bad.failure == "the grammar could not be applied: out of luck"
    sampler = _native.Sampler(smol.vocab_size)
    logits = np.zeros((1, smol.vocab_size), np.float32)
    with pytest.raises(ValueError):
        sampler.sample(logits, [0], [bad])
    assert smol.text.decode([int(sampler.sample(logits, [0], [good])[0][0])]).isdigit()


def test_sets_of_tokens_change_no_mask(smol: Grammars) -> None:
    schema = {"type": "array", "items": {"type": "string", "maxLength": 14}}
    grammar = LLMatcher.grammar_from_json_schema(schema)
    tokens = smol.prepare().result()
    fast, plain = LLMatcher(tokens, grammar), LLMatcher(tokens.with_slices([]), grammar)
    for token in smol.text.encode('["A tall \\"tree\\"", "北京 欢迎你", "a\\n b", "", "ninety nine"]'):
        assert fast.compute_bitmask() == plain.compute_bitmask()
        assert fast.consume_token(token) and plain.consume_token(token)


def test_parameters_that_oppose_a_grammar(smol: Grammars) -> None:
    for name, value in (("ignore_eos", True), ("min_tokens", 3)):
        with pytest.raises(ValueError, match=name):
            GuidedState(smol, params({}, **{name: value}))


def test_vocabulary_is_indexed_once(smol: Grammars) -> None:
    first = smol.prepare()
    assert isinstance(first, Future)
    assert smol.prepare() is first


def budgeted(grammars: Grammars, reasoning: Any, budget: int | None, schema: Any = None) -> Guide:
    grammar = LLMatcher.grammar_from_json_schema(schema) if schema is not None else None
    tokenizer = grammars.prepare().result() if grammar else None
    return Guide(
        grammars, tokenizer, SamplingParams(grammar=grammar, reasoning=reasoning, reasoning_budget=budget)
    )


@pytest.mark.parametrize("schema", [None, {"type": "integer"}])
@pytest.mark.parametrize(("reasoning", "budget"), [("open", 0), ("open", 3), ("may_open", 2)])
def test_a_think_block_is_closed_at_its_budget(
    r1: Grammars, reasoning: str, budget: int, schema: Any
) -> None:
    walk = budgeted(r1, reasoning, budget, schema)
    if reasoning == "may_open":
        walk.accept(r1.text.encode("<think>", specials=True)[0])
    for token in r1.text.encode("one two three four")[:budget]:
        assert walk.words is not None and not allowed(walk) & r1.text.eos_ids
        walk.accept(token)
    closing = []
    while walk.words is not None and len(forced := allowed(walk)) == 1:
        closing.append(forced.pop())
        walk.accept(closing[-1])
    assert r1.text.decode(closing, skip_specials=False) == "\n</think>\n\n"
    assert r1.text.encode("</think>", specials=True)[0] in closing
    if schema is None:
        assert walk.words is None
    else:
        accept(walk, r1.text, "12")


def test_a_block_that_closes_itself_is_left_alone(r1: Grammars) -> None:
    walk = budgeted(r1, "open", 50)
    for token in r1.text.encode("Well</think>", specials=True):
        walk.accept(token)
    assert walk.words is None
    for token in r1.text.encode(" and so on" * 30):
        walk.accept(token)
        assert walk.words is None


def test_without_a_budget_the_model_may_not_open_a_block(r1: Grammars) -> None:
    think = r1.text.encode("<think>", specials=True)[0]
    free = budgeted(r1, "may_open", 0)
    assert free.words is not None and allowed(free) == set(range(r1.vocab_size)) - {think}
    free.accept(r1.text.encode("Well")[0])
    assert free.words is None
    assert think not in allowed(budgeted(r1, "may_open", 0, {"type": "integer"}))


def test_the_sampler_is_made_to_close_the_block(r1: Grammars) -> None:
    sampler = _native.Sampler(r1.vocab_size)
    state = GuidedState(r1, SamplingParams(reasoning="open", reasoning_budget=4), seed=1)
    logits = np.random.default_rng(0).normal(size=(1, r1.vocab_size)).astype(np.float32)
    ids: list[int] = []
    while len(ids) < 12:
        settle([state])
        ids.append(int(sampler.sample(logits, [0], [state])[0][0]))
        state.accept(ids[-1])
    assert r1.text.decode(ids[4:], skip_specials=False).startswith("\n</think>\n\n")
