"""Guesses of an engine: whoever makes them, a request has the tokens that it has alone."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from mt_infer import Engine, EngineOptions, Sampling
from mt_model import (
    GPT,
    AttentionConfig,
    Kernels,
    LayerConfig,
    LongropeScaling,
    Mamba2Config,
    MLPConfig,
    MTPConfig,
    RopeConfig,
    gpt,
)
from test_engine import MODELS, SIZES, WAYS, alone, check, model_of, requests
from torch import Tensor

MTP = {**MODELS["llama"], "mtp": MTPConfig(depths=2)}
LONGROPE = LongropeScaling(
    short_factor=(1.0,) * 4, long_factor=(2.0,) * 4, original_length=20, factor=2.0
)


def built(seed: int = 3, **how: Any) -> GPT:
    return GPT(gpt(**SIZES | how), dtype=torch.float64, seed=seed).eval()


def greedy(number: int, max_tokens: int) -> tuple[list[list[int]], Sampling]:
    prompts = [prompt for prompt, _ in requests(random.Random(1), number)]
    return prompts, Sampling(temperature=0, seed=0, max_tokens=max_tokens)


@pytest.mark.parametrize("way", ["evicted", "cached"])
def test_a_model_that_guesses_its_own_tokens_is_always_right(way) -> None:
    how = WAYS[way] | {"block_size": 4}
    plain = Engine(model_of("llama"), options=EngineOptions(**how))
    made = Engine(model_of("llama"), options=EngineOptions(**how, speculate=model_of("llama")))
    asked = greedy(10, max_tokens=25)
    for _ in range(2):  # the second time blocks are found, with the keys of both models
        assert made.generate(*asked) == plain.generate(*asked)
    stats = made.stats()
    assert stats["accepted"] == stats["drafted"] > 100
    assert stats["evictions" if way == "evicted" else "prefix_tokens"] > 0
    assert stats["passes"] < plain.stats()["passes"] / 2


def often_right(asked: Any, expected: Any) -> Any:
    """What guesses the tokens of known texts, of which the last ones are wrong."""
    rng = random.Random(3)
    whole = [[*prompt, *done.tokens] for (prompt, _), done in zip(asked, expected, strict=True)]

    def drawn(tokens: list[int], most: int) -> list[int]:
        known = next((each for each in whole if each[: len(tokens)] == tokens), tokens)
        right = known[len(tokens) : len(tokens) + rng.randint(0, most)]
        return [*right, *([0] * most)][:most]

    return drawn


def test_accepted_guesses_count_in_the_penalties_of_later_tokens(monkeypatch) -> None:
    how = Sampling(temperature=0, seed=0, max_tokens=20, frequency_penalty=2.0)
    prompts, _ = greedy(6, max_tokens=20)
    expected = Engine(model_of("llama"), options=EngineOptions()).generate(prompts, how)
    guess = often_right([(prompt, how) for prompt in prompts], expected)
    monkeypatch.setattr("mt_infer.engine.drafts.ngram_drafts", guess)
    made = Engine(model_of("llama"), options=EngineOptions(speculate="ngram", num_drafts=3))
    assert made.generate(prompts, how) == expected
    assert made.stats()["accepted"] > 20


@pytest.mark.parametrize("name", ["mamba2", "delta"])
def test_recurrent_layers_take_back_guesses_that_are_right_at_first(name, monkeypatch) -> None:
    monkeypatch.setattr("mt_infer.engine.drafts.ngram_drafts", often_right(*alone(name, 8, 1)))
    for way in ("guessed", "evicted"):
        stats = check(name, way, 8, seed=1, speculate="ngram", num_drafts=3)
        assert 20 < stats["accepted"] < stats["drafted"] - 20


def test_guesses_and_kept_states_change_no_bit(monkeypatch) -> None:
    mixers = (
        Mamba2Config(num_heads=4, head_dim=16, state_size=16),
        AttentionConfig(num_heads=4, num_kv_heads=2, head_dim=16, rope=RopeConfig()),
    )
    stack = [LayerConfig(mixer=mixer, feed_forward=MLPConfig(ffn_size=96)) for mixer in mixers]
    sizes = {name: size for name, size in SIZES.items() if name != "num_layers"}
    config = gpt(**sizes | {"hidden_size": 64}, layers=stack)
    model = GPT(config, dtype=torch.bfloat16, seed=3, kernels=Kernels(attention="invariant")).eval()
    asked = requests(random.Random(7), 8)
    plain = EngineOptions(max_batch=1, prefix_cache=False, batch_invariant=True)
    expected = [Engine(model, options=plain).generate(*each)[0] for each in asked]
    monkeypatch.setattr("mt_infer.engine.drafts.ngram_drafts", often_right(asked, expected))
    made = Engine(model, options=EngineOptions(block_size=4, speculate="ngram", **WAYS["evicted"]))
    prompts, how = zip(*asked, strict=True)
    assert made.generate(list(prompts), list(how)) == expected
    stats = made.stats()
    assert min(stats["accepted"], stats["prefix_tokens"], stats["evictions"]) > 0


@pytest.mark.parametrize("name", ["llama", "mamba2"])
def test_guesses_of_another_model_change_nothing(name) -> None:
    other = built(seed=5, num_layers=1, num_heads=2, hidden_size=16, max_sequence_length=48)
    stats = check(name, "evicted", 8, seed=1, speculate=other, num_drafts=3)
    assert 0 < stats["accepted"] < stats["drafted"]


@pytest.mark.parametrize("way", ["evicted", "cached"])
def test_guesses_of_modules_that_predict_further_tokens_change_nothing(way, monkeypatch) -> None:
    monkeypatch.setitem(MODELS, f"mtp {way}", MTP)
    stats = check(f"mtp {way}", way, 8, seed=1, speculate="mtp", num_drafts=3)
    assert 0 < stats["accepted"] < stats["drafted"]


@torch.no_grad()
def guessed(model: GPT, text: list[int], number: int) -> list[int]:
    """Guess the tokens behind a text by MTP modules over the whole text, without pages."""

    def output(module: Any, h: Tensor, tokens: list[int]) -> Tensor:
        row = torch.tensor([tokens[-h.shape[1] :]])
        _, shared = model.begin(None, {"tokens": row})
        return module(h, model.embedding(row), shared)[0]

    x, shared = model.begin(None, {"tokens": torch.tensor([text[:-1]])})
    x, known = model.final_norm(model.run_layers(x, shared)[0]), list(text)
    for module in model.mtp[:number]:
        given, x = x, output(module, x, known)
        known.append(int(model.head(x[:, -1:], tied=model.embedding.weight).argmax()))
    for _ in range(number - len(model.mtp)):
        given = torch.cat((given, x[:, -1:]), 1)
        x = output(model.mtp[-1], given, known)
        known.append(int(model.head(x[:, -1:], tied=model.embedding.weight).argmax()))
    return known[len(text) :]


@pytest.mark.parametrize("depths", [1, 2])
def test_modules_guess_as_they_do_over_whole_texts(depths, monkeypatch) -> None:
    model = built(**MTP | {"mtp": MTPConfig(depths=depths)})
    how = WAYS["evicted"] | {"prefix_cache": False, "block_size": 4, "speculate": "mtp"}
    made, found = Engine(model, options=EngineOptions(**how)), []
    drafter = made._loop.drafter
    fill = drafter.fill

    def watched(parts: Any, answers: Any) -> Any:
        filled = fill(parts, answers)
        found.extend((list(p.request.tokens), list(p.drafts)) for p in filled if p.drafts)
        return filled

    monkeypatch.setattr(drafter, "fill", watched)
    made.generate(*greedy(6, max_tokens=12))
    assert made.stats()["evictions"] > 0
    assert {len(drafts) for _, drafts in found} == {1, 2, 3, 4}
    for text, drafts in found:
        assert drafts == guessed(model, text, len(drafts))


def test_modules_that_know_the_next_token_are_always_right() -> None:
    model = built(**MTP, tied=False)
    with torch.no_grad():
        for layer in model.built_layers():  # no layer adds anything, so a token decides the next
            layer.mixer.out.weight.zero_()
            layer.feed_forward.down.weight.zero_()
        for module in model.mtp:
            weight = module.projection.weight.zero_()
            weight[:, weight.shape[0] :].fill_diagonal_(1)
    options = EngineOptions(block_size=4, speculate="mtp", **WAYS["evicted"])
    made = Engine(model, options=options)
    made.generate(*greedy(10, max_tokens=25))
    stats = made.stats()
    assert stats["accepted"] == stats["drafted"] > 100


@pytest.mark.parametrize(
    ("how", "speculate", "field"),
    [
        (MODELS["llama"], {"num_heads": 4, "vocab_size": 60}, "60 tokens.* 64"),
        (MODELS["llama"], MODELS["mamba2"] | {"num_layers": None}, "recurrent"),
        (MODELS["llama"], "mtp", "model.mtp"),
        (MODELS["llama"], "runs/other", "from_folder"),
        ({"num_heads": 4, "rope": RopeConfig(scaling=LONGROPE)}, "ngram", "length"),
    ],
)
def test_guesses_that_cannot_be_made_or_taken_back_are_refused(how, speculate, field) -> None:
    if isinstance(speculate, dict):
        given = SIZES | speculate
        if given["num_layers"] is None:
            del given["num_layers"]
        speculate = GPT(gpt(**given))
    with pytest.raises(ValueError, match=f"speculate=.*{field}"):
        Engine(built(**how), options=EngineOptions(speculate=speculate))


def test_a_folder_guesses_and_a_runs_modules_do(saved_run, write_run, tmp_path) -> None:
    sizes = {"vocab_size": 264, "hidden_size": 16, "num_heads": 4, "max_sequence_length": 32}
    other = write_run(tmp_path / "mtp", gpt(**sizes, num_layers=1, mtp=MTPConfig()))
    asked = "to be", Sampling(seed=1, max_tokens=12)
    plain = Engine.from_folder(other).generate(*asked)
    for speculate in ("ngram", "mtp", saved_run, str(other)):
        made = Engine.from_folder(other, speculate=speculate)
        assert made.generate(*asked) == plain
        assert speculate == "ngram" or made.stats()["drafted"] > 0
        made.sleep()
        made.wake()
        assert made.generate(*asked) == plain
    assert made.stats()["accepted"] == made.stats()["drafted"]  # the last one guesses for itself
    modules = Engine.from_folder(other, speculate="mtp", step=1)
    assert modules.load_step() == 2
    assert modules.generate(*asked) == plain
