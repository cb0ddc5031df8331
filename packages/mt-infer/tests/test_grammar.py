"""Answers follow their grammar, whatever runs beside them and whatever is guessed."""

from __future__ import annotations

import json
import random
import re
import sys
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import sentencepiece
import torch
from mt_infer import Engine, EngineOptions, LogitsError, Sampling
from mt_infer.choosing.grammar import Grammar, Grammars
from mt_model import GPT, gpt
from mt_tokenizer import Tokenizer, load_tokenizer, train_tokenizer

OBJECT: dict[str, Any] = {"type": "object", "additionalProperties": False}
CORPUS = ['{"name": "to be", "number": 12, "list": [true, false, null]}\n', "abc abc xyz\n"] * 20


@cache
def tokenizer() -> Tokenizer:
    return train_tokenizer(CORPUS, 300)


@cache
def model() -> GPT:
    """A drawn model with more rows than its tokenizer has tokens, and a wide choice of tokens."""
    sizes: dict[str, Any] = {"hidden_size": 32, "num_layers": 1, "num_heads": 2, "init_std": 0.1}
    return GPT(gpt(vocab_size=384, max_sequence_length=512, **sizes), seed=5).eval()


def engine(**how: Any) -> Engine:
    ends = how.pop("ends", {tokenizer().eod_id})
    options = EngineOptions(**{"blocks": 512, "block_size": 8} | how)
    return Engine(model(), tokenizer=tokenizer(), ends=ends, options=options)


def drawn_schema(rng: random.Random, depth: int = 0) -> dict[str, Any]:
    """A schema without loops, whose answers are short."""
    kinds = ["integer", "number", "string", "enum", "boolean", "const"]
    kind = rng.choice(kinds if depth > 1 else [*kinds, "array", "object", "object", "anyOf"])
    if kind in ("integer", "number"):
        low = rng.randint(-50, 50)
        return {"type": kind, "minimum": low, "maximum": low + rng.randint(0, 500)}
    if kind == "string":
        form = rng.choice([{"maxLength": rng.randint(1, 9)}, {"pattern": "^[a-c]{2,5}$"}])
        return {"type": "string", **rng.choice([form, form, {"format": "date"}])}
    if kind == "array":
        least = rng.randint(0, 2)
        items = drawn_schema(rng, depth + 1)
        return {"type": "array", "items": items, "minItems": least, "maxItems": least + 2}
    if kind == "object":
        names = rng.sample(["a", "name", "number", "list", "x y", "é"], rng.randint(1, 4))
        found = {name: drawn_schema(rng, depth + 1) for name in names}
        return OBJECT | {"properties": found, "required": names[: rng.randint(0, 4)]}
    if kind == "anyOf":
        return {"anyOf": [drawn_schema(rng, depth + 1) for _ in range(2)]}
    if kind == "enum":
        return {"enum": ["to be", "not", 7]}
    return {"type": "boolean"} if kind == "boolean" else {"const": {"abc": [1, None]}}


@pytest.mark.parametrize("number", [20, pytest.param(500, marks=pytest.mark.campaign)])
def test_every_finished_answer_is_valid_by_its_schema(number) -> None:
    rng = random.Random(number)
    schemas = [drawn_schema(rng) for _ in range(number)]
    spaces = {"x-guidance": {"whitespace_flexible": False}}
    asked = [
        Sampling(
            seed=index,
            temperature=rng.choice([0, 1, 2]),
            max_tokens=150,
            json_schema=rng.choice([json.dumps, dict])(schema | spaces),
            n=1 + index % 2,
        )
        for index, schema in enumerate(schemas)
    ]
    made = engine(max_batch=8, blocks=70, max_batch_tokens=60, speculate="ngram")
    found = iter(made.generate(["to be"] * number, asked))
    finished = 0
    for how, schema in zip(asked, schemas, strict=True):
        for _ in range(how.n):
            answer = next(found)
            assert answer.end in ("stop", "length")
            if answer.end == "stop":
                jsonschema.validate(json.loads(answer.text or ""), schema)
                finished += 1
    assert finished > number
    assert made.stats()["free_blocks"] == 70


GRAMMARS: list[dict[str, Any]] = [
    {"regex": r"(abc |xyz,){2,9}(to|be)?"},
    {"grammar": 'start: word ("-" word)* "."\nword: "abc" | /x+y/ | "(" word ")"\n'},
    {"json_schema": {"type": "array", "items": {"enum": ["abc", "to be", 1]}, "maxItems": 6}},
]
WAYS: list[dict[str, Any]] = [
    {"blocks": 11, "max_batch": 4, "max_batch_tokens": 9},
    {"blocks": 40, "speculate": "ngram", "prefix_cache": False},
    {"blocks": 40, "speculate": model()},
]


