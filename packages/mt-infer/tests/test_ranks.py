"""Ranks that share a model's tensors, experts or layers give the tokens of one process."""

from __future__ import annotations

import random
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from mt_infer import Engine, EngineOptions, RankError, Sampling
from mt_infer.engine import runner
from mt_model import (
    GPT,
    AttentionConfig,
    LayerConfig,
    Mamba2Config,
    MLPConfig,
    MoEConfig,
    RopeConfig,
    gpt,
)
from mt_parallel_state import ParallelLayout, ParallelState
from mt_schedule import split_layers
from torch import Tensor

SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "max_sequence_length": 64,
    "init_std": 0.4,
}
ATTENTION = AttentionConfig(num_heads=4, num_kv_heads=2, head_dim=8, rope=RopeConfig())
MAMBA = Mamba2Config(num_heads=4, head_dim=16, state_size=8)
MLP = MLPConfig(ffn_size=48)
EXPERTS = MoEConfig(num_experts=4, top_k=2, ffn_size=16)
MODELS: dict[str, list[LayerConfig]] = {
    "dense": [LayerConfig(mixer=ATTENTION, feed_forward=MLP)] * 2,
    "experts": [LayerConfig(mixer=ATTENTION, feed_forward=EXPERTS)] * 2,
    # One stage of two has states, and the other keys.
    "hybrid": [LayerConfig(mixer=mixer, feed_forward=MLP) for mixer in (MAMBA, ATTENTION)],
}
LAYOUTS: dict[str, dict[str, int]] = {
    "tp 2": {"tp": 2},
    "pp 2": {"pp": 2},
    "ep 2": {"tp": 2, "ep": 2},
    "cp 2": {"cp": 2},
    "tp 2, pp 2": {"tp": 2, "pp": 2},
    "cp 2, pp 2": {"cp": 2, "pp": 2},
}
OPTIONS: dict[str, Any] = {"blocks": 18, "block_size": 4, "max_batch": 5, "max_batch_tokens": 11}


def built(name: str, state: ParallelState, seed: int = 3, **how: Any) -> GPT:
    config = gpt(**SIZES, layers=MODELS[name])
    layers = split_layers(config.num_layers, state.size("pp"))[state.index("pp")]
    return GPT(config, state, layers=layers, seed=seed, **how).eval()


def requests(number: int) -> list[tuple[list[int], Sampling]]:
    """Prompts of which some repeat themselves, with drawn lengths and parameters."""
    rng, found = random.Random(number), []
    for index in range(number):
        prompt = [rng.randrange(64) for _ in range(rng.randint(1, 20))]
        if index % 3 == 0:
            prompt = (prompt[:3] * 7)[:20]
        how = {"temperature": index % 2, "max_tokens": rng.randint(1, 16), "logprobs": True}
        found.append((prompt, Sampling(seed=index, **how)))
    return found


def answers(engine: Engine, asked: list[tuple[list[int], Sampling]]) -> list[Any]:
    found = engine.generate([each[0] for each in asked], [each[1] for each in asked])
    return [(each.tokens, each.end, each.logprobs) for each in found]


def one_process(name: str, asked: Any, **options: Any) -> list[Any]:
    model = built(name, ParallelState(ParallelLayout()), dtype=torch.float64)
    return answers(Engine(model, options=EngineOptions(**OPTIONS | options)), asked)


def on_ranks(name: str, layout: dict[str, int], asked: Any, options: dict[str, Any]) -> Any:
    runner._LONG, runner._GROUP = 5, 4  # so that ranks share passes, and stages work side by side
    with ParallelState(ParallelLayout(**layout)) as state:
        model = built(name, state, dtype=torch.float64)
        if options.get("speculate") in MODELS:  # a model that guesses is shared alike
            options = options | {"speculate": built(options["speculate"], state, seed=5)}
        engine = Engine(model, state=state, options=EngineOptions(**OPTIONS | options))
        if state.rank > 0:
            engine.serve()
            return None, engine.stats()
        with engine:
            return answers(engine, asked), engine.stats()


def check(ranks: Any, name: str, layout: str, number: int, **options: Any) -> dict[str, int]:
    asked, world = requests(number), 4 if "," in layout else 2
    expected = one_process(name, asked, **options | {"speculate": None})
    call = partial(on_ranks, name, LAYOUTS[layout], asked, options)
    (found, stats), *others = ranks(world, call)
    assert all(other == (None, stats) for other in others)
    for (tokens, end, logprobs), (own, own_end, own_logprobs) in zip(found, expected, strict=True):
        assert (tokens, end) == (own, own_end)
        assert logprobs == pytest.approx(own_logprobs, rel=1e-9, abs=1e-9)
    assert stats["free_blocks"] == stats["blocks"]
    return stats


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        ("dense", "tp 2"),
        ("dense", "pp 2"),
        ("hybrid", "pp 2"),
        ("experts", "ep 2"),
        ("dense", "cp 2"),
    ],
)
def test_ranks_give_the_tokens_of_one_process(ranks, name, layout) -> None:
    assert check(ranks, name, layout, 6)["evictions"] > 0


