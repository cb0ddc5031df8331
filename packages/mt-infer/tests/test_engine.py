"""Each request has the tokens and logprobs that it has alone, whatever runs beside it."""

from __future__ import annotations

import asyncio
import random
import threading
from collections import deque
from functools import cache
from typing import Any

import pytest
import torch
from mt_infer import (
    Completion,
    Delta,
    Engine,
    EngineOptions,
    LogitsError,
    Sampling,
    StaticEngine,
    load_run,
)
from mt_model import (
    GPT,
    AlibiConfig,
    DynamicScaling,
    GatedDeltaNetConfig,
    Kernels,
    LayerConfig,
    LongropeScaling,
    Mamba2Config,
    MLAConfig,
    MLPConfig,
    RopeConfig,
    gpt,
)
from mt_parallel_state import ParallelLayout, ParallelState

SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "num_layers": 2,
    "max_sequence_length": 64,
    "init_std": 0.4,
}
DYNAMIC = DynamicScaling(factor=2.0, original_length=16)
DELTA = GatedDeltaNetConfig(num_key_heads=2, num_value_heads=2, key_dim=8, value_dim=8)
LONGROPE = LongropeScaling(
    short_factor=(1.0, 1.5), long_factor=(3.0, 9.0), original_length=20, factor=4.0
)
MLA = MLAConfig(
    num_heads=4, kv_lora_rank=16, nope_head_dim=8, rope_head_dim=4, v_head_dim=8, rope=RopeConfig()
)


def layers(*mixers: Any) -> list[LayerConfig]:
    return [LayerConfig(mixer=mixer, feed_forward=MLPConfig(ffn_size=48)) for mixer in mixers]


MODELS: dict[str, dict[str, Any]] = {
    "llama": {"num_heads": 4, "num_kv_heads": 2},
    "window": {"num_heads": 4, "window": 9},
    "alibi": {"num_heads": 4, "positions": "none", "score_bias": AlibiConfig()},
    "dynamic": {"num_heads": 4, "rope": RopeConfig(scaling=DYNAMIC)},
    "longrope": {"num_heads": 8, "rope": RopeConfig(scaling=LONGROPE)},
    "mla": {"layers": layers(MLA, MLA)},
    "mamba2": {"layers": layers(Mamba2Config(num_heads=4, head_dim=16, state_size=8), MLA)},
    "delta": {"layers": layers(DELTA, MLA)},
}  # fmt: skip
WAYS: dict[str, dict[str, Any]] = {
    "plain": {"blocks": 400, "prefix_cache": False},
    "chunks": {"blocks": 400, "max_batch_tokens": 7, "prefix_cache": False},
    "cached": {"blocks": 400},
    "evicted": {"blocks": 18, "max_batch": 5, "max_batch_tokens": 11},
    "offloaded": {"blocks": 18, "max_batch": 5, "max_batch_tokens": 11, "host_blocks": 30},
    "guessed": {"blocks": 40, "max_batch_tokens": 30, "speculate": "ngram"},
}


CHOICES: list[dict[str, Any]] = [
    {"temperature": 0},
    {},
    {"temperature": 0.3},
    {"top_k": 5, "top_p": 0.9},
    {"min_p": 0.1},
]
MORE: list[dict[str, Any]] = [
    {},
    {"repetition_penalty": 1.3, "frequency_penalty": 0.2},
    {"stop_token_ids": [7]},
]


def model_of(name: str) -> GPT:
    given = SIZES | MODELS[name]
    if "layers" in given:
        del given["num_layers"]
    return GPT(gpt(**given), dtype=torch.float64, seed=3).eval()


def requests(rng: random.Random, number: int) -> list[tuple[list[int], Sampling]]:
    """Prompts of which some begin alike and some repeat themselves, each with its parameters."""
    beginnings = [[rng.randrange(64) for _ in range(22)] for _ in range(2)]
    found = []
    for index in range(number):
        prompt = [rng.randrange(64) for _ in range(rng.randint(1, 30))]
        if rng.random() < 0.5:
            prompt = rng.choice(beginnings)[: rng.randint(9, 22)] + prompt[:6]
        elif rng.random() < 0.5:
            prompt = (prompt[:4] * 8)[:30]
        choice, more = rng.choice(CHOICES), rng.choice(MORE)
        how = {"seed": index % 5, "max_tokens": rng.randint(1, 30), "logprobs": 2}
        found.append((prompt, Sampling(**choice, **more, **how)))
    return found


