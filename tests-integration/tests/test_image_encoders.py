"""An image encoder in pipelines has the same gradients as in the whole model."""

from __future__ import annotations

import pytest
import torch
from mt_model import VisionEncoder, vit
from mt_parallel_state import ParallelLayout, ParallelState
from mt_pipeline import Executor, TensorSpec, make_schedule
from mt_schedule import split_layers

F64 = torch.float64
CONFIG = vit(
    image_size=8,
    patch_size=4,
    hidden_size=16,
    num_layers=4,
    num_heads=2,
    num_classes=3,
    dropout=0.1,
    attention_dropout=0.1,
)


def batches(number):
    generator = torch.Generator().manual_seed(1)
    images = torch.randn(number, 2, 3, 8, 8, generator=generator, dtype=F64)
    return [
        {
            "images": images[i],
            "labels": torch.tensor([i % 3, -100 if i == 1 else 1]),
            "sample_ids": torch.tensor([2 * i, 2 * i + 1]),
        }
        for i in range(number)
    ]


def in_stages(name):
    """The losses of the last rank, and each gradient by its name."""
    with ParallelState(ParallelLayout(pp=2)) as state:
        schedule = make_schedule(name, stages=2, microbatches=4)
        cuts = split_layers(CONFIG.num_layers, schedule.depth)
        stages = [
            VisionEncoder(CONFIG, state, layers=cuts[s % schedule.depth], seed=3, dtype=F64)
            for s in schedule.stages_of(state.index("pp"))
        ]
        executor = Executor(
            schedule,
            stages,
            group=state.group("pp"),
            activation=lambda batch: TensorSpec((2, CONFIG.max_sequence_length, 16), F64),
        )
        outputs = executor.run(batches(4), objective=lambda out, _: out["classes"])
        grads = {n: p.grad for stage in stages for n, p in stage.named_parameters()}
    return [(out["classes"].item(), out["tokens"].item()) for out in outputs], grads


@pytest.mark.parametrize("name", [pytest.param("1f1b", marks=pytest.mark.campaign), "zb-h1"])
def test_a_pipeline_trains_the_whole_encoder(ranks, name):
    model, expected = VisionEncoder(CONFIG, seed=3, dtype=F64), []
    for batch in batches(4):
        losses = model(None, batch)
        losses["classes"].backward()
        expected.append((losses["classes"].item(), losses["tokens"].item()))
    whole, seen, found = dict(model.named_parameters()), set(), []
    for losses, grads in ranks(2, in_stages, name):
        found += losses
        for key, grad in grads.items():
            assert (grad - whole[key].grad).norm() <= 1e-10 * whole[key].grad.norm(), key
            seen.add(key)
    assert seen == whole.keys()
    assert [count for _, count in found] == [count for _, count in expected]
    assert torch.allclose(torch.tensor(found, dtype=F64), torch.tensor(expected, dtype=F64))
