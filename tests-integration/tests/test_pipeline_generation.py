"""Stages with caches of their own generate what one process generates, through the executor."""

from __future__ import annotations

import pytest
import torch
from mt_model import GPT, gpt
from mt_parallel_state import ParallelLayout, ParallelState
from mt_pipeline import Executor, TensorSpec, make_schedule
from mt_schedule import split_layers

SIZES = {"vocab_size": 48, "hidden_size": 16, "num_layers": 4, "num_heads": 4, "num_kv_heads": 2}
REST = {"ffn_size": 24, "max_sequence_length": 24, "init_std": 0.3}
CONFIGS = {
    "window": gpt(**SIZES, **REST, window=6),
    "gemma2": gpt(
        **SIZES,
        **REST,
        norms="sandwich",
        norm_zero_centered=True,
        embedding_scale=4.0,
        logit_softcap=3.0,
    ),
    "phi": gpt(**SIZES, **REST, norm="layer", parallel=True, shared_norm=True, head_bias=True),
    "bert": gpt(**SIZES, **REST, norms="post", embedding_norm=True, token_types=2),
}


def generate(name: str, tp: int, pp: int) -> list[int]:
    config = CONFIGS[name]
    with ParallelState(ParallelLayout(tp=tp, pp=pp)) as state:
        layers = split_layers(config.num_layers, pp)[state.index("pp")]
        model = GPT(config, state, layers=layers, seed=3).eval()
        executor = Executor(
            make_schedule("1f1b", pp, 1),
            [model],
            group=state.group("pp"),
            activation=lambda batch: TensorSpec((*batch["tokens"].shape, 16), torch.float32),
            device=state.device,
        )
        cache, tokens = model.new_cache(batch_size=1, max_length=24), [5, 9, 11]
        fed = torch.tensor([tokens])
        while len(tokens) < 20:
            batch = {"tokens": fed, "cache": cache}
            spec = TensorSpec((1, 1, config.vocab_size), torch.float32)
            (logits,) = executor.infer([batch], output=lambda _, spec=spec: spec)
            fed = logits[:, -1].argmax(-1, keepdim=True)
            tokens.append(int(fed))
        return tokens


@pytest.mark.parametrize(
    ("name", "tp", "pp"),
    [
        ("window", 1, 4),
        pytest.param("window", 1, 2, marks=pytest.mark.campaign),
        pytest.param("window", 2, 2, marks=pytest.mark.campaign),
        *((name, 2, 2) for name in ("gemma2", "phi", "bert")),
    ],
)
def test_generation_through_stages_is_that_of_one_process(ranks, name, tp, pp) -> None:
    expected = generate(name, 1, 1)
    assert len({*expected}) > 3
    for found in ranks(tp * pp, generate, name, tp, pp):
        assert found == expected
