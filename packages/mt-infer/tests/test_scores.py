"""The engine's scores equal the trainer's forward, in every bit if both are invariant."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from mt_infer import Engine, EngineOptions, PromptError
from mt_model import (
    GPT,
    AttentionConfig,
    GatedDeltaNetConfig,
    Kernels,
    LayerConfig,
    Mamba2Config,
    MLAConfig,
    MLPConfig,
    MoEConfig,
    RopeConfig,
    gpt,
)
from mt_parallel_state import ParallelLayout, ParallelState
from mt_schedule import split_layers
from mt_testing import sample
from torch import Tensor

SIZES: dict[str, Any] = {
    "vocab_size": 62,
    "hidden_size": 24,
    "max_sequence_length": 64,
    "init_std": 0.4,
}
ATTENTION = AttentionConfig(num_heads=4, num_kv_heads=2, head_dim=6, rope=RopeConfig())
LATENT = MLAConfig(
    num_heads=4, kv_lora_rank=12, nope_head_dim=6, rope_head_dim=4, v_head_dim=10, rope=RopeConfig()
)
MAMBA = Mamba2Config(num_heads=4, head_dim=6, state_size=10, num_groups=2)
DELTA = GatedDeltaNetConfig(num_key_heads=2, num_value_heads=4, key_dim=6, value_dim=10)
MLP = MLPConfig(ffn_size=44)
EXPERTS = MoEConfig(num_experts=6, top_k=2, ffn_size=14, shared_size=10, shared_gate=True)
# Widths that no vector of a CPU divides.
LAYERS = {
    "dense": LayerConfig(mixer=ATTENTION, feed_forward=MLP),
    "experts": LayerConfig(mixer=ATTENTION, feed_forward=EXPERTS),
    "latent": LayerConfig(mixer=LATENT, feed_forward=MLP),
    "mamba": LayerConfig(mixer=MAMBA, feed_forward=MLP),
    "delta": LayerConfig(mixer=DELTA, feed_forward=MLP),
}
OPTIONS: dict[str, Any] = {"blocks": 40, "block_size": 4, "max_batch": 5, "max_batch_tokens": 11}
TOKENS = [[int(each) for each in torch.arange(40).mul(step).remainder(61)] for step in (7, 11)]
DTYPES = torch.float32, torch.bfloat16


def built(name: str, state: ParallelState, kernels: str, dtype: torch.dtype) -> GPT:
    config = gpt(**SIZES, layers=[LAYERS[name], LAYERS["dense"]])
    layers = split_layers(config.num_layers, state.size("pp"))[state.index("pp")]
    how = {"kernels": Kernels(attention=kernels), "dtype": dtype, "seed": 3}
    return GPT(config, state, layers=layers, **how).eval()


@torch.no_grad()
def trained(model: GPT, tokens: list[int], state: ParallelState) -> Tensor | None:
    """Return the logprobs of the trainer's forward, on the last stage."""
    batch, x, shape = {"tokens": torch.tensor([tokens])}, None, (1, len(tokens), 24)
    for stage in range(state.size("pp")):
        if stage == state.index("pp"):
            x = model(x, batch)
        elif x is None:
            x = torch.empty(shape, dtype=model.shard.dtype)
        if stage < state.size("pp") - 1:
            torch.distributed.broadcast(x, group=state.group("pp"), group_src=stage)
    if state.index("pp") < state.size("pp") - 1:
        return None
    assert isinstance(x, Tensor)
    logprobs = x[0, :-1].float().log_softmax(-1)
    return logprobs.gather(1, torch.tensor(tokens[1:])[:, None])[:, 0]


def both(name: str, layout: dict[str, int], dtype: torch.dtype) -> tuple[Any, Any]:
    """Return the engine's scores of texts, beside other requests, and the trainer's."""
    with ParallelState(ParallelLayout(**layout), device="cpu") as state:
        model = built(name, state, "invariant", dtype)
        options = EngineOptions(**OPTIONS, batch_invariant=True)
        engine, found = Engine(model, state=state, options=options), None
        if state.rank > 0:
            engine.serve()
        else:
            with engine:
                beside = engine.stream([[1, 2, 3, 4], [5, 6]])
                next(beside)
                found = [engine.score(tokens) for tokens in TOKENS]
                beside.close()
        return found, [trained(model, tokens, state) for tokens in TOKENS]


@pytest.fixture
def threads() -> Iterator[Callable[[int], None]]:
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("name", "dtype", "count"), sample(product(LAYERS, DTYPES, (1, 2)), every=3)
)
def test_a_score_has_the_bits_of_the_trainers_forward(threads, name, dtype, count) -> None:
    threads(count)
    for found, expected in zip(*both(name, {}, dtype), strict=True):
        assert torch.equal(found, expected)


@pytest.mark.parametrize(
    ("name", "layout", "dtype"), sample(product(LAYERS, ("tp", "pp"), DTYPES), every=3)
)
def test_a_score_has_the_bits_of_the_trainers_forward_on_its_layout(
    ranks, name, layout, dtype
) -> None:
    results = ranks(2, partial(both, name, {layout: 2}, dtype))
    for found, expected in zip(results[0][0], results[-1][1], strict=True):
        assert torch.equal(found, expected)


def test_a_score_with_usual_kernels_is_the_models_forward() -> None:
    with ParallelState(ParallelLayout(), device="cpu") as state:
        model = built("dense", state, "auto", torch.float64)
        made = Engine(model, options=EngineOptions(**OPTIONS))
        expected = trained(model, TOKENS[0], state)
    for _ in range(2):  # the second time blocks of the beginning are cached
        found = made.score(TOKENS[0])
        assert found.dtype == torch.float32
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
    with pytest.raises(PromptError, match="65 tokens"):
        made.score([1] * 65)