@pytest.mark.parametrize("way", WAYS)
def test_an_answer_with_a_grammar_is_its_own(way) -> None:
    """Beside others, after evictions, with guesses, and in a stream it is the answer of alone."""
    lone, asked = engine(max_batch=1), []
    for index in range(9):
        how = GRAMMARS[index % 3] | {"temperature": index % 2, "seed": index, "max_tokens": 40}
        asked.append(Sampling(**how, n=1 + (index == 4), logprobs=0, min_tokens=index % 5))
    prompts = ['abc abc xyz,xyz, ["abc","abc"' * (1 + index % 3) for index in range(9)]
    expected = [lone.generate(*each) for each in zip(prompts, asked, strict=True)]
    made = engine(**way)
    found = made.generate(prompts, asked)
    assert [each.tokens for each in found] == [x.tokens for each in expected for x in each]
    assert [each.text for each in found] == [x.text for each in expected for x in each]
    assert {each.end for each in found} >= {"stop"}
    stats = made.stats()
    assert stats["accepted"] > 3 if "speculate" in way else stats["evictions"] > 0


def plain_allowed(words: list[str], pieces: list[bytes], tokens: list[int]) -> set[int]:
    """Tokens after which the text still is a beginning of one of the words."""
    text = b"".join(pieces[token] for token in tokens)
    whole = [word.encode() for word in words]
    return {
        number
        for number, piece in enumerate(pieces)
        if piece and any(word.startswith(text + piece) for word in whole)
    }


def test_allowed_tokens_are_those_of_a_plain_loop_wherever_the_text_turns() -> None:
    """The matcher goes on, back, and to other texts; a text that has one way goes the usual way."""
    words = ["abc", "abcabc", "xyz", "to be", "to be or", "tÿ", "tö", "list"]
    pieces, end = tokenizer().engine.pieces(), tokenizer().eod_id
    how = Sampling(regex="|".join(map(re.escape, words)))
    grammar = Grammars(tokenizer()).of(how, [end])
    assert grammar is not None
    rng, tokens, forced = random.Random(4), [], 0
    for _ in range(400):
        allowed = set(grammar.allowed(tokens).nonzero().flatten().tolist())
        text = b"".join(pieces[token] for token in tokens).decode(errors="replace")
        assert (end in allowed) == (text in words)
        expected, allowed = plain_allowed(words, pieces, tokens), allowed - {end}
        assert allowed == expected or (len(allowed) == 1 and allowed < expected)
        forced += allowed != expected
        assert grammar.is_over(tokens) == (not expected)
        guesses = [rng.choice([*expected, 70]) for _ in range(2)]
        cut = grammar.cut(tokens, [*guesses, end])
        assert cut == guesses[: len(cut)]
        assert bool(cut) == (guesses[0] in expected)
        if expected and rng.random() < 0.7:
            tokens = [*tokens, rng.choice(sorted(expected))]
        else:
            tokens = tokens[: rng.randint(0, len(tokens))]
    assert forced < 200


def test_an_answer_ends_where_its_grammar_may_end_and_where_it_must() -> None:
    eod = tokenizer().eod_id
    wish = {"logit_bias": {eod: 1000.0}, "max_tokens": 9, "seed": 1}
    (early,) = engine().generate("a", Sampling(regex="abc(abc)*", **wish))
    assert (early.text, early.end) == ("abc", "stop")
    # No end is needed, nor a token for it, where nothing may follow.
    (whole,) = engine(ends=()).generate("a", Sampling(regex="to be", max_tokens=9, min_tokens=8))
    assert (whole.text, whole.end) == ("to be", "stop")
    (cut,) = engine().generate("a", Sampling(regex="[ab]{30,}", max_tokens=9, temperature=0))
    assert (len(cut.tokens), cut.end) == (9, "length")
    (empty,) = engine().generate("a", Sampling(regex="", max_tokens=9))
    assert (empty.tokens, empty.end) == ([], "stop")
    (named,) = engine().generate("a", Sampling(grammar='start: "abc" <|eod|> "x"', max_tokens=9))
    assert (named.text, named.end) == ("abc", "stop")
    (other,) = engine(ends={5}).generate("a", Sampling(regex="abc(abc)*", **wish))
    assert eod not in other.tokens
    (stopped,) = engine().generate("a", Sampling(regex="abcxyz", stop=["x"], max_tokens=9))
    assert (stopped.text, stopped.end) == ("abc", "stop")


