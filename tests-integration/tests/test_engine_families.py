"""Requests of every family that come, go and share passes have the tokens that each has alone.

The families' rows are mt-hf's. A few places run in CI, the grid in the campaign.
"""

from __future__ import annotations

import random
import sys
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from mt_infer import Engine, Sampling
from mt_parallel_state import ParallelLayout, ParallelState

sys.path.append(str(Path(__file__).parents[2] / "packages/mt-hf/tests"))
from family_row import ROWS, WITH_ENCODER
from llava_row import IMAGE
from llava_row import ROW as LLAVA

NUMBER, NEW = 32, 12
_PLAIN: dict[str, Any] = {"blocks": 400, "block_size": 4, "prefix_cache": False, "max_batch": 32}
_SMALL = {"blocks": 18, "max_batch": 6}
WAYS: dict[str, dict[str, Any]] = {
    "plain": _PLAIN,
    "chunks": _PLAIN | {"max_batch_tokens": 9},
    "prefix": _PLAIN | {"prefix_cache": True},
    "evicted": _PLAIN | _SMALL,
    "host": _PLAIN | _SMALL | {"host_blocks": 60},
    "guesses": _PLAIN | {"speculate": "ngram", "num_drafts": 3},
    "all": _PLAIN
    | _SMALL
    | {"max_batch_tokens": 9, "prefix_cache": True, "host_blocks": 40, "speculate": "ngram"},
}
# What counts that a way does what it is for.
COUNTED = {"prefix": "prefix_tokens", "evicted": "evictions", "host": "restored_tokens"}
COUNTED |= {"guesses": "drafted", "all": "drafted"}
FAMILIES = {row.name: row for row in (*ROWS, *WITH_ENCODER, LLAVA) if row.generates}
THIRD = list(FAMILIES)[::3]
IN_CI = {("llama", "all"), ("qwen3_next", "host"), ("t5", "chunks")}


class Asked(NamedTuple):
    """A request, and after how many tokens its caller goes; None to the end."""

    prompt: list[int]
    images: list[torch.Tensor] | None
    sampling: Sampling
    leaves: int | None


def drawn(name: str, config: Any, number: int = NUMBER) -> list[Asked]:
    """Draw requests of which some begin alike, some repeat themselves, and some end early."""
    rng = random.Random(name)
    has_images = name == LLAVA.name
    vocab = IMAGE if has_images else config.vocab_size
    beginnings = [[rng.randrange(1, vocab) for _ in range(16)] for _ in range(3)]
    found = []
    for seed in range(number):
        prompt = beginnings[seed % 3][: rng.randint(0, 16)]
        prompt += [rng.randrange(1, vocab) for _ in range(rng.randint(1, 8))]
        if seed % 5 == 0:
            prompt = (prompt[:3] * 8)[:20]
        images = None
        if has_images and seed % 2:
            tower = config.vision_config
            shape = getattr(tower, "num_channels", 3), tower.image_size, tower.image_size
            generator = torch.Generator().manual_seed(seed % 4)
            images = [torch.randn(shape, generator=generator)]
            prompt.insert(min(2, len(prompt)), IMAGE)
        how = {"temperature": (0, 0.8)[seed % 4 == 3], "max_tokens": rng.randint(1, NEW)}
        leaves = rng.randint(1, NEW) if seed % 6 == 1 else None
        found.append(Asked(prompt, images, Sampling(**how, seed=seed, logprobs=True), leaves))
    return found


def alone(engine: Engine, asked: list[Asked]) -> list[tuple[list[int], list[float] | None]]:
    """Answer one request after the other."""
    found = []
    for each in asked:
        (done,) = engine.generate(each.prompt, each.sampling, each.images)
        found.append((done.tokens, done.logprobs))
    return found


def together(engine: Engine, asked: list[Asked]) -> list[tuple[list[int], list[float]]]:
    """Answer requests that arrive, and are read and left, in a drawn order."""
    rng = random.Random(len(asked))
    found: list[tuple[list[int], list[float]]] = [([], []) for _ in asked]
    waiting, running = list(range(len(asked))), dict[int, Any]()
    while waiting or running:
        while waiting and (not running or rng.random() < 0.7):
            number = waiting.pop(0)
            each = asked[number]
            running[number] = engine.stream(
                each.prompt, each.sampling, None if each.images is None else [each.images]
            )
            _read(running, number, each.leaves, found)
        if running:
            number = rng.choice(list(running))
            _read(running, number, asked[number].leaves, found)
    return found


def _read(
    running: dict[int, Any],
    number: int,
    leaves: int | None,
    found: list[tuple[list[int], list[float]]],
) -> None:
    """Read a delta of an answer; its caller goes when it has enough."""
    delta = next(running[number], None)
    tokens, logprobs = found[number]
    if delta is not None:
        tokens += delta.tokens
        logprobs += delta.logprobs or []
    if delta is None or (leaves is not None and len(tokens) >= leaves):
        running.pop(number).close()


