"""Delayed scaling does what a plain reimplementation does, step by step."""

import math
import random

import pytest
import torch
import torch.distributed as dist
from mt_fp8 import DelayedScales, Scaling, end_step, quantize, recipe

ROLES = ("input", "weight", "grad")
LIMITS = {"input": 448.0, "weight": 448.0, "grad": 57344.0}


class Plain:
    """A list of magnitudes and a factor for each tensor, in numbers of Python."""

    def __init__(self, how):
        self.how = how
        self.seen = {role: [] for role in ROLES}  # of this step
        self.past = {role: [0.0] * (how.history - 1) for role in ROLES}
        self.factor = dict.fromkeys(ROLES, 1.0)

    def update(self):
        for role in ROLES:
            if not self.seen[role]:
                continue
            window = [*self.past[role], max(self.seen[role])]
            amax = window[-1] if self.how.largest == "most_recent" else max(window)
            if 0 < amax < math.inf:
                self.factor[role] = LIMITS[role] / amax / 2**self.how.margin
            self.past[role] = window[1:]
            self.seen[role] = []


@pytest.mark.parametrize("largest", ["most_recent", "max"])
@pytest.mark.parametrize("history", [1, 2, 7])
@pytest.mark.parametrize("margin", [0, 3])
def test_200_steps_with_skips_and_recomputation(history, largest, margin):
    how = recipe("delayed", history=history, largest=largest, margin=margin)
    draws = random.Random(history)
    plain, scales = Plain(how), DelayedScales(how)
    for step in range(200):
        for role in ROLES:
            if draws.random() < 0.2:
                continue  # a layer that did not run: an expert without tokens
            for _ in range(draws.choice([1, 1, 3])):  # micro-batches
                size = draws.choice([0.0, 1e-3, 1.0, 50.0, math.inf]) * draws.uniform(0.5, 2)
                amax = torch.tensor(size)
                plain.seen[role].append(amax.item())
                scales.note(role, amax)
                if draws.random() < 0.5:  # recomputed for the backward
                    scales.note(role, amax)
        end_step([scales])
        plain.update()
        for role in ROLES:
            expected = torch.tensor(plain.factor[role]).item()
            assert math.isclose(scales.of(role).item(), expected, rel_tol=2e-7), (step, role)


def test_many_layers_are_updated_as_each_alone():
    how = recipe("delayed", history=3, largest="max")
    alone, together = ([DelayedScales(how) for _ in range(4)] for _ in range(2))
    for step in range(5):
        for layer, pair in enumerate(zip(alone, together, strict=True)):
            if (layer + step) % 3:
                for scales in pair:
                    scales.note("weight", torch.tensor(1.0 + layer * step))
        for scales in alone:
            end_step([scales])
        end_step(together)
        for one, other in zip(alone, together, strict=True):
            assert torch.equal(one.factor, other.factor)
            assert torch.equal(one.history, other.history)


def test_the_second_step_quantises_with_the_factor_of_the_first():
    how = recipe("delayed")
    scales = DelayedScales(how)
    x = torch.tensor([0.5, 900.0, -3.0])
    assert scales.of("input") is None
    scales.note("input", x.abs().max())
    end_step([scales])
    second = quantize(x, how, factor=scales.of("input"))
    assert torch.equal(second.dequantize(), quantize(x, Scaling()).dequantize())


def test_ranks_that_did_not_run_take_the_factor_of_those_that_did(ranks):
    ranks(2, _update_over_ranks)


def _update_over_ranks():
    scales = DelayedScales(recipe("delayed", history=2))
    if dist.get_rank():
        scales.note("grad", torch.tensor(7.0))
    end_step([scales], dist.group.WORLD)
    assert scales.factor.tolist() == [1.0, 1.0, 57344 / 7]
    assert scales.history.tolist() == [[-1.0, -1.0, -1.0], [0.0, 0.0, 7.0]]


def test_wrong_recipes_are_named():
    with pytest.raises(ValueError, match="has no history"):
        DelayedScales(recipe("mxfp8"))
    with pytest.raises(ValueError, match="of one recipe"):
        end_step([DelayedScales(recipe("delayed", history=n)) for n in (1, 3)])


def test_a_layer_that_may_rest_begins_with_its_own_magnitudes_whenever_it_first_runs():
    how = recipe("delayed")
    layers = [DelayedScales(how) for _ in range(2)]
    for step in range(3):
        layers[0].note("input", torch.tensor(2.0))
        if step == 1:
            layers[1].note("input", torch.tensor(4.0))
        end_step(layers, may_rest=True)
        assert layers[0].of("input") == 224
        again = DelayedScales(how)
        again.load_state_dict(layers[1].state_dict())
        for each in (layers[1], again):
            assert (each.of("input") is None) == (step < 1)
    assert layers[1].of("input") == 112
    end_step(layers)
    assert layers[1].of("grad") == 1