def together(
    engine: Engine, asked: list[tuple[list[int], Sampling]], rng: random.Random
) -> dict[int, tuple[list[int], list[float], Completion | None]]:
    """Ask for one after the other while earlier ones run, and leave some before their end."""
    streams, found = {}, {}
    waiting = list(range(len(asked)))
    left = {index: rng.randint(1, 8) for index in waiting if rng.random() < 0.2}
    while waiting or streams:
        if waiting and (not streams or rng.random() < 0.4):
            index = waiting.pop(0)
            streams[index] = engine.stream(*asked[index])
            found[index] = [], [], None
        index = rng.choice(list(streams))
        delta = next(streams[index], None)
        if delta is None:
            del streams[index]
            continue
        tokens, logprobs = found[index][0] + delta.tokens, found[index][1] + (delta.logprobs or [])
        assert len(delta.top_logprobs or []) == len(delta.tokens)
        found[index] = tokens, logprobs, delta.completion
        if len(tokens) >= left.get(index, 99):
            streams.pop(index).close()
    return found


@cache
def alone(name: str, number: int, seed: int) -> tuple[list[Any], list[Completion]]:
    """Requests, and what each gives when nothing else has run or runs."""
    options = EngineOptions(blocks=16, max_batch=1, prefix_cache=False)
    lone, asked = Engine(model_of(name), options=options), requests(random.Random(seed), number)
    return asked, [lone.generate(*each)[0] for each in asked]


def check(name: str, way: str, number: int, seed: int, **more: Any) -> dict[str, int]:
    asked, expected = alone(name, number, seed)
    options = EngineOptions(block_size=4, **WAYS[way] | more)
    engine = Engine(model_of(name), options=options)
    found = together(engine, asked, random.Random(seed))
    for index, (tokens, logprobs, completion) in found.items():
        whole = expected[index]
        assert tokens == whole.tokens[: len(tokens)]
        torch.testing.assert_close(logprobs, whole.logprobs[: len(tokens)], rtol=1e-9, atol=1e-9)
        if completion is not None:
            assert (completion.tokens, completion.end) == (whole.tokens, whole.end)
            assert completion.logprobs == logprobs
            assert len(completion.top_logprobs) == len(logprobs)
    stats = engine.stats()
    assert stats["free_blocks"] == stats["blocks"]
    assert stats["free_host_blocks"] == WAYS[way].get("host_blocks", 0)
    assert stats["running"] == stats["waiting"] == 0
    assert any(completion is not None for *_, completion in found.values())
    return stats


@pytest.mark.parametrize(
    ("name", "way"),
    [
        ("llama", "chunks"),
        ("llama", "evicted"),
        ("window", "chunks"),
        ("mla", "evicted"),
        ("mamba2", "chunks"),
        ("mamba2", "evicted"),
        ("llama", "offloaded"),
        ("mamba2", "offloaded"),
    ],
)
def test_a_request_has_its_own_tokens_and_logprobs(name, way) -> None:
    stats = check(name, way, 12, seed=1)
    assert way not in ("evicted", "offloaded") or stats["evictions"] > 0
    assert (stats["restored_tokens"] > 0) == (way == "offloaded")


@pytest.mark.parametrize("name", ["alibi", "dynamic", "longrope", "delta"])
def test_models_with_other_caches_do_too(name) -> None:
    check(name, "evicted", 6, seed=2)


def test_cached_beginnings_and_right_guesses_change_nothing() -> None:
    for name in ("llama", "mamba2", "delta"):
        assert check(name, "cached", 12, seed=1)["prefix_tokens"] > 20
    assert check("llama", "guessed", 12, seed=1)["accepted"] > 5


@pytest.mark.campaign
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("way", WAYS)
def test_every_model_in_every_way(name, way) -> None:
    if way == "guessed" and name in ("dynamic", "longrope"):
        pytest.skip("can't take a guess back")
    for seed in range(4):
        check(name, way, 32, seed)


