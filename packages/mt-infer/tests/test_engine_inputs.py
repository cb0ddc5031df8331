"""Prompts for an encoder, and prompts with images: each answer is the one that it has alone."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from functools import cache, partial
from typing import Any

import pytest
import torch
from mt_infer import Completion, Engine, EngineOptions, PromptError, Sampling, StaticEngine
from mt_infer.engine.prefix import extend_keys
from mt_infer.engine.request import Request
from mt_infer.images import Image
from mt_model import (
    GPT,
    AttentionConfig,
    EncoderDecoder,
    ImageInputConfig,
    Kernels,
    MLPConfig,
    ModelConfig,
    RelativeConfig,
    encoder_decoder_layers,
    gpt,
    vit,
)
from mt_parallel_state import ParallelLayout, ParallelState
from mt_schedule import split_layers

SIZES: dict[str, Any] = {"max_sequence_length": 64, "init_std": 0.4}
IMAGE = 60  # stands for an image of four tokens
WAYS: dict[str, dict[str, Any]] = {
    "chunks": {"blocks": 200, "max_batch_tokens": 7, "prefix_cache": False},
    "cached": {"blocks": 200},
    "evicted": {"blocks": 18, "max_batch": 5, "max_batch_tokens": 9},
    "guessed": {"blocks": 60, "max_batch_tokens": 30, "speculate": "ngram"},
}
CHOICES: list[dict[str, Any]] = [
    {"temperature": 0},
    {"top_k": 5},
    {"top_p": 0.9, "repetition_penalty": 1.3},
]


def t5(state: ParallelState | None = None, hidden_size: int = 32, ffn_size: int = 48) -> GPT:
    heads = {"num_heads": 4, "num_kv_heads": 4, "head_dim": hidden_size // 4}
    attention = AttentionConfig(**heads, scale=1.0, score_bias=RelativeConfig())
    layers = encoder_decoder_layers(attention, MLPConfig(ffn_size=ffn_size), encoder=2, decoder=2)
    how = {"layers": layers, "encoder_layers": 2, "decoder_start": 3, "positions": "none"}
    config = gpt(vocab_size=64, **SIZES, **how, hidden_size=hidden_size)
    return EncoderDecoder(config, state, **stage_of(config, state)).eval()


def llava(state: ParallelState | None = None, hidden_size: int = 32, ffn_size: int = 48) -> GPT:
    sizes = {"hidden_size": hidden_size, "num_layers": 2, "num_heads": 2, "ffn_size": ffn_size}
    tower = vit(**sizes, image_size=8, patch_size=4, pooling=None)
    images = ImageInputConfig(tower=tower, token_id=IMAGE)
    how = {"num_layers": 2, "num_heads": 4, "images": images, "ffn_size": ffn_size}
    config = gpt(vocab_size=64, **SIZES, **how, hidden_size=hidden_size)
    return GPT(config, state, **stage_of(config, state)).eval()


def stage_of(config: ModelConfig, state: ParallelState | None) -> dict[str, Any]:
    pp, index = (1, 0) if state is None else (state.size("pp"), state.index("pp"))
    layers = split_layers(config.num_layers, pp)[index]
    return {"layers": layers, "dtype": torch.float64, "seed": 3}


MODELS = {"t5": t5, "llava": llava}
model_of = cache(lambda name: MODELS[name]())


def asked(name: str, number: int, seed: int) -> list[dict[str, Any]]:
    """Arguments of calls: prompts of which some begin alike, and images of which some repeat."""
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    pictures = torch.randn(3, 3, 8, 8, generator=generator)
    beginning = [rng.randrange(60) for _ in range(20)]
    found = []
    for index in range(number):
        prompt = [rng.randrange(60) for _ in range(rng.randint(1, 12))]
        if rng.random() < 0.5:
            prompt = beginning[: rng.randint(5, 20)] + prompt[:5]
        call: dict[str, Any] = {"prompts": prompt}
        if name == "llava":
            call["images"] = [rng.choice(pictures) for _ in range(rng.randint(0, 3))]
            places = sorted(rng.randint(0, min(6, len(prompt))) for _ in call["images"])
            for place in reversed(places):
                prompt.insert(place, IMAGE)
        how = {"seed": index % 3, "max_tokens": rng.randint(1, 20), "logprobs": 2}
        call["sampling"] = Sampling(**rng.choice(CHOICES), **how)
        found.append(call)
    return found


@cache
def alone(name: str, number: int, seed: int) -> tuple[list[dict[str, Any]], list[Completion]]:
    options = EngineOptions(blocks=40, max_batch=1, max_batch_tokens=64, prefix_cache=False)
    lone, calls = Engine(model_of(name), options=options), asked(name, number, seed)
    return calls, [lone.generate(**call)[0] for call in calls]


def together(engine: Engine, calls: list[dict[str, Any]], rng: random.Random) -> dict[int, Any]:
    """Ask for one after the other while earlier ones run, and leave some before their end."""
    streams, found, waiting = {}, {}, list(range(len(calls)))
    left = {index: rng.randint(1, 6) for index in waiting if rng.random() < 0.2}
    while waiting or streams:
        if waiting and (not streams or rng.random() < 0.4):
            index = waiting.pop(0)
            streams[index], found[index] = engine.stream(**calls[index]), []
        index = rng.choice(list(streams))
        delta = next(streams[index], None)
        if delta is None:
            del streams[index]
            continue
        found[index].append(delta)
        if sum(len(each.tokens) for each in found[index]) >= left.get(index, 99):
            streams.pop(index).close()
    return found


def check(name: str, way: str, number: int, seed: int) -> dict[str, int]:
    calls, expected = alone(name, number, seed)
    engine = Engine(model_of(name), options=EngineOptions(block_size=4, **WAYS[way]))
    found = together(engine, calls, random.Random(seed))
    for index, deltas in found.items():
        whole, tokens = expected[index], [x for each in deltas for x in each.tokens]
        assert tokens == whole.tokens[: len(tokens)]
        logprobs = [x for each in deltas for x in each.logprobs or []]
        torch.testing.assert_close(logprobs, whole.logprobs[: len(tokens)], rtol=1e-9, atol=1e-9)
        if deltas[-1].completion is not None:
            assert (deltas[-1].completion.tokens, deltas[-1].completion.end) == (tokens, whole.end)
            assert tokens == whole.tokens
    stats = engine.stats()
    assert stats["free_blocks"] == stats["blocks"]
    assert sum(deltas[-1].completion is not None for deltas in found.values()) > number / 2
    return stats


@pytest.mark.parametrize("name", MODELS)
def test_a_request_has_its_own_tokens_and_logprobs(name) -> None:
    check(name, "chunks", 8, seed=1)
    assert check(name, "evicted", 8, seed=1)["evictions"] > 0
    if name == "llava":
        assert check(name, "cached", 8, seed=1)["prefix_tokens"] > 8
    else:
        assert check(name, "guessed", 8, seed=1)["accepted"] > 0


@pytest.mark.campaign
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("way", WAYS)
def test_each_way_does(name, way) -> None:
    for seed in range(6):
        check(name, way, 32, seed)


def test_a_fixed_batch_has_the_tokens_of_each_request_alone() -> None:
    calls, expected = alone("t5", 8, 1)
    made = StaticEngine(model_of("t5"), options=EngineOptions(blocks=200, block_size=4))
    found = made.generate(*([each[name] for each in calls] for name in ("prompts", "sampling")))
    assert [each.tokens for each in found] == [each.tokens for each in expected]


def test_an_encoder_reads_a_source_once_for_all_choices_and_later_requests(monkeypatch) -> None:
    made = Engine(t5(), options=EngineOptions(blocks=60, block_size=4))
    read, encode = Counter(), EncoderDecoder.encode

    def counted(self: Any, tokens: Any, *rest: Any) -> None:
        read[tuple(tokens[0].tolist())] += 1
        encode(self, tokens, *rest)

    monkeypatch.setattr(EncoderDecoder, "encode", counted)
    how = Sampling(seed=1, max_tokens=8, n=3)
    first = made.generate([[5, 9, 3, 7, 1], [5, 9]], how)
    assert made.generate([5, 9, 3, 7, 1], how) == first[:3]
    assert read == {(5, 9, 3, 7, 1): 1, (5, 9): 1}
    assert len({tuple(each.tokens) for each in first}) == 6
    made.update_weights({"embedding.weight": -made.model.embedding.weight})
    assert made.generate([5, 9], how)[0].tokens != first[3].tokens
    assert read[5, 9] == 2


def test_scores_follow_a_prompt_of_the_encoder_and_images() -> None:
    source, tokens = [5, 9, 3, 7, 1], [8, 2, 33, 4]
    model = model_of("t5")
    fed = torch.tensor([[3, *tokens]])
    logits = model.logits(fed, encoder_tokens=torch.tensor([source]))[0, :-1]
    expected = logits.log_softmax(-1).gather(1, fed[0, 1:, None])[:, 0].float()
    found = Engine(model, options=EngineOptions(blocks=20)).score(tokens, prompt=source)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)

    model, picture = model_of("llava"), torch.randn(3, 8, 8, dtype=torch.float64)
    whole = torch.tensor([[5, *[IMAGE] * 4, 9, 3]])
    logits = model.logits(whole, pixel_values=picture[None])[0, :-1]
    expected = logits.log_softmax(-1).gather(1, whole[0, 1:, None])[:, 0].float()
    made = Engine(model, options=EngineOptions(blocks=20, block_size=2, max_batch_tokens=2))
    for given in ([5, IMAGE, 9, 3], whole[0], whole[0]):
        found = made.score(given, images=[picture.numpy()])
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", MODELS)
def test_scores_have_the_bits_of_the_trainers_forward(name, dtype) -> None:
    config = MODELS[name](hidden_size=64, ffn_size=96).config
    model = config.build(dtype=dtype, seed=3, kernels=Kernels(attention="invariant")).eval()
    tokens = [int(each) for each in torch.arange(20).mul(7).remainder(59)]
    start, how, given = [], {}, {}
    if name == "t5":
        start, how["prompt"] = [3], tokens[:9]
        given["encoder_tokens"] = torch.tensor([tokens[:9]])
    else:
        tokens[2:6] = tokens[9:13] = [IMAGE] * 4
        given["pixel_values"] = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(1))
        given["pixel_values"] = given["pixel_values"].to(dtype)
        how["images"] = given["pixel_values"]
    fed = torch.tensor([start + tokens])
    logits = model.logits(fed, **given)[0, :-1].float()
    expected = logits.log_softmax(-1).gather(1, fed[0, 1:, None])[:, 0]
    options = EngineOptions(blocks=40, block_size=4, max_batch_tokens=6, batch_invariant=True)
    assert torch.equal(Engine(model, options=options).score(tokens, **how), expected)


def test_a_model_that_sees_the_images_or_none_guesses_for_one_that_does() -> None:
    calls, expected = alone("llava", 8, 1)
    config = gpt(vocab_size=64, **SIZES, hidden_size=32, num_layers=1, num_heads=4)
    blind = GPT(config, dtype=torch.float64, seed=3).eval()
    for guessing, least in ((llava(), 20), (blind, 0)):
        options = EngineOptions(blocks=60, block_size=4, max_batch_tokens=9, speculate=guessing)
        made = Engine(model_of("llava"), options=options)
        given = {name: [each[name] for each in calls] for name in calls[0]}
        found = made.generate(**given)
        assert [each.tokens for each in found] == [each.tokens for each in expected]
        assert made.stats()["accepted"] > least
    other = GPT(replace(config, images=llava(hidden_size=64).config.images), seed=3).eval()
    with pytest.raises(ValueError, match="images"):
        Engine(model_of("llava"), options=EngineOptions(speculate=other))


def test_images_are_found_for_each_prompt() -> None:
    made = Engine(model_of("llava"), options=EngineOptions(blocks=60))
    one, two = torch.randn(2, 3, 8, 8)
    how, prompt = Sampling(temperature=0, max_tokens=6, seed=0), [5, IMAGE, 9]
    (first,), (second,) = (made.generate(prompt, how, images=[each]) for each in (one, two))
    assert first.tokens != second.tokens
    assert made.generate([prompt, [5], prompt], how, [[one], None, two])[::2] == [first, second]
    assert made.generate([prompt], how, one[None]) == made.generate(prompt, how, one) == [first]


@pytest.mark.parametrize(
    ("name", "prompt", "images", "field"),
    [
        ("llava", [5, IMAGE, 9], None, "1 image tokens"),
        ("llava", [5, 9], [torch.zeros(3, 8, 8)], "1 are given"),
        ("llava", [IMAGE], [torch.zeros(3, 8, 9)], r"3, 8, 9"),
        ("llava", [IMAGE], [torch.zeros(3, 8, 8, dtype=torch.uint8)], "uint8"),
        ("llava", [IMAGE, IMAGE, 1, IMAGE, IMAGE], [torch.zeros(3, 8, 8)], "follow"),
        ("llava", [IMAGE, *[1] * 60], [torch.zeros(3, 8, 8)], "64 tokens"),
        ("t5", [5], [torch.zeros(3, 8, 8)], "text alone"),
        ("t5", [5] * 65, None, "65 tokens"),
    ],
)
def test_what_does_not_fit_the_model_is_refused(name, prompt, images, field) -> None:
    made = Engine(model_of(name), options=EngineOptions(blocks=60))
    with pytest.raises(PromptError, match=field):
        made.generate(prompt, Sampling(max_tokens=3), images)


def test_scores_of_what_an_encoder_reads_are_refused() -> None:
    made = Engine(model_of("t5"), options=EngineOptions(blocks=60))
    with pytest.raises(ValueError, match="prompt_logprobs"):
        made.generate([5, 9], Sampling(prompt_logprobs=0))
    with pytest.raises(PromptError, match="encoder"):
        made.score([5, 9])
    with pytest.raises(ValueError, match="encoder"):
        made.embed([5, 9])


def test_a_block_is_known_by_the_images_that_begin_in_it_or_before() -> None:
    def keys(*digests: bytes) -> list[bytes]:
        images = tuple(
            Image(start=start, end=start + 4, digest=digest, pixels=None)
            for start, digest in zip((3, 9), digests, strict=True)
        )
        request = Request(number=0, tokens=[1] * 16, limit=20, images=images)
        extend_keys(request, 8, 2)
        return request.keys

    plain, second, first = keys(b"a", b"b"), keys(b"a", b"c"), keys(b"c", b"b")
    assert [one == other for one, other in zip(plain, second, strict=True)] == [True] * 4 + [
        False
    ] * 4
    assert [one == other for one, other in zip(plain, first, strict=True)] == [True] + [False] * 7


def two_ranks(name: str, axis: str) -> list[Any] | None:
    with ParallelState(ParallelLayout(**{axis: 2})) as state:
        options = EngineOptions(blocks=200, block_size=4)
        made = Engine(MODELS[name](state), state=state, options=options)
        if state.rank > 0:
            made.serve()
            return None
        with made:
            calls = asked(name, 8, seed=1)
            found = made.generate(**{key: [call[key] for call in calls] for key in calls[0]})
            return [each.tokens for each in found]


@pytest.mark.parametrize(
    ("name", "axis"),
    [("t5", "tp"), ("t5", "pp"), ("llava", "tp"), ("llava", "pp"), ("llava", "cp")],
)
def test_ranks_that_share_a_model_agree(ranks, name, axis) -> None:
    expected = [each.tokens for each in alone(name, 8, 1)[1]]
    assert ranks(2, partial(two_ranks, name, axis)) == [expected, None]


def shared_encoder() -> str:
    with ParallelState(ParallelLayout(cp=2)) as state:
        with pytest.raises(ValueError, match="cp=2") as caught:
            Engine(t5(state), state=state)
        return str(caught.value)


def test_an_encoder_whose_text_ranks_would_share_is_refused(ranks) -> None:
    assert all("tp" in message for message in ranks(2, shared_encoder))