def test_padding_is_never_chosen_and_no_list_may_name_it() -> None:
    made, wish = engine(), {"max_tokens": 60, "temperature": 1000.0}
    for how in ({}, {"regex": "[a-z ]{60}"}, {"repetition_penalty": 0.5}):
        (found,) = made.generate([350, 1], Sampling(seed=1, **wish, **how))
        assert max(found.tokens) < tokenizer().vocab_size
    for how in ({"logit_bias": {350: 1.0}}, {"allowed_token_ids": [350]}, {"bad_words": [[350]]}):
        with pytest.raises(ValueError, match="350"):
            made.generate("a", Sampling(**how))


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ({"json_schema": {"type": "date"}}, "json_schema.*date"),
        ({"json_schema": '{"type": '}, "json_schema.*JSON"),
        ({"json_schema": {"enum": {1, 2}}}, "json_schema.*JSON"),
        ({"json_schema": {"not": {}}}, "json_schema.*not"),
        ({"json_schema": {"anyOf": [{"$ref": "#"}]}}, "json_schema.*leads on"),
        ({"regex": "("}, "regex.*unclosed"),
        ({"regex": "\udcff"}, "regex.*read"),
        ({"grammar": "start: word"}, "grammar.*word"),
        ({"grammar": ""}, "grammar"),
    ],
)
def test_a_bad_grammar_is_refused_with_its_field_before_a_pass(how, words) -> None:
    made = engine()
    with pytest.raises(ValueError, match=words):
        made.generate(["a", "b"], [Sampling(), Sampling(**how)])
    assert made.stats()["waiting"] == made.stats()["passes"] == 0


def test_one_grammar_is_enough_and_needs_a_tokenizer_and_a_library(monkeypatch) -> None:
    with pytest.raises(ValueError, match=r"regex.*json_schema"):
        Sampling(json_schema={}, regex="a")
    with pytest.raises(ValueError, match=r"regex.*tokenizer"):
        Engine(model()).generate([1], Sampling(regex="a"))
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(ImportError, match=r"regex.*mt-infer\[grammar\]"):
        engine().generate("a", Sampling(regex="a"))


class GivesUp(Grammar):
    problem = "too many items"

    def allowed(self, tokens: Any) -> torch.Tensor:
        return super().allowed(tokens) & (len(tokens) < 4)


def test_a_matcher_that_gives_up_ends_its_request_alone(monkeypatch) -> None:
    monkeypatch.setattr("mt_infer.choosing.grammar.Grammar", GivesUp)
    made = engine()
    bad = made.stream("a", Sampling(regex="[abc]{60}", max_tokens=40, seed=1))
    good = made.stream("a", Sampling(max_tokens=9, seed=1, allowed_token_ids=[5, 6]))
    next(good)
    with pytest.raises(LogitsError, match="too many items"):
        list(bad)
    assert len(list(good)[-1].completion.tokens) == 9


def test_a_sentencepiece_model_spells_its_grammar(tmp_path: Path) -> None:
    """Its own spelling of a text begins with a space, and its <unk> is not the text `<unk>`."""
    (tmp_path / "text").write_text("".join(CORPUS) + "k n u < >\n")
    sentencepiece.SentencePieceTrainer.train(
        input=str(tmp_path / "text"),
        model_prefix=str(tmp_path / "spm"),
        vocab_size=60,
        hard_vocab_limit=False,
        minloglevel=2,
    )
    words = load_tokenizer(tmp_path / "spm.model")
    rng = random.Random(2)
    schema = OBJECT | {"properties": {"name": {"enum": ["abc", "to be"]}}, "required": ["name"]}
    for how in ({"regex": "to be <unk>"}, {"json_schema": schema}):
        grammar, tokens = Grammars(words).of(Sampling(**how), [words.eod_id]), []
        assert grammar is not None
        while not grammar.is_over(tokens):
            allowed = grammar.allowed(tokens).nonzero().flatten().tolist()
            tokens.append(rng.choice(allowed))
            assert tokens[-1] > 0  # <unk>
            assert len(tokens) < 200
        text = words.decode(tokens)
        if "regex" in how:
            assert text == "to be <unk>"
        else:
            jsonschema.validate(json.loads(text), schema)
