"""A language model that takes images goes through pipelines with the gradients of the whole."""

from __future__ import annotations

import pytest
import torch
from mt_model import GPT, ImageInputConfig, expand_image_tokens, gpt, vit
from mt_parallel_state import ParallelLayout, ParallelState
from mt_pipeline import Executor, TensorSpec, make_schedule
from mt_schedule import split_layers

F64 = torch.float64
TOWER = vit(image_size=8, patch_size=4, hidden_size=8, num_layers=2, num_heads=2, pooling=None)
IMAGES = ImageInputConfig(tower=TOWER, token_id=30, feature_layers=(-1,))
CONFIG = gpt(vocab_size=32, hidden_size=16, num_layers=4, num_heads=2, images=IMAGES, tied=False)


def batches(number):
    """The second one has no image; its gradients go to the language model alone."""
    generator = torch.Generator().manual_seed(1)
    found = []
    for index in range(number):
        has_image = index != 1
        text = torch.randint(0, 30, (8,), generator=generator).tolist()
        row = expand_image_tokens([30, *text[:4]], IMAGES) if has_image else text
        tokens = torch.tensor([row, text])
        batch = {"tokens": tokens, "labels": tokens.roll(-1, 1)}
        if has_image:
            batch["pixel_values"] = torch.randn(1, 3, 8, 8, generator=generator, dtype=F64)
        found.append(batch)
    return found


def in_stages(name):
    """The losses of the last rank, and each gradient by its name."""
    with ParallelState(ParallelLayout(pp=2)) as state:
        schedule = make_schedule(name, stages=2, microbatches=4)
        cuts = split_layers(CONFIG.num_layers, schedule.depth)
        stages = [
            GPT(CONFIG, state, layers=cuts[s % schedule.depth], seed=3, dtype=F64)
            for s in schedule.stages_of(state.index("pp"))
        ]
        executor = Executor(
            schedule,
            stages,
            group=state.group("pp"),
            activation=lambda batch: TensorSpec((2, 8, 16), F64),
        )
        outputs = executor.run(batches(4), objective=lambda out, _: out["lm"])
        grads = {n: p.grad for stage in stages for n, p in stage.named_parameters()}
    return [(out["lm"].item(), out["tokens"].item()) for out in outputs], grads


@pytest.mark.parametrize("name", [pytest.param("1f1b", marks=pytest.mark.campaign), "zb-h1"])
def test_a_pipeline_trains_encoder_and_language_model(ranks, name):
    model, expected = GPT(CONFIG, seed=3, dtype=F64), []
    for batch in batches(4):
        losses = model(None, batch)
        losses["lm"].backward()
        expected.append((losses["lm"].item(), losses["tokens"].item()))
    whole, seen, found = dict(model.named_parameters()), set(), []
    for losses, grads in ranks(2, in_stages, name):
        found += losses
        for key, grad in grads.items():
            seen.add(key)
            if whole[key].grad is None:  # the encoder's final norm, behind what is taken
                assert key.startswith("images.tower.final_norm.")
                assert grad is None
                continue
            assert (grad - whole[key].grad).norm() <= 1e-10 * whole[key].grad.norm(), key
    assert seen == whole.keys()
    assert torch.allclose(torch.tensor(found, dtype=F64), torch.tensor(expected, dtype=F64))