def engine(**how: Any) -> Engine:
    return Engine(model_of("llama"), options=EngineOptions(**{"blocks": 64, "block_size": 4} | how))


@pytest.mark.parametrize("name", ["llama", "longrope", "mamba2"])
def test_a_fixed_batch_has_the_tokens_of_the_engine(name) -> None:
    asked, expected = alone(name, 6, 2)
    options = EngineOptions(blocks=90, block_size=4, max_batch=6)
    made = StaticEngine(model_of(name), options=options)
    for _ in range(2):  # what an earlier batch left in the blocks is not seen
        found = made.generate([each[0] for each in asked], [each[1] for each in asked])
        for one, other in zip(found, expected, strict=True):
            assert (one.tokens, one.end, one.seed) == (other.tokens, other.end, other.seed)
            torch.testing.assert_close(one.logprobs, other.logprobs, rtol=1e-9, atol=1e-9)
    with pytest.raises(ValueError, match="max_batch"):
        made.generate([[1]] * 7)
    with pytest.raises(ValueError, match="90"):
        made.generate([[1]] * 6, Sampling(max_tokens=80))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_scores_and_logprobs_have_the_bits_of_the_trainers_forward(dtype) -> None:
    sizes, kernels = SIZES | MODELS["llama"] | {"hidden_size": 64}, Kernels(attention="invariant")
    trained = GPT(gpt(**sizes), dtype=dtype, seed=3, kernels=kernels).eval()
    tokens = [int(each) for each in torch.arange(40).mul(7).remainder(61)]
    logits = trained.logits(torch.tensor([tokens]))[0, :-1].detach().float()
    expected = logits.log_softmax(-1).gather(1, torch.tensor(tokens[1:])[:, None])[:, 0]
    made = Engine(trained, options=EngineOptions(**WAYS["evicted"], batch_invariant=True))
    asked = requests(random.Random(7), 8)
    streams = [made.stream(*each) for each in asked]
    begun = [[next(each)] for each in streams]
    assert torch.equal(made.score(tokens), expected)
    together = [[*first, *rest][-1].completion for first, rest in zip(begun, streams, strict=True)]
    assert together == [made.generate(*each)[0] for each in asked]


def test_kernels_whose_bits_depend_on_the_batch_are_refused_where_others_are_asked_for() -> None:
    assert not engine().batch_invariant
    with pytest.raises(ValueError, match="invariant"):
        engine(batch_invariant=True)


def test_a_generator_refuses_the_parameters_that_it_does_not_use(saved_run) -> None:
    generator = load_run(saved_run, ParallelState(ParallelLayout()))
    for how in ({"repetition_penalty": 1.2}, {"n": 2}, {"regex": "a"}):
        with pytest.raises(ValueError, match=next(iter(how))):
            generator.complete("to be", Sampling(**how))


def test_prompt_logprobs_are_the_scores_beside_a_continuation() -> None:
    made, prompt = engine(max_batch_tokens=5, blocks=12), [3, 9, 27, 17, 51, 25, 11, 33]
    asked = [prompt, prompt[:5], [1, *prompt]]
    how = Sampling(temperature=0, max_tokens=9, prompt_logprobs=2)
    for given, found in zip(asked, made.generate(asked, how), strict=True):
        torch.testing.assert_close(torch.tensor(found.prompt_logprobs), made.score(given))
        for token, logprob, top in zip(
            given[1:], found.prompt_logprobs, found.prompt_top_logprobs, strict=True
        ):
            assert len(top) == 2
            assert max(top.values()) >= logprob
            assert top.get(token, logprob) == logprob


def test_choices_of_a_prompt_differ_and_a_drawn_seed_gives_them_again() -> None:
    made, how = engine(), {"n": 3, "max_tokens": 12}
    first = made.generate([[5, 9, 3], [4]], Sampling(**how))
    assert len({tuple(each.tokens) for each in first}) == 6
    assert first[0].seed == first[2].seed != first[3].seed
    assert made.generate([5, 9, 3], Sampling(**how, seed=first[0].seed)) == first[:3]


