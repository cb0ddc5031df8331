"""Stages with caches of their own generate what one process generates, through the executor."""

from __future__ import annotations

import pytest
import torch
from mt_model import GPT, gpt
from mt_parallel_state import ParallelLayout, ParallelState
from mt_pipeline import Executor, TensorSpec, make_schedule
from mt_schedule import split_layers

SIZES = {"vocab_size": 48, "hidden_size": 16, "num_layers": 4, "num_heads": 4, "num_kv_heads": 2}
CONFIG = gpt(**SIZES, ffn_size=24, max_sequence_length=24, window=6, init_std=0.3)


def generate(tp: int, pp: int) -> list[int]:
    with ParallelState(ParallelLayout(tp=tp, pp=pp)) as state:
        layers = split_layers(CONFIG.num_layers, pp)[state.index("pp")]
        model = GPT(CONFIG, state, layers=layers, seed=3).eval()
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
            spec = TensorSpec((1, 1, CONFIG.vocab_size), torch.float32)
            (logits,) = executor.infer([batch], output=lambda _, spec=spec: spec)
            fed = logits[:, -1].argmax(-1, keepdim=True)
            tokens.append(int(fed))
        return tokens


@pytest.mark.parametrize(("tp", "pp"), [(1, 2), (2, 2), (1, 4)])
def test_generation_through_stages_is_that_of_one_process(ranks, tp, pp) -> None:
    expected = generate(1, 1)
    assert len({*expected}) > 3
    for found in ranks(tp * pp, generate, tp, pp):
        assert found == expected