def check(engine: Engine, asked: list[Asked], found: Any, expected: Any) -> None:
    """Compare answers; cancelled ones are beginnings."""
    for number, (each, own, whole) in enumerate(zip(asked, found, expected, strict=True)):
        tokens, logprobs = whole
        count = len(own[0]) if each.leaves is not None else len(tokens)
        assert own[0] == tokens[:count], f"request {number}"
        assert own[0] or not tokens
        if engine.batch_invariant:
            assert own[1] == logprobs[:count], f"request {number}"
        else:
            assert own[1] == pytest.approx(logprobs[:count], abs=1e-4)
    stats = engine.stats()
    assert stats["free_blocks"] == stats["blocks"]
    assert stats["running"] == stats["waiting"] == 0


class Made(NamedTuple):
    """A family's folder, its model in transformers, and what requests have alone."""

    folder: Path
    model: Any
    asked: list[Asked]
    expected: list[tuple[list[int], list[float] | None]]


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    known: dict[tuple[str, int], Made] = {}

    def make(name: str, index: int = 0) -> Made:
        if (name, index) not in known:
            folder = tmp_path_factory.mktemp(name) / "model"
            model = FAMILIES[name].build(index)
            model.save_pretrained(folder)
            asked = drawn(name, model.config)
            engine = Engine.from_folder(folder, **WAYS["plain"])
            known[name, index] = Made(folder, model, asked, alone(engine, asked))
        return known[name, index]

    return make


def place(name: str, way: str) -> Any:
    marks = () if (name, way) in IN_CI else pytest.mark.campaign
    return pytest.param(name, way, id=f"{name}-{way}", marks=marks)


@pytest.mark.parametrize(("name", "way"), [place(name, way) for name in FAMILIES for way in WAYS])
def test_requests_have_the_answers_that_each_has_alone(made, name, way) -> None:
    folder, _, asked, expected = made(name)
    engine = Engine.from_folder(folder, **WAYS[way])
    assert engine.batch_invariant
    check(engine, asked, together(engine, asked), expected)
    counted = COUNTED.get(way)
    # Prompts of an encoder aren't tokens of the decoder, whose texts begin alike by chance.
    if counted is not None and (way != "prefix" or not FAMILIES[name].has_encoder):
        assert engine.stats()[counted] > 0


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=() if n == "qwen3_moe" else pytest.mark.campaign) for n in FAMILIES],
)
def test_greedy_answers_are_those_of_transformers(made, name) -> None:
    folder, model, asked, expected = made(name)
    greedy = [number for number, each in enumerate(asked) if not each.sampling.temperature]
    for number in greedy[:8]:
        each = asked[number]
        assert generated(folder, model, name, each) == expected[number][0]


@torch.inference_mode()
def generated(folder: Path, model: Any, name: str, asked: Asked) -> list[int]:
    """Return the tokens of transformers."""
    prompt, more = asked.prompt, {}
    if asked.images is not None:
        from mt_hf import open_pretrained
        from mt_model import expand_image_tokens

        images = open_pretrained(folder).config.images
        prompt = expand_image_tokens(prompt, images, num_images=1)
        more = {"pixel_values": torch.stack(asked.images)}
    given = torch.tensor([prompt])
    has_encoder = FAMILIES[name].has_encoder
    how = {"attention_mask": torch.ones_like(given), "do_sample": False, **more}
    # Its cache has a layer for each of the encoder's, and a decoder may have more.
    how |= {"use_cache": not has_encoder, "max_new_tokens": asked.sampling.max_tokens}
    return model.generate(given, **how)[0, 1 if has_encoder else len(prompt) :].tolist()


@pytest.mark.parametrize(
    ("index", "way"), [pytest.param(1, "host", marks=pytest.mark.campaign), (2, "chunks")]
)
def test_a_model_whose_keys_depend_on_the_length_has_usual_kernels(made, index, way) -> None:
    folder, _, asked, expected = made("phi3", index)
    engine = Engine.from_folder(folder, **WAYS[way])
    assert not engine.batch_invariant
    assert engine.model.shard.kernels.attention == "auto"
    check(engine, asked, together(engine, asked), expected)


def on_ranks(folder: Path, layout: dict[str, int], dtype: str, asked: list[Asked]) -> None:
    """Compare answers in one batch with each alone on the same ranks."""
    expected = None
    with ParallelState(ParallelLayout(**layout), device="cpu") as state:
        for way in ("plain", "all"):
            engine = Engine.from_folder(folder, state=state, dtype=dtype, **WAYS[way])
            if state.rank > 0:
                engine.serve()
                continue
            with engine:
                if expected is None:
                    expected = alone(engine, asked)
                else:
                    check(engine, asked, together(engine, asked), expected)


@pytest.mark.parametrize(
    ("name", "layout", "dtype"),
    [
        pytest.param(
            *(name, layout, dtype),
            id=f"{name}-{dtype}-{next(iter(layout), 'alone')}",
            marks=() if (name, dtype) == ("deepseek_v2", "bf16") else pytest.mark.campaign,
        )
        for name in THIRD
        for layout, dtype in (({"tp": 2}, "fp32"), ({"pp": 2}, "fp32"), ({}, "bf16"))
    ],
)
def test_requests_on_ranks_and_in_bf16_have_the_answers_that_each_has_alone(
    ranks, tmp_path, name, layout, dtype
) -> None:
    model = FAMILIES[name].build(0)
    model.save_pretrained(tmp_path / "model")
    asked = drawn(name, model.config, NUMBER if layout == {} else 16)
    call = partial(on_ranks, tmp_path / "model", layout, dtype, asked)
    ranks(2, call, timeout=600) if layout else call()