def test_a_continuation_ends_at_the_limit_the_context_or_a_token() -> None:
    made = engine()
    (long,) = made.generate([5] * 60, Sampling(temperature=0, max_tokens=9))
    assert (len(long.tokens), long.end) == (4, "context")
    (short,) = made.generate([5, 9, 3], Sampling(temperature=0, max_tokens=9))
    assert (len(short.tokens), short.end) == (9, "length")
    place = next(i for i in range(2, 9) if short.tokens[i] not in short.tokens[:i])
    stop = {"stop_token_ids": [short.tokens[place]], "temperature": 0, "max_tokens": 9}
    (stopped,) = made.generate([5, 9, 3], Sampling(**stop))
    assert (stopped.tokens, stopped.end) == (short.tokens[:place], "stop")
    (later,) = made.generate([5, 9, 3], Sampling(**stop, min_tokens=place + 2))
    assert later.tokens[:place] == stopped.tokens
    assert len(later.tokens) >= place + 2


def test_bad_words_and_biases_reach_the_scores() -> None:
    made, greedy = engine(), {"temperature": 0, "max_tokens": 6}
    (plain,) = made.generate([5, 9, 3], Sampling(**greedy))
    pair = tuple(plain.tokens[1:3])
    (other,) = made.generate([5, 9, 3], Sampling(**greedy, bad_words=[pair]))
    assert other.tokens[:2] == plain.tokens[:2]
    assert other.tokens[2] != plain.tokens[2]
    (biased,) = made.generate([5, 9, 3], Sampling(**greedy, logit_bias={8: 100.0}))
    assert biased.tokens == [8] * 6
    (allowed,) = made.generate([5, 9, 3], Sampling(**greedy, allowed_token_ids=[1, 2]))
    assert set(allowed.tokens) <= {1, 2}


@pytest.mark.parametrize(
    ("prompt", "how", "field"),
    [
        ([], {}, "no tokens"),
        ([99], {}, "token 99"),
        ([1] * 64, {}, "64 tokens"),
        ("text", {}, "tokenizer"),
        ([1], {"logit_bias": {99: 1.0}}, "token 99"),
        ([1], {"bad_words": ["word"]}, "bad_words"),
        ([1] * 30, {"max_tokens": 30}, "more blocks"),
    ],
)
def test_what_cannot_be_served_is_refused_before_a_pass(prompt, how, field) -> None:
    made = engine(blocks=10)
    with pytest.raises(ValueError, match=field):
        made.generate([[1, 2], prompt], Sampling(**({"max_tokens": 3} | how)))
    assert made.stats()["waiting"] == 0


def test_damaged_scores_end_their_request_alone() -> None:
    made = engine()
    with torch.no_grad():
        made.model.embedding.weight[13].fill_(float("nan"))
    how = Sampling(temperature=0, max_tokens=3)
    bad = made.stream([5, 13], how)
    good = made.stream([5, 9], Sampling(temperature=0, max_tokens=3, allowed_token_ids=[1, 2]))
    with pytest.raises(LogitsError, match="token 2 of the text"):
        list(bad)
    assert len(list(good)[-1].completion.tokens) == 3
    assert made.stats()["free_blocks"] == 64


def test_a_stream_has_what_came_while_it_yielded() -> None:
    made = engine()
    asked = [[5, 9], [7, 1, 2]], Sampling(temperature=0, max_tokens=3, seed=0)
    whole = made.generate(*asked)
    stream = made.stream(*asked)
    begun = [next(stream), next(stream)]  # the second one's first token is yielded
    made.generate([4], Sampling(temperature=0, max_tokens=8))  # both end meanwhile
    deltas = [*begun, *stream]
    for index, each in enumerate(whole):
        mine = [delta for delta in deltas if delta.index == index]
        assert [token for delta in mine for token in delta.tokens] == each.tokens
        assert mine[-1].completion == each


def test_an_answer_has_ended_only_behind_its_last_news() -> None:
    made, seen = engine(), list[bool]()
    (answer,) = made.answers([5, 9], Sampling(temperature=0, max_tokens=3, seed=0))

    class News(deque[Delta]):
        def append(self, delta: Delta) -> None:
            seen.append(answer.has_ended)  # a reader of another thread may look now
            super().append(delta)

    answer.news = News()
    with made.submitted([answer]):
        while made.advance():
            pass
    assert answer.news[-1].completion is answer.completion
    assert seen == [False] * 3