def test_stages_verify_guesses_and_start_from_cached_blocks(ranks) -> None:
    stats = check(ranks, "dense", "pp 2", 6, blocks=64, max_batch_tokens=30, speculate="ngram")
    assert stats["accepted"] > 0


@pytest.mark.parametrize("layout", ["tp 2", "pp 2"])
def test_ranks_share_a_model_that_guesses(ranks, layout) -> None:
    assert check(ranks, "hybrid", layout, 6, speculate="dense")["drafted"] > 0


@pytest.mark.campaign
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout(ranks, name, layout) -> None:
    if layout == "ep 2" and name != "experts":
        pytest.skip("has no experts")
    if "cp" in layout and name == "hybrid":
        pytest.skip("its states need whole sequences")
    check(ranks, name, layout, 24)


def wrong_layouts() -> None:
    with ParallelState(ParallelLayout(pp=2)) as state, pytest.raises(ValueError, match="pp=1"):
        Engine(built("dense", state))


def test_stages_without_their_layout_are_refused(ranks) -> None:
    ranks(2, wrong_layouts)


def swaps(run: Path, layout: dict[str, int]) -> tuple[list[Any], Tensor] | None:
    """Generate before and after a change of weights, beside a stream that is closed early."""
    with ParallelState(ParallelLayout(**layout)) as state:
        engine = Engine.from_folder(run, state=state, step=1, dtype="fp64", blocks=16, block_size=4)
        weights = {name: x * 0.5 for name, x in engine.model.named_parameters()}
        how = Sampling(seed=3, max_tokens=8)
        if state.rank > 0:
            engine.update_weights(weights)
            engine.serve()
            return None
        left = engine.stream("be", Sampling(seed=1, max_tokens=12))
        next(left)
        found = engine.generate("to be", how)
        left.close()
        engine.load_step()
        found += engine.generate("to be", how)
        engine.update_weights(weights, step=3)
        found += engine.generate("to be", how)
        engine.sleep()
        with pytest.raises(RuntimeError, match="wake"):
            engine.generate("to be", how)
        engine.wake()
        found += engine.generate("to be", how)
        assert engine.stats()["free_blocks"] == 16
        vectors = engine.embed(["to be", "or not"], pooling="mean")
        engine.close()
        return found, vectors


@pytest.mark.parametrize("layout", ["tp 2", "pp 2"])
def test_ranks_follow_streams_and_swaps_of_weights(ranks, write_run, tmp_path, layout) -> None:
    sizes = {"vocab_size": 264, "hidden_size": 16, "num_layers": 2, "num_heads": 4}
    run = write_run(tmp_path / "run", gpt(**sizes, max_sequence_length=32, init_std=0.4))
    (found, vectors), _ = ranks(2, partial(swaps, run, LAYOUTS[layout]))
    expected, own_vectors = swaps(run, {})
    assert found == expected
    torch.testing.assert_close(vectors, own_vectors, rtol=1e-6, atol=1e-6)
    assert [each.step for each in found] == [1, 2, 3, 3]
    assert len({tuple(each.tokens) for each in found}) == 3


def failing(where: str, rank: int) -> str:
    with ParallelState(ParallelLayout(tp=2)) as state:
        engine = Engine(built("dense", state), state=state, options=EngineOptions(**OPTIONS))

        def fail(*_: object) -> None:
            raise OSError("no more memory")

        if state.rank == rank:
            setattr(engine._loop.scheduler if where == "add" else engine._loop.pool, where, fail)
        error = OSError if state.rank == rank else RankError
        with pytest.raises(error) as raised, engine:
            engine.serve() if state.rank > 0 else generate_and_sleep(engine)
        return str(raised.value)


def generate_and_sleep(engine: Engine) -> None:
    engine.generate([1, 2], Sampling(max_tokens=2))
    engine.sleep()


@pytest.mark.parametrize(("where", "rank"), [("add", 1), ("forget", 0)])
def test_an_error_of_a_rank_reaches_the_others(ranks, where, rank) -> None:
    said = ranks(2, partial(failing, where, rank))
    assert said[rank] == "no more memory"
    assert f"rank {rank} of the engine failed: OSError: no more memory" in said[1 - rank]


def wrong_calls() -> None:
    with ParallelState(ParallelLayout(tp=2)) as state:
        engine = Engine(built("dense", state), state=state, options=EngineOptions(**OPTIONS))
        if state.rank > 0:
            with pytest.raises(ValueError, match="serve"):
                engine.generate([1, 2])
            with pytest.raises(ValueError, match="update"):
                engine.serve()
        else:
            with pytest.raises(RankError, match="update_weights"):
                engine.update_weights({})


def test_calls_of_other_ranks_are_refused(ranks) -> None:
    ranks(2, wrong_calls)


def replica() -> list[Any]:
    with ParallelState(ParallelLayout(dp=2)) as state:
        model = built("dense", state, dtype=torch.float64)
        engine = Engine(model, state=state, options=EngineOptions(**OPTIONS))
        return answers(engine, requests(4)[2 * state.rank :][:2])


def test_replicas_are_engines_of_their_own(ranks) -> None:
    first, second = ranks(2, replica)
    expected = one_process("dense", requests(4))
    assert [tokens for tokens, *_ in first + second] == [tokens for tokens, *_ in expected]