def test_other_weights_give_their_own_answers_and_running_requests_go_on_as_asked() -> None:
    made, other = engine(), GPT(model_of("llama").config, dtype=torch.float64, seed=4).eval()
    asked = [5, 9, 3, 7, 1, 2, 8, 4, 6], Sampling(temperature=0, max_tokens=20)
    (old,) = made.generate(*asked)
    weights = dict(other.named_parameters())
    for finish in (True, False):
        made.update_weights(dict(model_of("llama").named_parameters()), step=1)
        stream = made.stream(*asked)
        begun = [next(stream) for _ in range(5)]
        made.update_weights(weights, step=2, finish=finish)
        ended = [*begun, *stream][-1].completion
        assert ended.step == (1 if finish else 2)
        assert (ended.tokens == old.tokens) == finish
        assert ended.tokens[:5] == old.tokens[:5]
    (new,) = made.generate(*asked)
    (fresh,) = Engine(other, options=EngineOptions(blocks=64)).generate(*asked)
    assert (new.tokens, new.step) == (fresh.tokens, 2)
    with pytest.raises(ValueError, match=r"no\.such"):
        made.update_weights({"no.such": torch.ones(2)})


def test_a_newer_step_of_a_run_is_read_into_the_live_model(saved_run) -> None:
    asked = "to be", Sampling(seed=1, max_tokens=8)
    made = Engine.from_folder(saved_run, step=1)
    (first,) = made.generate(*asked)
    memory = {name: x.data_ptr() for name, x in made.model.named_parameters()}
    assert made.load_step() == 2
    assert {name: x.data_ptr() for name, x in made.model.named_parameters()} == memory
    (second,) = made.generate(*asked)
    assert [second] == Engine.from_folder(saved_run).generate(*asked)
    assert (first.step, second.step) == (1, 2)
    assert first.tokens != second.tokens
    with pytest.raises(ValueError, match="from_folder"):
        engine().load_step()


def test_text_comes_in_whole_characters_and_ends_before_a_stop_text(saved_run) -> None:
    made = Engine.from_folder(saved_run)
    (whole,) = made.generate("to be", Sampling(seed=3, max_tokens=10))
    assert whole.text == made.tokenizer.decode(whole.tokens)
    for stop in (whole.text[3:5], "not there", whole.text[:1]):
        how = Sampling(seed=3, max_tokens=10, stop=["never", stop])
        deltas = list(made.stream("to be", how))
        place = whole.text.find(stop)
        expected = whole.text if place < 0 else whole.text[:place]
        assert "".join(each.text for each in deltas) == expected == deltas[-1].completion.text
        assert deltas[-1].completion.end == ("length" if place < 0 else "stop")
        assert [x for each in deltas for x in each.tokens] == deltas[-1].completion.tokens


def test_a_sleeping_engine_has_no_pages_and_answers_alike_awake() -> None:
    made, asked = engine(), ([5, 9, 3], Sampling(temperature=0, max_tokens=8, seed=0))
    before = made.generate(*asked)
    made.sleep()
    with pytest.raises(RuntimeError, match="wake"):
        made.generate(*asked)
    made.wake()
    assert made.generate(*asked) == before
    assert made.stats()["free_blocks"] == 64


def test_calls_of_threads_and_of_an_event_loop_share_passes() -> None:
    made = engine()
    asked = [([index, 3, 5], Sampling(seed=index, max_tokens=12)) for index in range(8)]
    expected = [made.generate(*each)[0] for each in asked]

    async def streamed(each: Any) -> Completion:
        return [delta async for delta in made.astream(*each)][-1].completion

    async def everything() -> list[Any]:
        calls = [made.agenerate(*each) for each in asked[:4]]
        return await asyncio.gather(*calls, *(streamed(each) for each in asked[4:]))

    passes = made.stats()["passes"]
    found = asyncio.run(everything())
    assert [*(each[0] for each in found[:4]), *found[4:]] == expected
    assert made.stats()["passes"] - passes < 8 * 12

    results: dict[int, Any] = {}
    threads = [
        threading.Thread(target=lambda i=i: results.update({i: made.generate(*asked[i])[0]}))
        for i in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [results[index] for index in range(8)] == expected
